"""FedAvg: every round some clients train on data of their own, and the mean counts samples (arXiv 1602.05629).

    lowcomm run fedavg                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.fedavg  any machines
    lowcomm run fedavg --preset paper --workers 20         the paper's E = 5, B = 10, C = 0.1

Every client owns a part of the text; later ones have less of it. A client that a round does not take calls `sit_out()`,
so all of them are there when the round ends. Learning rates are constant. --steps counts those of the first client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lowcomm.optim import FedAvg
from lowcomm.recipes.data import Text, windows
from lowcomm.recipes.launch import Report
from lowcomm.recipes.model import Transformer
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import LocalTraffic, Meter, Record, Settings, evaluate, inner_optimizer
from torch import Tensor, nn

__all__ = ["build", "main", "samples_of", "train"]

SAMPLES = 96  # sequences that the first client has
EPOCHS = 1
FRACTION = 1.0
PAPER = {"epochs": 5, "batch": 10, "fraction": 0.1}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    samples: int = SAMPLES,
    epochs: int = EPOCHS,
    fraction: float = FRACTION,
) -> FedAvg:
    """The optimizer of this recipe, for a client with `samples` sequences."""
    inner = inner_optimizer(model, settings.lr)
    return FedAvg(inner, samples=samples, batch_size=settings.batch, epochs=epochs, fraction=fraction)


def samples_of(samples: int, rank: int, world_size: int) -> int:
    """Sequences of one client: from `samples` down to about half of it."""
    return samples - samples * rank // (2 * world_size)


def train(
    rank: int,
    world_size: int,
    report: Report,
    settings: Settings,
    method: Any,
    text: Text,
    device: str | torch.device = "cpu",
) -> list[Record]:
    """One client's run, round by round; the records are those of `training.train`."""
    most, epochs = method.keywords["samples"], method.keywords["epochs"]
    mine = samples_of(most, rank, world_size)
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model).to(device)
    optimizer = method.func(model, settings, **{**method.keywords, "samples": mine})
    traffic, meter = LocalTraffic(model, optimizer), Meter(report, settings.steps)
    round_steps = epochs * math.ceil(most / settings.batch)
    part = text.train.numel() // world_size
    own = text.train[rank * part : (rank + 1) * part]
    if part <= most * settings.model.context:
        raise ValueError(f"{most} sequences need more text than the {part} bytes of a client; lower --samples")
    records: list[Record] = []
    meter.losses.append(math.nan)  # until this client has trained
    for round_ in range(1, settings.steps // round_steps + 1):
        if not optimizer.participates:
            optimizer.sit_out()
        else:
            for tokens, targets in client_batches(own, mine, epochs, settings, round_):
                loss = F.cross_entropy(model(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                meter.update(round_ * round_steps, loss)
        traffic.after_step(last=False)
        with meter.paused():
            validation_loss = evaluate(model, text.validation, settings.validation_windows, rank, world_size)
        records.append(
            {
                "step": round_ * round_steps,
                "train_loss": meter.losses[-1],
                "validation_loss": validation_loss,
                "bytes_sent": traffic.bytes_sent,
                "syncs": traffic.syncs,
                "seconds": meter.seconds(),
                "blocked_seconds": traffic.blocked_seconds,
            }
        )
        report(records[-1])
    return records


def client_batches(
    own: Tensor, samples: int, epochs: int, settings: Settings, round_: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """`epochs` passes over the sequences of this client's text, in an order of this round's."""
    generator = torch.Generator().manual_seed(settings.seed + round_)
    starts = torch.arange(samples) * settings.model.context
    for _ in range(epochs):
        for chosen in starts[torch.randperm(samples, generator=generator)].split(settings.batch):
            yield windows(own, chosen, settings.model.context)


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv, train)


if __name__ == "__main__":
    raise SystemExit(main())
