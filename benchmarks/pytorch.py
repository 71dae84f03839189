"""Steps of PyTorch's Adam on fixed gradients, with and without PyTorch's GradScaler."""

from collections.abc import Callable

from benchmarks import contenders, workloads

#: Maps each of PyTorch's implementations of Adam to the constructor arguments that select it.
UPDATES = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def step(workload: str, name: str, update: str = "default") -> Callable[[], object]:
    """Return a function that takes one step of PyTorch's Adam. If `name` is not `contenders.BARE`, use GradScaler."""
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in workloads.shapes(workload)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, **UPDATES[update])
    if name == contenders.BARE:
        return optimizer.step
    # GradScaler unscales gradients in place. With a scale of 1 the gradients stay the same in every step, and a step
    # costs as much as with any other scale.
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    loss = torch.tensor(1.0)

    def scaled() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return scaled
