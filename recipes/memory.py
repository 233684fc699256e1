"""Memory of every method, measured: `python -m lowcomm.recipes.memory` (`make memory`) writes docs/memory.md.

Two local processes train a model of equal parameters. After every step of a round, exchanges in flight being
waited for, all tensors alive in the process are counted, each storage once, without the parameters, their gradients and
the inner optimizer's state. Buffers that are kept to be used again count; what the backend holds inside does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lowcomm.compress import E3M0, Int4, TopK
from lowcomm.optim import (
    CO2,
    DESLOC,
    MTDAO,
    AutoLoCo,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    HierarchicalLocalSGD,
    LocalSGD,
    LowCommOptimizer,
    SignMomentum,
    SlowMo,
    StreamingDiLoCo,
)
from lowcomm.recipes.launch import Report, launch
from torch import Tensor, nn

__all__ = ["METHODS", "measure", "page"]

BLOCKS, ELEMENTS, H = 8, 1 << 15, 4
Build = Callable[[Any], LowCommOptimizer]


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters)


STILL: dict[str, Any] = {"loss_power": 0.0}
QUARTERS: dict[str, Any] = {"fragments": "bytes", "num_fragments": 4}
METHODS: dict[str, Build] = {
    "LocalSGD": lambda ps: LocalSGD(sgd(ps), sync_every=H),
    "LocalSGD, Int4": lambda ps: LocalSGD(sgd(ps), sync_every=H, compress=Int4(), feedback=None),
    "FedAvg": lambda ps: FedAvg(sgd(ps), samples=H, batch_size=1),
    "HierarchicalLocalSGD": lambda ps: HierarchicalLocalSGD(sgd(ps), sync_every={2: 1, H: None}),
    "DiLoCo": lambda ps: DiLoCo(sgd(ps), sync_every=H),
    "DiLoCo, Int4, no feedback": lambda ps: DiLoCo(sgd(ps), sync_every=H, compress=Int4(), feedback=None),
    "DiLoCo, TopK, EF14": lambda ps: DiLoCo(sgd(ps), sync_every=H, compress=TopK()),
    "AutoLoCo": lambda ps: AutoLoCo(sgd(ps), sync_every=H, **STILL),
    "SlowMo": lambda ps: SlowMo(sgd(ps), sync_every=H),
    "SignMomentum": lambda ps: SignMomentum(sgd(ps), sync_every=H),
    "StreamingDiLoCo, 4 fragments, delay 1": lambda ps: StreamingDiLoCo(sgd(ps), sync_every=H, delay=1, **QUARTERS),
    "StreamingDiLoCo, 4 fragments, delay 3": lambda ps: StreamingDiLoCo(sgd(ps), sync_every=H, delay=3, **QUARTERS),
    "StreamingDiLoCo, 4 fragments, E3M0": lambda ps: StreamingDiLoCo(
        sgd(ps), sync_every=H, delay=1, compress=E3M0(), feedback=None, **QUARTERS
    ),
    "EagerDiLoCo(delayed=True)": lambda ps: EagerDiLoCo(sgd(ps), sync_every=H, delayed=True),
    "EagerDiLoCo": lambda ps: EagerDiLoCo(sgd(ps), sync_every=H),
    "CO2": lambda ps: CO2(sgd(ps), sync_every=H),
    "DESLOC, AdamW": lambda ps: DESLOC(adam(ps), sync_every={"params": H, "exp_avg": H, "exp_avg_sq": H}),
    "MTDAO, one momentum": lambda ps: MTDAO(ps, sync_every=H),
}


def measure(rank: int, world_size: int, report: Report | None = None) -> dict[str, tuple[float, float]]:
    """Least and most extra memory over a round, in float32 numbers per parameter, of every method."""
    return {name: extra(build, rank) for name, build in METHODS.items()}


def extra(build: Build, rank: int) -> tuple[float, float]:
    """(least, most) numbers per parameter that a method adds, over a round after two that fill its buffers."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(BLOCKS))
    gc.collect()
    gc.freeze()  # what there is now is not looked at again
    optimizer = build(model.parameters())
    found = []
    for step in range(3 * H):
        for p in model.parameters():
            p.grad = torch.full_like(p, (-1.0) ** rank)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
        for exchange in optimizer._in_flight:
            exchange.work.wait()
        if step >= 2 * H:
            known = set(storages([*inner_state(optimizer), *model.parameters()]))
            found.append(sum(size for key, size in storages(every_tensor()).items() if key not in known))
    gc.unfreeze()
    floats = BLOCKS * ELEMENTS * 4
    return min(found) / floats, max(found) / floats


def every_tensor() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def inner_state(optimizer: LowCommOptimizer) -> list[Tensor]:
    states = [state for inner in optimizer._inners for state in inner.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of every storage, by address."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


HEAD = """# Memory

What a method keeps in memory beside parameters, gradients and the inner optimizer's state, as float32 numbers for each
parameter: anchor, outer momentum, send buffers, residual, what is in flight, and encoded messages, whose buffers are
kept. "least" and "most" are over the steps of a round, at the end of a step. Measured by `make memory` with two
processes and {elements:,} parameters; a test measures again.

| method | least | most |
|---|---|---|
"""

TAIL = """
A codec needs an anchor (LocalSGD has none otherwise) and buffers for encoded messages of all workers; error feedback
needs a residual and, so that a failed exchange changes nothing, a second one that becomes the residual when all has
gone well. `offload="cpu"` moves anchor and outer buffers of a GPU's parameters to pinned host memory: two numbers for
each parameter less on the device with DiLoCo; on a CPU it changes nothing.
"""


def page(found: dict[str, tuple[float, float]]) -> str:
    """The page from the numbers of one worker."""
    rows = [f"| {name} | {least:.2f} | {most:.2f} |\n" for name, (least, most) in found.items()]
    return HEAD.format(elements=BLOCKS * ELEMENTS) + "".join(rows) + TAIL


if __name__ == "__main__":
    print(page(launch(measure, 2)[0]), end="")
