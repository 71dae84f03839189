"""The table of loss scales: this package's own, and rules as a user writes them."""

import tensorflow as tf

import tf_lossscale
from tf_lossscale import amp, legacy


class Schedule(tf_lossscale.LossScale):
    """The scale falls with each step and never reacts to an overflow: no step is skipped."""

    def __init__(self):
        super().__init__()
        self.steps = tf.Variable(0.0, trainable=False)

    def __call__(self):
        return 64.0 / (1.0 + self.steps)

    def check(self, gradients):
        return tf.constant(True)

    def move(self, applied):
        return [self.steps.assign_add(1.0)]


class SmallNorms(tf_lossscale.DynamicLossScale):
    """Applies a step only if the norm of its gradients is at most 1000, and stores the norm."""

    def __init__(self):
        super().__init__(64.0)
        self.norm = tf.Variable(0.0, trainable=False)

    def check(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        with tf.control_dependencies([] if tf.executing_eagerly() else [self.norm.assign(norm)]):
            return norm <= 1000.0


class Quarters(tf_lossscale.LossScale):
    """An overflow divides the scale by four. `move` returns one result, and a variable hides a method."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(64.0, trainable=False)

    def __call__(self):
        return self.scale.read_value()

    def move(self, applied):
        return self.scale.assign(tf.where(applied, self.scale, self.scale / 4.0))


class Described(Quarters):
    """A rule with a config, and a step of its own in the config."""

    def __init__(self, divisor=4.0):
        super().__init__()
        self.divisor = divisor

    def move(self, applied):
        return [self.scale.assign(tf.where(applied, self.scale, self.scale / self.divisor))]

    def get_config(self):
        return {"divisor": self.divisor}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


class Counting(tf_lossscale.DynamicLossScale):
    """A dynamic scale that also counts its calls of `move`, and returns nothing except in a TF1 graph."""

    def __init__(self):
        super().__init__(64.0)
        self.moves = tf.Variable(0, trainable=False)

    def move(self, applied):
        moved = [super().move(applied), self.moves.assign_add(1)]
        return moved if not tf.compat.v1.executing_eagerly_outside_functions() else None


class Managing(amp.LossScaleManager):
    """A MindSpore manager in Python numbers."""

    loss_scale = 64.0

    def get_loss_scale(self):
        return self.loss_scale

    def update_loss_scale(self, overflow):
        self.loss_scale = self.loss_scale / 2 if overflow else self.loss_scale


#: Each rule by name: a function that makes it, with an initial scale of 64.
RULES = {
    "dynamic": lambda: tf_lossscale.DynamicLossScale(64.0),
    "dynamic_hysteresis": lambda: tf_lossscale.DynamicLossScale(64.0, hysteresis=2),
    "fixed": lambda: tf_lossscale.FixedLossScale(64.0),
    "fixed_skip": lambda: tf_lossscale.FixedLossScale(64.0, skip_nonfinite=True),
    "shared": lambda: tf_lossscale.SharedLossScale(64.0),
    "mindspore_dynamic": lambda: amp.DynamicLossScaleManager(64),
    "mindspore_fixed": lambda: amp.FixedLossScaleManager(64.0, drop_overflow_update=True),
    "mindspore_applying": lambda: amp.FixedLossScaleManager(64.0, drop_overflow_update=False),
    "mindspore_own": Managing,
    "tf23_dynamic": lambda: legacy.DynamicLossScale(64.0),
    "contrib": lambda: legacy.ExponentialUpdateLossScaleManager(64.0, 2000, decr_every_n_nan_or_inf=1, decr_ratio=0.5),
    "tf23_fixed": lambda: legacy.FixedLossScale(64.0),
    "schedule": Schedule,
    "small_norms": SmallNorms,
    "quarters": Quarters,
    "described": Described,
    "counting": Counting,
}
#: The rules that no package contains.
OF_USERS = ("schedule", "small_norms", "quarters", "described", "counting", "mindspore_own")
