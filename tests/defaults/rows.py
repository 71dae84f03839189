"""Code that uses the members that no docstring shows at work, and a list of the members that users do not call."""

_DENSE = "model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])\n"
_WITH_LOSS = f"{_DENSE}network = WithLossCell(model, tf.keras.losses.MeanSquaredError())\n"

# Class -> code in which its members are used, after the example of its docstring.
MEMBERS = {
    "ActivationReport": _DENSE
    + """
report = tf_lossscale.diagnosis.activation_report(model, tf.ones([2, 1]))
report.first, report.advice, report.plot()
""",
    "LossScaleMonitor": _DENSE
    + """
optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD())
model.compile(optimizer, "mse")
x = tf.ones([4, 1])
history = model.fit(x, x, epochs=2, callbacks=[tf_lossscale.LossScaleMonitor()])
model.compile(tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=True), "mse")
history = model.fit(x, x, callbacks=[tf_lossscale.LossScaleMonitor()])
assert set(history.history) == {"loss", "loss_scale", "skipped_steps"}
""",
    "LossScaleOptimizer": """
optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam())
weight = tf.Variable(1.0)
optimizer.build([weight])
optimizer.minimize(lambda: weight**2, [weight])
optimizer.loss_scale, optimizer.dynamic_counter, optimizer.iterations
optimizer.dynamic, optimizer.initial_scale, optimizer.dynamic_growth_steps
optimizer.scaler.growth_factor, optimizer.scaler.backoff_factor, optimizer.scaler.hysteresis
optimizer.scaler.min_scale, optimizer.scaler.max_scale, optimizer.scaler.dynamic_growth_steps
optimizer.last_step_skipped, optimizer.skipped_steps, optimizer.skipped_in_a_row
optimizer.learning_rate, optimizer.lr, optimizer.inner_optimizer
assert optimizer.variables() == optimizer.variables
assert len(optimizer.weights) == len(optimizer.get_weights())
optimizer.set_weights(optimizer.get_weights())
""",
    "PrecisionReport": """
report = tf_lossscale.diagnosis.precision_report([tf.constant([2.0**-20, 0.0])], ["weight"], 8)
report.step, report.scale, report.total.zeros, report.advice, report.counts.names
""",
    "amp.LossScaleManager": """
class Constant(LossScaleManager):
    def get_loss_scale(self):
        return 64.0
    def update_loss_scale(self, overflow):
        pass
manager = Constant()
manager.get_loss_scale(), manager.update_loss_scale(True)
manager.get_drop_overflow_update(), manager.get_update_cell()
""",
    "DynamicLossScaleManager": """
manager = DynamicLossScaleManager()
manager.get_drop_overflow_update(), manager.get_loss_scale()
manager.get_update_cell().get_loss_scale()
manager.scale_factor, manager.increase_ratio, manager.decrease_ratio, manager.scale_window
""",
    "DynamicLossScaleUpdateCell": """
cell = DynamicLossScaleUpdateCell(64.0, 2, 3)
cell.get_loss_scale()
""",
    "FixedLossScaleManager": """
manager = FixedLossScaleManager()
manager.get_loss_scale()
manager.get_drop_overflow_update(), manager.get_update_cell()
FixedLossScaleManager(drop_overflow_update=False).get_update_cell()
""",
    "FixedLossScaleUpdateCell": """
FixedLossScaleUpdateCell(128.0).get_loss_scale()
""",
    "Model": """
data = tf.data.Dataset.from_tensor_slices((tf.ones([4, 3]), tf.zeros([4], tf.int64))).batch(2)
network = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
metrics = {"Accuracy": tf.keras.metrics.SparseCategoricalAccuracy()}
model = Model(network, loss, tf.keras.optimizers.SGD(), metrics=metrics, amp_level="O2")
history = model.train(1, data)
model.eval(data)
model.predict(tf.ones([4, 3]))
""",
    "StaticLossScaler": """
StaticLossScaler(8.0)
StaticLossScaler(8.0).adjust(tf.constant(True))
""",
    "TrainOneStepCell": _WITH_LOSS
    + """
step = TrainOneStepCell(network, tf.keras.optimizers.SGD())
step.set_train()
step(tf.ones([2, 1]), tf.ones([2, 1]))
step.construct(tf.ones([2, 1]), tf.ones([2, 1]))
step.sens, step.weights
""",
    "TrainOneStepWithLossScaleCell": """
class Own(TrainOneStepWithLossScaleCell):
    def construct(self, *inputs):
        loss, gradients = self.loss_and_gradients(*inputs)
        overflow = self.update(gradients)
        return loss, overflow, self.scale_sense
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
network = WithLossCell(model, tf.keras.losses.MeanSquaredError())
step = Own(network, tf.keras.optimizers.SGD(), DynamicLossScaleManager().get_update_cell())
step.set_train()
step(tf.ones([2, 1]), tf.ones([2, 1]))
data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1])))
cell = TrainOneStepWithLossScaleCell(network, tf.keras.optimizers.SGD(), DynamicLossScaleManager())
cell.construct(tf.ones([2, 1]), tf.ones([2, 1]))
history = Model(cell).train(2, data, callbacks=[OverflowMonitor()])
""",
    "WithLossCell": _WITH_LOSS
    + """
network.trainable_variables
""",
    "legacy.DynamicLossScale": """
scale = DynamicLossScale()
scale.initial_loss_scale, scale.increment_period, scale.multiplier
DynamicLossScale.from_config(scale.get_config())
""",
    "legacy.FixedLossScale": """
scale = FixedLossScale(128)
scale.update([tf.constant([1.0])])
FixedLossScale.from_config(scale.get_config())
""",
    "legacy.LossScale": """
class Constant(LossScale):
    def __call__(self):
        return tf.constant(64.0)
    def update(self, grads):
        return None, True
    def get_config(self):
        return {}
Constant.from_config(Constant().get_config())
""",
    "ExponentialUpdateLossScaleManager": """
manager = ExponentialUpdateLossScaleManager(64.0, 2)
manager.update_loss_scale(tf.constant(True))
manager.current_loss_scale, manager.good_steps, manager.bad_steps
""",
    "legacy.FixedLossScaleManager": """
manager = FixedLossScaleManager(128)
manager.update_loss_scale(tf.constant(True))
""",
    "legacy.LossScaleManager": """
class Constant(LossScaleManager):
    def get_loss_scale(self):
        return tf.constant(4.0)
    def update_loss_scale(self, finite_grads):
        return tf.no_op()
Constant().update_loss_scale(tf.constant(True))
""",
    "MixedPrecisionLossScaleOptimizer": """
momentum = tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)
optimizer = MixedPrecisionLossScaleOptimizer(momentum, "dynamic")
weight = tf.Variable(1.0)
gradients = optimizer.compute_gradients(lambda: weight**2, [weight])
optimizer.apply_gradients(gradients)
optimizer.inner_optimizer, optimizer.get_name(), optimizer.get_slot_names()
optimizer.get_slot(weight, "momentum")
optimizer.loss_scale, optimizer.skipped_steps, optimizer.last_step_skipped
optimizer.variables()
""",
    "experimental.Policy": """
policy = Policy("mixed_float16")
policy.loss_scale, policy.should_cast_variables
set_policy(policy)
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1, dtype="float32")])
model.compile("sgd", "mse")
history = model.fit(tf.ones([4, 1]), tf.ones([4, 1]))
global_policy()
set_policy("float32")
""",
    "Adafactor": """
kernel = tf.Variable(tf.ones([2, 3]))
optimizer = tf_lossscale.optimizers.Adafactor([kernel])
handles = [
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None),
    optimizer.register_state_dict_pre_hook(lambda optimizer: None),
    optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: None),
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: None),
    optimizer.register_load_state_dict_post_hook(lambda optimizer: None),
]
loss = optimizer.step(lambda: tf.reduce_sum(kernel**2))
if hasattr(optimizer, "apply"):  # a method of Keras 3
    optimizer.apply([tf.ones(kernel.shape)], [kernel])
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.lr, optimizer.beta2_decay, optimizer.eps, optimizer.d, optimizer.weight_decay
optimizer.maximize, optimizer.foreach, optimizer.learning_rate, optimizer.defaults, optimizer.param_groups
Adafactor = tf_lossscale.optimizers.Adafactor
Adafactor.from_config(Adafactor().get_config())
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
model.compile(tf_lossscale.LossScaleOptimizer(Adafactor()), "mse")
history = model.fit(tf.ones([4, 1]), tf.ones([4, 1]))
""",
}

# Two names of one class.
SAME = {
    "TrainOneStep": "TrainOneStepCell",
    "TrainOneStepWithLossScale": "TrainOneStepWithLossScaleCell",
    "WithLoss": "WithLossCell",
}

# Classes that users derive from and whose members only the wrapper calls.
ONLY_TO_DERIVE_FROM = {"Family"}

# Caller -> members of public classes that it calls, and users do not. The loss scales of `core` are called by the step.
CALLED_BY = {
    "the wrapper and the step": {
        *("as_loss_scale", "check", "current_loss_scale", "good_steps", "may_skip", "move", "prepare"),
    },
    "fit": {"on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end"},
    "Model.train": {"as_callback"},
    "Keras": {"build", "update_step", "has_step_hooks"},
}
