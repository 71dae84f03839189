"""A model of each library of docs/libraries.md under mixed_float16, with a forced overflow.

`python -m tests.libraries.trials keras_hub` runs one. Libraries that need Keras 2 need TF_USE_LEGACY_KERAS=1.
"""

import sys
import tempfile

import numpy as np
import tensorflow as tf

from tf_lossscale import LossScaleOptimizer

keras = tf.keras
RANDOM = np.random.default_rng(0)

TODAY, TODAY_KERAS_2, TF_2_15 = "TensorFlow 2.21", "TensorFlow 2.21, Keras 2", "TensorFlow 2.15"

# For each library: what it is tried with, and the trial.
TRIALS = {}


def trial(library, tried_with):
    """Enters a function as the trial of a library."""
    return lambda function: TRIALS.setdefault(library, (tried_with, function))


def normal(*shape):
    """Returns float32 numbers."""
    return RANDOM.normal(size=(16, *shape)).astype("float32")


def weights_of(model):
    """Returns the values of the trained weights."""
    return [tf.convert_to_tensor(weight).numpy() for weight in model.trainable_weights]


def trains(model, *data, **fit):
    """Fits a model, and returns the losses."""
    before = weights_of(model)
    losses = model.fit(*data, verbose=0, **fit).history["loss"]
    assert np.isfinite(losses).all()
    assert any((old != new).any() for old, new in zip(before, weights_of(model)))
    return losses


def skips(model, *data, **fit):
    """Fits a model for one step, which overflows."""
    before, scale = weights_of(model), float(model.optimizer.loss_scale)
    model.fit(*data, verbose=0, **fit)
    assert float(model.optimizer.loss_scale) == scale / 2
    assert all((old == new).all() for old, new in zip(before, weights_of(model)))


def trains_and_skips(model, x, y, loss="mse", spoil=None, **fit):
    """Fits a model; then a step overflows, because of a scale of 2**100 or because `spoil` spoils the labels."""
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024), loss=loss)
    trains(model, x, y, batch_size=8, epochs=3, **fit)
    if spoil is None:
        model.optimizer.set_state({"loss_scale": 2.0**100, "dynamic_counter": 0})
    skips(model, x, y if spoil is None else spoil(y), batch_size=16, **fit)


def refuses_float16(make, *data, **fit):
    """Fails with float16 layers and a bare optimizer; with float32 layers and ours it trains."""
    try:
        model = make()
        model.compile(keras.optimizers.Adam(), "mse")
        model.fit(*data, verbose=0, **fit)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        keras.mixed_precision.set_global_policy("float32")
        trains_and_skips(make(), *data, spoil=lambda y: y * np.inf, **fit)
    else:
        raise AssertionError("it trains in float16 now: docs/libraries.md is to say so")


def dense(hidden, inputs=4):
    """Returns a model with one hidden layer."""
    return keras.Sequential([keras.Input((inputs,)), hidden, keras.layers.Dense(1, dtype="float32")])


# Keras 3. ---------------------------------------------------------------------------------------------------------


@trial("keras_hub", TODAY)
def _():
    import keras_hub

    ids = RANDOM.integers(1, 50, size=(16, 6))
    tokens = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids * 0 + 1}
    for lora in (False, True):
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8, max_sequence_length=6
        )
        if lora:
            backbone.enable_lora(2)
        model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trains_and_skips(model, tokens, RANDOM.integers(2, size=16), loss)


@trial("keras_rs", TODAY)
def _():
    import keras_rs

    user, x = keras.Input((), dtype="int32"), keras.Input((8,))
    both = keras.layers.Concatenate()([keras.layers.Embedding(10, 8)(user), x])
    crossed = keras_rs.layers.FeatureCross(projection_dim=4)(both, both)
    model = keras.Model([user, x], keras.layers.Dense(1, dtype="float32")(crossed))
    trains_and_skips(model, [RANDOM.integers(10, size=16), normal(8)], normal(1))


@trial("keras_tuner", TODAY)
def _():
    import keras_tuner

    made = []

    def build(parameters):
        keras.mixed_precision.set_global_policy("mixed_float16")  # the tuner has set it back
        model = dense(keras.layers.Dense(parameters.Int("units", 2, 4)))
        model.compile(LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**100), "mse")
        made.append(model)
        return model

    with tempfile.TemporaryDirectory() as folder:
        search = keras_tuner.RandomSearch(build, "loss", max_trials=2, directory=folder)
        search.search(normal(4), normal(1), batch_size=8, verbose=0)
    state = made[-1].optimizer.state()
    assert (state["loss_scale"], state["skipped_steps"], state["total_steps"]) == (2.0**98, 2, 2)


@trial("keras", TODAY)
def _():
    model = dense(keras.layers.Dense(8))
    trains_and_skips(model, normal(4), normal(1))
    try:
        model.quantize("int8")
    except ValueError as error:
        assert "float16" in str(error)
    else:
        raise AssertionError("it quantizes float16 layers now: docs/libraries.md is to say so")
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    dense(keras.layers.Dense(8)).quantize("int8")


# Keras 2. ---------------------------------------------------------------------------------------------------------


@trial("spektral", TODAY_KERAS_2)
def _():
    import spektral

    x, adjacency = keras.Input((5, 4)), keras.Input((5, 5))
    hidden = spektral.layers.GCNConv(8, activation="relu")([x, adjacency])
    model = keras.Model([x, adjacency], keras.layers.Dense(1, dtype="float32")(hidden))
    trains_and_skips(model, [normal(5, 4), np.tile(np.eye(5, dtype="float32"), (16, 1, 1))], normal(5, 1))


@trial("tensorflow_gnn", TODAY_KERAS_2)
def _():
    import tensorflow_gnn as tfgnn

    edges = tfgnn.Adjacency.from_indices(("node", [0, 1, 2]), ("node", [1, 2, 0]))
    graph = tfgnn.GraphTensor.from_pieces(
        node_sets={"node": tfgnn.NodeSet.from_fields(sizes=[3], features={"hidden_state": normal(4)[:3]})},
        edge_sets={"edge": tfgnn.EdgeSet.from_fields(sizes=[3], adjacency=edges)},
    )
    graphs = (
        tf.data.Dataset.from_tensors(graph).repeat(16).batch(8).map(lambda batch: batch.merge_batch_to_components())
    )
    inputs = keras.Input(type_spec=graphs.element_spec)
    convolution = tfgnn.keras.layers.SimpleConv(
        keras.layers.Dense(8, "relu"), "mean", receiver_tag=tfgnn.TARGET, receiver_feature="hidden_state"
    )
    update = tfgnn.keras.layers.NodeSetUpdate(
        {"edge": convolution}, tfgnn.keras.layers.NextStateFromConcat(keras.layers.Dense(8))
    )
    updated = tfgnn.keras.layers.GraphUpdate(node_sets={"node": update})(inputs)
    pooled = tfgnn.keras.layers.Pool(tfgnn.CONTEXT, "mean", node_set_name="node")(updated)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(pooled))
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=1024), "mse")
    data = tf.data.Dataset.zip((graphs, tf.data.Dataset.from_tensor_slices(normal(1)).batch(8)))
    trains(model, data)
    model.optimizer.set_state({"loss_scale": 2.0**100, "dynamic_counter": 0})
    skips(model, data.take(1))


@trial("transformers", TODAY_KERAS_2)
def _():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.TFBertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes))
    adam, _ = transformers.create_optimizer(0.01, num_train_steps=100, num_warmup_steps=5, weight_decay_rate=0.01)
    optimizer = LossScaleOptimizer(adam, initial_scale=1024)
    model.compile(optimizer=optimizer)
    tokens = RANDOM.integers(50, size=(32, 8))
    data = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": tokens.sum(axis=1) % 2}
    model(data)  # creates the weights
    losses = trains(model, data, batch_size=8, epochs=5)
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer.iterations == 20
    optimizer.set_state({"loss_scale": 2.0**100, "dynamic_counter": 0})
    skips(model, data, batch_size=32)


@trial("tensorflow_ranking", TF_2_15)
def _():
    import tensorflow_ranking

    x = keras.Input((6, 4))
    scores = keras.layers.Flatten(dtype="float32")(keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(x)))
    relevance = RANDOM.integers(3, size=(16, 6)).astype("float32")
    loss = tensorflow_ranking.keras.losses.ApproxNDCGLoss()
    trains_and_skips(keras.Model(x, scores), normal(6, 4), relevance, loss)


@trial("larq", TF_2_15)
def _():
    import larq

    hidden = larq.layers.QuantDense(8, kernel_quantizer="ste_sign", kernel_constraint="weight_clip")
    trains_and_skips(dense(hidden), normal(4), normal(1))


@trial("deepctr", TF_2_15)
def _():
    from deepctr import feature_column, models

    columns = [feature_column.SparseFeat("user", 10, embedding_dim=4), feature_column.DenseFeat("x", 1)]
    features = {"user": RANDOM.integers(10, size=16), "x": normal(1)}
    model = models.DeepFM(columns, columns, dnn_hidden_units=(8,))
    trains_and_skips(model, features, RANDOM.integers(2, size=(16, 1)).astype("float32"), "binary_crossentropy")


@trial("tensorflow_model_optimization", TODAY_KERAS_2)
def _():
    import tensorflow_model_optimization as tfmot

    linear = tfmot.clustering.keras.CentroidInitialization.LINEAR
    update = tfmot.sparsity.keras.UpdatePruningStep()
    for change, callbacks in (
        (tfmot.sparsity.keras.prune_low_magnitude, [update]),
        (lambda model: tfmot.clustering.keras.cluster_weights(model, 3, linear), []),
        (tfmot.quantization.keras.quantize_model, []),
    ):
        keras.mixed_precision.set_global_policy("mixed_float16")
        refuses_float16(lambda: change(dense(keras.layers.Dense(8))), normal(4), normal(1), callbacks=callbacks)  # noqa: B023


@trial("qkeras", TF_2_15)
def _():
    import qkeras

    refuses_float16(lambda: dense(qkeras.QDense(8, kernel_quantizer="quantized_bits(4,0,1)")), normal(4), normal(1))


# Libraries that own the tape. ---------------------------------------------------------------------------------------


@trial("tensorflow_recommenders", TODAY_KERAS_2)
def _():
    import tensorflow_recommenders as tfrs

    def tiny_error(y_true, y_pred, sample_weight):
        return 1e-7 * tf.reduce_mean(tf.cast(y_pred - y_true, tf.float32) ** 2)  # the task casts both to float16

    class Rating(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.users, self.films = keras.layers.Embedding(20, 4, "normal"), keras.layers.Embedding(20, 4, "ones")
            self.score = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-12))
            self.task = tfrs.tasks.Ranking(loss=tiny_error)

        def compute_loss(self, features, training=False):
            score = self.score(self.users(features["user"]) * self.films(features["film"]))
            return self.task(labels=features["rating"], predictions=score)

    class Scaled(Rating):
        def compute_loss(self, *args, **kwargs):
            return self.optimizer.scale_inside(super().compute_loss)(*args, **kwargs)

    features = {**{name: RANDOM.integers(20, size=16) for name in ("user", "film")}, "rating": normal(1)}
    bad = {**features, "rating": features["rating"] * np.inf}

    def progress(model_class):
        keras.utils.set_random_seed(0)
        model, optimizer = model_class(), LossScaleOptimizer(keras.optimizers.SGD(2.0**20))
        model.compile(optimizer=optimizer)
        model.fit(bad, batch_size=16, verbose=0)  # creates the variables
        skips(model, bad, batch_size=16)
        assert float(optimizer.loss_scale) == 2.0**13
        losses = [model.evaluate(features, return_dict=True, verbose=0)["loss"]]
        model.fit(features, batch_size=16, epochs=20, verbose=0)
        losses.append(model.evaluate(features, return_dict=True, verbose=0)["loss"])
        return losses[1] / losses[0]

    assert progress(Scaled) < 0.95
    assert progress(Rating) > 0.999, "its gradients do not vanish: the trial shows nothing"


@trial("tf_agents", TF_2_15)
def _():
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.networks import network, sequential
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step, trajectory

    seen = tensor_spec.TensorSpec([4], tf.float32)
    action = tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1)

    class Net(network.Network):
        def __init__(self, input_tensor_spec, name="Net"):
            super().__init__(input_tensor_spec, state_spec=(), name=name)
            self.hidden, self.out = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)

        def call(self, observation, step_type=None, network_state=(), training=False):
            return tf.cast(self.out(self.hidden(observation)), tf.float32), network_state

    class Scaled(dqn_agent.DqnAgent):
        def _loss(self, *args, **kwargs):
            return self._optimizer.scale_inside(super()._loss)(*args, **kwargs)

    def agent_of(agent_class, net, optimizer):
        counter = tf.Variable(0, dtype=tf.int64)
        return agent_class(
            time_step.time_step_spec(seen), action, net, optimizer, gradient_clipping=1.0, train_step_counter=counter
        )

    def stays(agent_class, weight):
        """Returns whether no weight moves, and the scale after the step."""
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
        agent = agent_of(agent_class, Net(seen), optimizer)
        agent.initialize()
        steps = tf.ones([16, 2], tf.int32)
        experience = trajectory.Trajectory(
            steps, tf.constant(normal(2, 4)), steps, (), steps, tf.ones([16, 2]), tf.ones([16, 2])
        )
        before = weights_of(agent._q_network)
        assert tf.math.is_finite(agent.train(experience, weights=tf.fill([16], weight)).loss)
        same = all((old == new).all() for old, new in zip(before, weights_of(agent._q_network)))
        return same, float(optimizer.loss_scale)

    assert stays(Scaled, 1e-8) == (False, 2.0**15)
    assert stays(Scaled, 1e5) == (True, 2.0**14)
    assert stays(dqn_agent.DqnAgent, 1e-8) == (True, 2.0**15), "its gradients do not vanish: the trial shows nothing"
    try:
        agent_of(dqn_agent.DqnAgent, sequential.Sequential([keras.layers.Dense(2)]), keras.optimizers.SGD(0.1))
    except (TypeError, tf.errors.InvalidArgumentError):
        return
    raise AssertionError("its Sequential takes float16 layers now: docs/libraries.md is to say so")


@trial("art", TODAY)
def _():
    from art.attacks.evasion import FastGradientMethod
    from art.estimators.classification import TensorFlowV2Classifier

    layers = keras.layers.Dense(8, "relu"), keras.layers.Dense(2, dtype="float32")
    network = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01))

    class Scaled(keras.Model):
        def __init__(self):
            super().__init__(dtype="float32")
            self.network = network

        def call(self, x, training=False):
            return optimizer.scale_gradient(self.network(x, training=training))

    model, loss = Scaled(), keras.losses.CategoricalCrossentropy(from_logits=True)
    model(normal(4))
    options = {"nb_classes": 2, "input_shape": (4,), "loss_object": loss}
    classifier = TensorFlowV2Classifier(model, optimizer=optimizer, **options)
    x, y, before = normal(4), np.eye(2, dtype="float32")[np.arange(16) % 2], weights_of(network)
    classifier.fit(x, y, batch_size=16, nb_epochs=3)
    assert any((old != new).any() for old, new in zip(before, weights_of(network)))
    optimizer.set_state({"loss_scale": 2.0**100, "dynamic_counter": 0})
    before = weights_of(network)
    classifier.fit(x, y, batch_size=16, nb_epochs=1)
    assert float(optimizer.loss_scale) == 2.0**99
    assert all((old == new).all() for old, new in zip(before, weights_of(network)))
    attacked = TensorFlowV2Classifier(network, **options)
    assert np.abs(FastGradientMethod(attacked, eps=0.5).generate(x, y) - x).max() > 0


@trial("deepxde", TODAY)
def _():
    keras.mixed_precision.set_global_policy("float32")
    import deepxde

    def residual(x, y):
        return deepxde.grad.hessian(y, x) + np.pi**2 * tf.sin(np.pi * x)

    line, optimizer = deepxde.geometry.Interval(-1, 1), LossScaleOptimizer(keras.optimizers.Adam(0.001))
    ends = deepxde.icbc.DirichletBC(line, lambda x: 0.0, lambda _, is_at_end: is_at_end)
    data = deepxde.data.PDE(line, residual, ends, 16, 2, solution=lambda x: np.sin(np.pi * x), num_test=100)
    model = deepxde.Model(data, deepxde.nn.FNN([1, 50, 50, 50, 1], "tanh", "Glorot uniform"))
    factor = tf.Variable(1.0, trainable=False)
    loss = lambda y, p: optimizer.scale_loss(factor * tf.reduce_mean((y - p) ** 2))  # noqa: E731
    model.compile(optimizer, loss=loss, metrics=["l2 relative error"])
    history, _ = model.train(iterations=300, display_every=300)
    assert history.metrics_test[-1][0] < 0.2
    factor.assign(np.inf)
    model.train(iterations=1)
    assert float(optimizer.loss_scale) == 2.0**14


@trial("gpflow", TODAY)
def _():
    import gpflow

    kernel = gpflow.kernels.SquaredExponential()
    model = gpflow.models.GPR((normal(4).astype("float64"), normal(1).astype("float64")), kernel=kernel)
    optimizer, before = LossScaleOptimizer(keras.optimizers.Adam(0.1)), float(model.training_loss())
    for _ in range(5):
        optimizer.minimize(model.training_loss, model.trainable_variables)
    assert float(model.training_loss()) < before
    values = [variable.numpy() for variable in model.trainable_variables]
    optimizer.minimize(lambda: model.training_loss() * np.inf, model.trainable_variables)
    assert optimizer.skipped_steps == 1
    assert [variable.numpy() for variable in model.trainable_variables] == values


def compiled():
    """Returns a compiled model of Keras 3."""
    model = dense(keras.layers.Dense(8, "relu"))
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01)), keras.losses.MeanSquaredError())
    return model


@trial("scikeras", TODAY)
def _():
    import pickle

    from scikeras.wrappers import KerasRegressor

    regressor = KerasRegressor(compiled, epochs=3, verbose=0).fit(normal(4), normal(1)[:, 0])
    loaded = pickle.loads(pickle.dumps(regressor))
    optimizer = loaded.model_.optimizer
    scale = float(optimizer.loss_scale)
    assert scale == float(regressor.model_.optimizer.loss_scale)
    loaded.partial_fit(normal(4) * 1e6, normal(1)[:, 0])
    assert float(optimizer.loss_scale) == scale / 2


@trial("gin", TODAY)
def _():
    import gin

    @gin.configurable
    class Scaled(LossScaleOptimizer):
        pass

    gin.external_configurable(keras.optimizers.Adam, name="InnerAdam")
    gin.parse_config("Scaled.inner_optimizer = @InnerAdam()\nScaled.initial_scale = 64.0")
    model = dense(keras.layers.Dense(8, "relu"))
    model.compile(Scaled(), "mse")
    trains(model, normal(4), normal(1))
    skips(model, normal(4), normal(1) * np.inf)


@trial("hydra", TODAY)
def _():
    from hydra.utils import instantiate

    inner = {"_target_": "tensorflow.keras.optimizers.Adam", "learning_rate": 0.01}
    config = {"_target_": "tf_lossscale.LossScaleOptimizer", "initial_scale": 64.0, "inner_optimizer": inner}
    model = dense(keras.layers.Dense(8, "relu"))
    model.compile(instantiate(config), "mse")
    trains(model, normal(4), normal(1))
    skips(model, normal(4), normal(1) * np.inf)


def keeps_a_model(copied):
    """A copy of a trained model has its scale and counts, and trains."""
    model = compiled()
    trains(model, normal(4), normal(1))
    skips(model, normal(4), normal(1) * np.inf)
    copy = copied(model)
    assert copy.optimizer.state() == model.optimizer.state()
    trains(copy, normal(4), normal(1))


@trial("dill", TODAY)
def _():
    import dill

    keeps_a_model(lambda model: dill.loads(dill.dumps(model)))


@trial("cloudpickle", TODAY)
def _():
    import cloudpickle

    keeps_a_model(lambda model: cloudpickle.loads(cloudpickle.dumps(model)))


@trial("joblib", TODAY)
def _():
    import joblib

    with tempfile.TemporaryDirectory() as folder:
        keeps_a_model(lambda model: joblib.load(joblib.dump(model, f"{folder}/model")[0]))


@trial("optuna", TODAY)
def _():
    import optuna

    def objective(trial):
        model = dense(keras.layers.Dense(8, "relu"))
        rate = trial.suggest_float("learning_rate", 0.001, 0.1, log=True)
        model.compile(LossScaleOptimizer(keras.optimizers.Adam(rate)), "mse")
        losses = trains(model, normal(4), normal(1))
        skips(model, normal(4), normal(1) * np.inf)
        return losses[-1]

    study = optuna.create_study()
    study.optimize(objective, n_trials=3)
    assert len(study.trials) == 3


if __name__ == "__main__":
    keras.mixed_precision.set_global_policy("mixed_float16")
    TRIALS[sys.argv[1]][1]()
