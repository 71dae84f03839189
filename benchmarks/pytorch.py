"""PyTorch's Adam, bare and with PyTorch's GradScaler, on given gradients."""

from collections.abc import Callable

from benchmarks import contenders, workloads

#: The implementations of Adam's update, and the arguments that choose them.
UPDATES = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def step(workload: str, name: str, update: str = "default") -> Callable[[], object]:
    """Return one contender's step, with one of the `UPDATES`."""
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in workloads.shapes(workload)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, **UPDATES[update])
    if name == contenders.BARE:
        return optimizer.step
    # GradScaler unscales in place. A scale of 1 costs the same, and keeps the gradients for the next step.
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    loss = torch.tensor(1.0)

    def scaled() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return scaled
