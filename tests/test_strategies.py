import tensorflow as tf


def test_collectives_of_two_strategies_in_one_process_do_not_meet():
    for size in (1, 2, 3):
        strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

        @tf.function
        def total(strategy=strategy, size=size):
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(size)))

        for replica in strategy.experimental_local_results(total()):
            tf.debugging.assert_equal(replica, 2 * tf.ones(size))
