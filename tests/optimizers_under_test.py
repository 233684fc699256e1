"""The optimizer classes that the conformance suite runs over, and the toy problem that its tests share.

A new class joins by one line in `ENTRIES`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lowcomm.compress import Int4, Int8, TopK
from lowcomm.optim import (
    CO2,
    DESLOC,
    MTDAO,
    QSR,
    AutoLoCo,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    HierarchicalLocalSGD,
    LocalSGD,
    LowCommOptimizer,
    QuasiHyperbolic,
    SignMomentum,
    SlowMo,
    StreamingDiLoCo,
)
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

Inner = Callable[..., Optimizer]


@dataclass(frozen=True)
class Entry:
    """One optimizer class as the suite builds it.

    Attributes:
        cls: the class.
        options: constructor keywords with which everything is synchronised at steps `first`, `first + period`, ...
        period: steps between syncs of all parameters.
        first: step of the first one.
        agrees: what all workers have in common after such a sync: "all" (parameters and outer state), "outer" (outer
            state only), or nothing before "flush".
        inners: the inner optimizers it goes with; the first is used where it does not matter. () means all common ones.
        apart: options with which it does not synchronise in the first 50 steps.
        name: id in test names, when one class is listed twice.
        busy: steps before the first sync of everything at which something is sent.
        elementwise: what happens to a parameter does not depend on which others are in the same wrapper.
    """

    cls: type[LowCommOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    period: int = 3
    first: int = 3
    agrees: str = "all"
    inners: tuple[str, ...] = ()
    apart: dict[str, Any] = field(default_factory=lambda: {"sync_every": 99})
    name: str = ""
    busy: tuple[int, ...] = ()
    elementwise: bool = True

    @property
    def inner(self) -> str:
        return self.inners[0] if self.inners else "adamw"

    def wrap(self, parameters: Any, **options: Any) -> LowCommOptimizer:
        """The optimizer around its usual inner one."""
        return self(INNERS[self.inner](parameters), **options)

    @property
    def quiet(self) -> list[int]:
        """Steps before the first sync at which nothing is communicated."""
        return [step for step in range(1, self.first) if step not in self.busy]

    @property
    def twice(self) -> int:
        """Steps that contain two syncs."""
        return self.first + self.period

    def is_sync(self, step: int) -> bool:
        return step >= self.first and (step - self.first) % self.period == 0

    @property
    def id(self) -> str:
        return self.name or self.cls.__name__

    def __str__(self) -> str:
        return self.id

    def __call__(self, inner: Any, **options: Any) -> LowCommOptimizer:
        return self.cls(inner, **{**self.options, **options})


INNERS: dict[str, Inner] = {
    "sgd": lambda params, lr=0.1: SGD(params, lr=lr),
    "momentum": lambda params, lr=0.01: SGD(params, lr=lr, momentum=0.9),
    "adamw": lambda params, lr=0.01: AdamW(params, lr=lr, eps=1e-4),
    "adagrad": lambda params, lr=0.03: Adagrad(params, lr=lr),
    "nadam": lambda params, lr=0.01: NAdam(params, lr=lr),
    "quasi": lambda params, lr=0.01: QuasiHyperbolic(params, lr=lr, form="adam", eps=1e-4),
}
if hasattr(torch.optim, "Muon"):
    INNERS["muon"] = lambda params, lr=0.02: torch.optim.Muon(params, lr=lr)
COMMON = tuple(name for name in INNERS if name != "quasi")
ADAMS = ("adamw", "nadam")

CONSTANT = {"loss_power": 0.0, "lr_power": 0.0, "noise_power": 0.0}  # AutoLoCo with rounds of one length

ENTRIES = [
    Entry(LocalSGD, {"sync_every": 3}),
    Entry(LocalSGD, {"sync_every": 3, "average_state": ("exp_avg", "exp_avg_sq")}, inners=ADAMS, name="LocalAdam"),
    Entry(LocalSGD, {"sync_every": QSR(alpha=0.02, base=3, max_interval=3)}, name="QSR"),
    Entry(FedAvg, {"samples": 6, "batch_size": 2}, apart={"samples": 99, "batch_size": 1}),
    Entry(HierarchicalLocalSGD, {"sync_every": {1: 1, 3: None}}, apart={"sync_every": {99: None}}),
    Entry(DiLoCo, {"sync_every": 3}),
    Entry(DiLoCo, {"sync_every": 3, "nesterov": False, "warmup_steps": 1}, first=4, busy=(1,), name="DiLoCo-warmup"),
    Entry(DiLoCo, {"sync_every": 3, "compress": Int8()}, elementwise=False, name="DiLoCo-Int8"),
    Entry(DiLoCo, {"sync_every": 3, "compress": TopK(density=0.25)}, elementwise=False, name="DiLoCo-TopK"),
    Entry(LocalSGD, {"sync_every": 3, "compress": Int4()}, elementwise=False, name="LocalSGD-Int4"),
    Entry(SlowMo, {"sync_every": 3}),
    Entry(SlowMo, {"sync_every": 3, "buffers": "average"}, name="SlowMo-average"),
    Entry(SignMomentum, {"sync_every": 3, "weight_decay": 0.0}),
    Entry(
        SignMomentum,
        {"sync_every": 3, "weight_decay": 0.0, "sign": "ternary", "bound": 1.0},
        elementwise=False,
        name="SignMomentum-ternary",
    ),
    Entry(AutoLoCo, {"sync_every": 3, "calib_rounds": 1, **CONSTANT}, apart={"sync_every": 99, **CONSTANT}),
    Entry(CO2, {"sync_every": 3}, first=6, busy=(3,), elementwise=False),
    Entry(EagerDiLoCo, {"sync_every": 3}, first=6, busy=(3,), agrees="flush"),
    Entry(
        EagerDiLoCo,
        {"sync_every": 3, "delayed": True, "outer_lr": 0.2, "outer_momentum": 0.5, "compress": Int8()},
        first=6,
        busy=(3,),
        elementwise=False,
        name="DelayedDiLoCo-Int8",
    ),
    Entry(
        StreamingDiLoCo,
        {"sync_every": 4, "fragments": "bytes", "num_fragments": 2, "delay": 1},
        apart={"sync_every": 99, "fragments": "bytes"},
        first=5,
        period=4,
        busy=(2, 3, 4),
        agrees="outer",
        elementwise=False,
    ),
    Entry(
        StreamingDiLoCo,
        {"sync_every": 4, "fragments": "bytes", "num_fragments": 2, "delay": 0, "compress": TopK(density=0.25)},
        apart={"sync_every": 99, "fragments": "bytes"},
        first=4,
        period=4,
        busy=(2,),
        agrees="outer",
        elementwise=False,
        name="Streaming-TopK",
    ),
    Entry(
        DESLOC,
        {"sync_every": {"params": 3, "exp_avg": 3, "exp_avg_sq": 6}},
        inners=ADAMS,
        apart={"sync_every": {"params": 99}},
    ),
    Entry(
        DESLOC,
        {"sync_every": {"params": 3, "exp_avg": 3}, "sync_point": "pre"},
        first=4,
        agrees="flush",
        inners=ADAMS,
        apart={"sync_every": {"params": 99}},
        name="DESLOC-pre",
    ),
    Entry(MTDAO, {"sync_every": 3}, inners=("quasi",), apart={"sync_every": 99}),
]


def entry_named(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.id == name)


def model_for(inner: str = "adamw", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two small layers; without biases for Muon, which takes matrices only."""
    torch.manual_seed(seed)
    bias = inner != "muon"
    return nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)).to(dtype)


def build(entry: Entry, inner: str | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any):
    """(model, optimizer) of an entry."""
    inner = inner or entry.inner
    model = model_for(inner, seed=seed, dtype=dtype)
    return model, entry(INNERS[inner](model.parameters()), **options)


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and targets that every (step, rank) has of its own."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, 5, generator=generator)
    return x.to(dtype), torch.randn(6, 3, generator=generator).to(dtype)


def backward(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    """Set the gradients of this (step, rank) and return the loss."""
    x, y = batch(step, rank, next(model.parameters()).dtype)
    model.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[int],
    rank: int = 0,
    after: Callable[[int], None] | None = None,
) -> None:
    """Train on the batches of `steps`; call `after(step)` after each."""
    for step in steps:
        backward(model, step, rank)
        optimizer.step()
        if after is not None:
            after(step)


def tensors_of(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a nested dict, by dotted name."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found.update(tensors_of(value, f"{prefix}{name}."))
        elif isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
    return found


PRIVATE = (
    "inner",
    "residual",
    "owner_residual",
    "in_flight_0",
    "own_0",
)  # entries of the state that every worker has of its own


def shared_state(model: nn.Module, optimizer: Optimizer, parameters: bool = True) -> dict[str, Tensor]:
    """Copies of what workers must agree on after a sync: parameters (optional) and outer state."""
    record = {}
    for name, p in model.named_parameters():
        if parameters:
            record[name] = p.detach().clone()
        outer = {key: value for key, value in optimizer.state.get(p, {}).items() if key not in PRIVATE}
        record.update({f"{name}:{key}": value.clone() for key, value in tensors_of(outer).items()})
    return record


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of all parameters, buffers, optimizer state and group values: what a resumed run must reproduce."""
    record: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        state = tensors_of(dict(optimizer.state.get(p, {})))
        record.update({f"{name}:{key}": value.detach().clone() for key, value in state.items()})
    for i, group in enumerate(optimizer.param_groups):
        record.update({f"group{i}:{key}": value for key, value in group.items() if key != "params"})
    return record


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names whose values differ in any bit, in dtype, or that only one side has."""
    names = sorted({*ours, *theirs})
    return [name for name in names if not (name in ours and name in theirs and equal(ours[name], theirs[name]))]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)


def syncs_by_step(entry: Entry, steps: int) -> list[int]:
    """`num_syncs` after each step of an undisturbed run."""
    model, optimizer = build(entry)
    counts: list[int] = []
    train(model, optimizer, range(steps), after=lambda step: counts.append(optimizer.num_syncs))
    return counts


def through_file(value: Any) -> Any:
    """Save and load as a user does, with the loader that runs no code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
