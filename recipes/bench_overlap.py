"""Does an exchange that overlaps with training cost time? Steps over a limited link, beside steps without a network.

    python -m lowcomm.recipes.bench_overlap --link 200mbit

Two ranks in two network namespaces (Linux, root) make steps that last `--step` seconds: they wait for an accelerator
that does not exist, so that the CPU is free as it would be. "local" never communicates; "ratio" is the time per step
over that of "local", taken over whole rounds. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lowcomm.optim import CO2, DiLoCo, EagerDiLoCo, StreamingDiLoCo
from lowcomm.recipes.launch import Report, launch
from lowcomm.recipes.links import Link
from lowcomm.recipes.measure import machine
from lowcomm.recipes.report import align

__all__ = ["main"]

TENSORS = 16
METHODS: dict[str, Callable[..., Any]] = {
    "local": functools.partial(DiLoCo, sync_every=1 << 30),
    "DiLoCo, blocking": DiLoCo,
    "StreamingDiLoCo": functools.partial(StreamingDiLoCo, fragments="bytes", num_fragments=4),
    "EagerDiLoCo": EagerDiLoCo,
    "CO2": CO2,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench_overlap",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--link", default="200mbit", help="rate of the link in each direction, as tc writes it")
    parser.add_argument("--elements", type=int, default=1 << 20, help="parameters")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step computes")
    parser.add_argument("--sync-every", type=int, default=16, help="steps in a round")
    parser.add_argument("--delay", type=int, default=4, help="steps that hide a fragment of StreamingDiLoCo")
    parser.add_argument("--rounds", type=int, default=4, help="measured, after one that is not")
    options = parser.parse_args(argv)
    with Link(options.link) as link:
        rows = launch(measure, 2, vars(options), prepare=link.enter)[0]
    print(align([["method", "ms/step", "ratio", "exchange ms", "blocked ms/round"], *map(texts, rows)], left=1))
    print(json.dumps({"tool": "bench-overlap", **vars(options), "rows": rows, **machine()}))
    return 0


def texts(row: dict[str, Any]) -> list[str]:
    numbers = (f"{row['ms']:.2f}", f"{row['ratio']:.3f}", f"{row['exchange_ms']:.0f}", f"{row['blocked_ms']:.1f}")
    return [row["method"], *numbers]


def measure(rank: int, world_size: int, report: Report, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method, from this rank."""
    rows: list[dict[str, Any]] = []
    for name, method in METHODS.items():
        keywords = {} if name == "local" else {"sync_every": options["sync_every"]}
        if name == "StreamingDiLoCo":
            keywords["delay"] = options["delay"]
        rows.append({"method": name, **timed(functools.partial(method, **keywords), options)})
    for row in rows:
        row["ratio"] = row["ms"] / rows[0]["ms"]
    return rows


def timed(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per step, of an exchange on the wire, and blocked per round."""
    parameters = [torch.nn.Parameter(torch.zeros(options["elements"] // TENSORS)) for _ in range(TENSORS)]
    optimizer = method(torch.optim.SGD(parameters, lr=1e-3))
    receipts: list[Any] = []
    optimizer.register_sync_hook(receipts.append)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    round_steps, rounds = options["sync_every"], options["rounds"]
    for step in range((rounds + 1) * round_steps):
        if step == round_steps:
            dist.barrier()
            receipts.clear()
            begin = time.perf_counter()
        time.sleep(options["step"])
        optimizer.step()
    ms = (time.perf_counter() - begin) * 1e3 / (rounds * round_steps)
    exchange = max((receipt.wire_ms for receipt in receipts), default=0.0)
    blocked = sum(receipt.blocked_ms for receipt in receipts) / rounds
    optimizer.flush()  # what is still in flight must not disturb the next method
    return {"ms": ms, "exchange_ms": exchange, "blocked_ms": blocked}


if __name__ == "__main__":
    raise SystemExit(main())
