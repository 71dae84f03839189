"""Which conditional a step uses."""

import pytest
import tensorflow as tf

from tf_lossscale.core.fast import branching


@pytest.mark.parametrize("devices, loops", [(["CPU"], True), (["CPU", "GPU"], False), (["CPU", "TPU"], False)])
def test_a_compiled_step_uses_a_loop_only_on_a_machine_without_accelerators(monkeypatch, devices, loops):
    found = [tf.config.LogicalDevice(f"/device:{kind}:0", kind) for kind in devices]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: found)
    answers = []

    @tf.function(jit_compile=True)
    def step():
        answers.append(branching.loops())
        return tf.constant(0)

    step()
    assert answers == [loops]
