"""The training loop that the demo, the comparison and the recipes share: one run, one method, a list of log records.

A run is `Settings` (data order, model, inner optimizer, schedule: equal for all methods) and a method. The method is
None for synchronous data parallel, or a function from model and settings to an optimizer: the `build` of a recipe, or
`partial(around_adamw, partial(DiLoCo, sync_every=20))`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lowcomm.optim import CO2, AutoLoCo, EagerDiLoCo, StreamingDiLoCo
from lowcomm.recipes.data import Batches, Text, windows
from lowcomm.recipes.launch import Report, launch
from lowcomm.recipes.model import ModelSettings, Transformer
from torch import Tensor, nn

__all__ = [
    "Method",
    "Record",
    "Settings",
    "around_adamw",
    "evaluate",
    "inner_optimizer",
    "run_workers",
    "schedule",
    "train",
]

Record = dict[str, Any]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
REPORT_SECONDS = 0.2  # between progress reports
EVALUATION_BATCH = 32  # sequences
NAMED_PARAMETERS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)  # torch.optim takes names


@dataclass(frozen=True)
class Settings:
    """What all methods of a comparison have in common.

    Attributes:
        model: sizes of the transformer.
        steps: inner steps.
        batch: sequences in one worker's batch.
        lr: highest learning rate of the inner optimizer, AdamW.
        lr_warmup: steps over which the rate rises; after them it falls to zero along a cosine.
        evaluations: validations in a run, evenly spread; the last one after the last step.
        validation_windows: sequences of held-out text in one validation.
        seed: of the initial weights and of the order of the data.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    steps: int = 400
    batch: int = 8
    lr: float = 2e-3
    lr_warmup: int = 40
    evaluations: int = 10
    validation_windows: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.evaluations, self.validation_windows) < 1 or self.lr_warmup < 0:
            raise ValueError(f"steps, batch, evaluations and validation_windows must be at least 1 but are {self}")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0 but is {self.lr}")

    def evaluated(self) -> set[int]:
        """The steps after which the model is validated."""
        count = min(self.evaluations, self.steps)
        return {self.steps * i // count for i in range(1, count + 1)}


Method = Callable[[nn.Module, Settings], Any]


def around_adamw(wrap: Callable[[torch.optim.Optimizer], Any], model: nn.Module, settings: Settings) -> Any:
    """`wrap` around the usual inner optimizer: a method, once `wrap` is given by functools.partial."""
    return wrap(inner_optimizer(model, settings.lr))


def run_workers(
    jobs: Sequence[tuple[Settings, Method | None]], text: Text, workers: int, on_report: Report | None = None
) -> list[list[Record]]:
    """Train every job in turn on `workers` local processes; return the first worker's records of each.

    `on_report` gets {"job": index, "step", "steps", "loss"} now and then, {"job": index, ...record} at each validation,
    and {"job": index, "records"} when a job is done.
    """
    results: list[list[Record]] = launch(train_jobs, workers, list(jobs), text, on_report=on_report)[0]
    return results


def train_jobs(
    rank: int, world_size: int, report: Report, jobs: Sequence[tuple[Settings, Method | None]], text: Text
) -> list[list[Record]]:
    """One worker's part of `run_workers`."""
    results = []
    for index, (settings, method) in enumerate(jobs):

        def report_job(value: Record, index: int = index) -> None:
            if rank == 0:
                report({"job": index, **value})

        results.append(train(rank, world_size, report_job, settings, method, text))
        report_job({"records": results[-1]})
    return results


def train(
    rank: int,
    world_size: int,
    report: Report,
    settings: Settings,
    method: Method | None,
    text: Text,
    device: str | torch.device = "cpu",
) -> list[Record]:
    """One worker's run. The default process group joins the workers.

    Returns:
        One record for each validation: step, tokens (of all workers), train_loss (mean since the last record, this
        worker), validation_loss, bytes_sent (by this worker), syncs, seconds, blocked_seconds (part of `seconds` spent
        waiting for the exchange), overlap_steps (steps during which an exchange may go on), state_per_parameter
        (numbers that the optimizer keeps for each parameter). Validation counts neither as time nor as traffic.
    """
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model).to(device)
    local = None if method is None else method(model, settings)
    optimizer = inner_optimizer(model, settings.lr) if local is None else local
    scheduler = schedule(optimizer, settings.steps, settings.lr_warmup)
    batches = iter(Batches(text.train, settings.batch, settings.model.context, rank, world_size, settings.seed))
    traffic: Traffic = SynchronousTraffic(model) if local is None else LocalTraffic(model, local)
    meter = Meter(report, settings.steps)
    records: list[Record] = []
    for step in range(1, settings.steps + 1):
        tokens, targets = next(batches)
        loss = F.cross_entropy(model(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        traffic.before_step(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        traffic.after_step(last=step == settings.steps)
        scheduler.step()
        optimizer.zero_grad()
        meter.update(step, loss)
        if step in settings.evaluated():
            with meter.paused(), traffic.shared_weights():
                validation_loss = evaluate(model, text.validation, settings.validation_windows, rank, world_size)
                kept = state_per_parameter(optimizer, model)
            records.append(
                {
                    "step": step,
                    "tokens": step * world_size * settings.batch * settings.model.context,
                    "train_loss": meter.mean_loss(),
                    "validation_loss": validation_loss,
                    "bytes_sent": traffic.bytes_sent,
                    "syncs": traffic.syncs,
                    "seconds": meter.seconds(),
                    "blocked_seconds": traffic.blocked_seconds,
                    "overlap_steps": overlap_steps(local),
                    "state_per_parameter": kept,
                }
            )
            report(records[-1])
    return records


def inner_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    return torch.optim.AdamW(decay_groups(model.named_parameters()), lr=lr, betas=BETAS)


def decay_groups(parameters: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, vectors without. They keep their names where torch can."""
    groups: list[dict[str, Any]] = []
    named = list(parameters)
    for decay, chosen in (
        (WEIGHT_DECAY, [(name, p) for name, p in named if p.dim() >= 2]),
        (0.0, [(name, p) for name, p in named if p.dim() < 2]),
    ):
        groups.append({"params": chosen if NAMED_PARAMETERS else [p for _, p in chosen], "weight_decay": decay})
    return groups


def schedule(optimizer: torch.optim.Optimizer, steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise linearly for `warmup` steps, fall to zero at `steps` along a cosine."""

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / max(1, warmup))
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model: Transformer, text: Tensor, count: int, rank: int = 0, world_size: int = 1) -> float:
    """Mean cross-entropy in nats over `count` evenly spread sequences; the workers share the work."""
    context, device = model.settings.context, model.embedding.weight.device
    starts = torch.linspace(0, text.numel() - context - 1, count, dtype=torch.float64).long()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chosen in starts[rank::world_size].split(EVALUATION_BATCH):
        tokens, targets = windows(text, chosen, context)
        logits = model(tokens.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, targets.to(device).flatten(), reduction="sum").double()
    if world_size > 1:
        dist.all_reduce(total)
    return float(total) / (count * context)


def overlap_steps(optimizer: Any) -> int:
    """Inner steps of `optimizer` that hide an exchange."""
    if isinstance(optimizer, StreamingDiLoCo):
        return optimizer.delay
    if isinstance(optimizer, (CO2, EagerDiLoCo)):
        group = optimizer.param_groups[0]
        return int(group.get("delay", 1) * group["sync_every"])
    return 0


def state_per_parameter(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Numbers in the optimizer's state_dict for each parameter of the model: two for AdamW alone."""
    return count_numbers(optimizer.state_dict()["state"]) / sum(p.numel() for p in model.parameters())


def count_numbers(value: Any) -> int:
    """Elements of all tensors with dimensions in nested dicts."""
    if isinstance(value, dict):
        return sum(count_numbers(part) for part in value.values())
    return value.numel() if isinstance(value, Tensor) and value.dim() > 0 else 0


class Traffic:
    """What a run has sent and waited for."""

    bytes_sent = 0
    syncs = 0
    blocked_seconds = 0.0

    def before_step(self, loss: Tensor) -> None:
        """Called with fresh gradients."""

    def after_step(self, last: bool) -> None:
        """Called after the optimizer's step; `last`: it was the run's last one."""

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all workers share."""
        return nullcontext()


class SynchronousTraffic(Traffic):
    """Synchronous data parallel: average the gradients before every step.

    Bytes are those of a bandwidth-optimal all-reduce, 2 (N-1)/N times the gradient's, which no algorithm undercuts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in self.parameters])
        self.bytes_per_step = 2 * (dist.get_world_size() - 1) * self.flat.nbytes // dist.get_world_size()

    def before_step(self, loss: Tensor) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch.cat([g.flatten() for g in gradients], out=self.flat)
        begin = time.perf_counter()
        dist.all_reduce(self.flat)
        self.blocked_seconds += time.perf_counter() - begin
        self.flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, self.flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        self.bytes_sent += self.bytes_per_step
        self.syncs += 1


class LocalTraffic(Traffic):
    """A low-communication optimizer, which does its own accounting."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.seen: object = None

    def before_step(self, loss: Tensor) -> None:
        if isinstance(self.optimizer, AutoLoCo):
            self.optimizer.record(loss.detach())

    def after_step(self, last: bool) -> None:
        self._account()
        if last:
            self.optimizer.flush()
            self._account()

    def _account(self) -> None:
        receipt = self.optimizer.last_sync
        if receipt is not self.seen:
            self.blocked_seconds += receipt.blocked_ms / 1e3
            self.seen = receipt
        self.bytes_sent = self.optimizer.bytes_sent
        self.syncs = self.optimizer.num_syncs

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self.optimizer.global_weights())
            except RuntimeError:  # the method has no anchor: the mean is what its next sync would give
                stack.enter_context(mean_weights(self.model))
            yield


@contextmanager
def mean_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the model has the mean of all workers' weights."""
    own = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p)
            p.div_(dist.get_world_size())
        yield
        for p, value in zip(model.parameters(), own, strict=True):
            p.copy_(value)


class Meter:
    """Training time without pauses, mean loss since last asked, and progress reports now and then."""

    def __init__(self, report: Report, steps: int) -> None:
        self.report, self.steps = report, steps
        self.losses: list[float] = []
        self.begin = self.reported = time.perf_counter()

    def update(self, step: int, loss: Tensor) -> None:
        self.losses.append(loss.item())
        now = time.perf_counter()
        if now - self.reported > REPORT_SECONDS or step == self.steps:
            self.reported = now
            self.report({"step": step, "steps": self.steps, "loss": self.losses[-1]})

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def mean_loss(self) -> float:
        mean = sum(self.losses) / len(self.losses)
        self.losses.clear()
        return mean

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        begin = time.perf_counter()
        yield
        self.begin += time.perf_counter() - begin
