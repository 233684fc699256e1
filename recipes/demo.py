"""`lowcomm demo`: synchronous data parallel, DiLoCo, and DiLoCo with compressed deltas, at equal tokens.

Two local processes train a small transformer on real text over gloo. All runs share data, model, inner optimizer and
schedule; only what crosses the network differs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from lowcomm.optim import DiLoCo
from lowcomm.recipes.compare import BASELINE, Run, add_arguments, compare, parse_call
from lowcomm.recipes.training import Settings

__all__ = ["main"]

# Few tokens, a high learning rate and noisy gradients: the outer step is a little more than the plain average. Larger
# batches and a lower rate suit local methods better. A momentum of 0.9, as for rounds of hundreds of steps, overshoots.
SHORT = Settings(steps=144, batch=16, lr=8e-3, lr_warmup=20, evaluations=6, validation_windows=256)
SHORT_OUTER = {"outer_lr": 1.2, "outer_momentum": 0.0}
LONG = Settings(steps=144, batch=32, lr=3e-3, lr_warmup=20, evaluations=6, validation_windows=256)
LONG_OUTER = {"outer_lr": 1.0, "outer_momentum": 0.3}
SYNC_EVERY = 24
CODEC = "Int4"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(long=False).parse_args(argv)
    if options.long:
        options = parser(long=True).parse_args(argv)
    local: dict[str, Any] = {
        "sync_every": options.sync_every,
        "outer_lr": options.outer_lr,
        "outer_momentum": options.outer_momentum,
        "warmup_steps": options.warmup_steps,
    }
    codec = parse_call(options.codec, importlib.import_module("lowcomm.compress"))()
    runs = [
        Run(BASELINE, None),
        Run("DiLoCo", functools.partial(DiLoCo, **local)),
        Run(f"DiLoCo + {options.codec}", functools.partial(DiLoCo, **local, compress=codec)),
    ]
    return compare("demo", runs, options, argv)


def parser(long: bool) -> argparse.ArgumentParser:
    """The options, with the defaults of the short or the long demo."""
    outer = LONG_OUTER if long else SHORT_OUTER
    result = argparse.ArgumentParser(
        prog="lowcomm demo",
        description="Train a small transformer three times on two local workers: synchronous data parallel, DiLoCo, "
        "DiLoCo with a codec. Same data, model, inner optimizer, schedule and number of tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument("--long", action="store_true", help="more tokens: larger batches, a lower learning rate")
    method = result.add_argument_group("DiLoCo")
    method.add_argument("--sync-every", type=int, default=SYNC_EVERY, help="inner steps between syncs")
    method.add_argument("--outer-lr", type=float, default=outer["outer_lr"], help="outer learning rate")
    method.add_argument("--outer-momentum", type=float, default=outer["outer_momentum"], help="outer Nesterov momentum")
    method.add_argument("--warmup-steps", type=int, default=0, help="synchronous steps before the first round")
    method.add_argument("--codec", default=CODEC, help='of lowcomm.compress, with error feedback: "Int8"')
    add_arguments(result, LONG if long else SHORT, output="lowcomm-demo")
    return result
