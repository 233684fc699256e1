"""`lowcomm bench-engine`: what the engine costs beside the work it wraps. Ratios, so that machines compare.

    local step    time in step() outside the inner optimizer, when no sync is due, over an AdamW step
    sync, alone   build + apply at world size 1 (no network), over one float32 copy_ of the model
    exchange      agreement and all-reduce of a flat vector by `lowcomm.sync` over gloo, 2 ranks, over one flat gloo
                  all_reduce of the same bytes
    sync, 2 ranks build, exchange, apply, over the same all_reduce

The model is 10 million parameters in 100 tensors. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from ..optim import DiLoCo
from ..sync import AllReduce
from .launch import Report, launch
from .measure import machine

__all__ = ["main"]

NEVER = 10**9
TARGETS = {"local_step": 0.02, "sync_alone": 7.0, "exchange": 1.3, "sync_two_ranks": 1.3}
TITLES = {
    "local_step": "local step: overhead / AdamW step",
    "sync_alone": "sync, world size 1: build + apply / copy_ of the model",
    "exchange": "exchange, 2 gloo ranks: AllReduce / flat all_reduce",
    "sync_two_ranks": "sync, 2 gloo ranks: sync / flat all_reduce",
}


class Stopwatch:
    """Counts the time spent inside a function that it replaces."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin


def model(elements: int, tensors: int) -> list[Tensor]:
    """`tensors` equal parameters with gradients, `elements` in all."""
    shape = (elements // tensors // 250, 250)
    parameters = [torch.randn(shape, requires_grad=True) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.randn(shape)
    return parameters


def outside_inner(inner: Optimizer, optimizer: Optimizer) -> tuple[float, float]:
    """Seconds of one `optimizer.step()` outside `inner.step()`, and inside it."""
    watch = Stopwatch(type(inner).step.__get__(inner))
    inner.step = watch  # type: ignore[method-assign]
    begin = time.perf_counter()
    optimizer.step()
    total = time.perf_counter() - begin
    del inner.step
    return total - watch.seconds, watch.seconds


def local_step(elements: int, tensors: int, rounds: int) -> dict[str, float]:
    """Overhead of a step that synchronises nothing."""
    inner = AdamW(model(elements, tensors))
    optimizer = DiLoCo(inner, sync_every=NEVER)
    outside_inner(inner, optimizer)
    times = [outside_inner(inner, optimizer) for _ in range(rounds)]
    overhead, step = (statistics.median(column) for column in zip(*times, strict=True))
    return {"ms": overhead * 1e3, "reference_ms": step * 1e3, "ratio": overhead / step}


def sync_alone(elements: int, tensors: int, rounds: int) -> dict[str, float]:
    """Build and apply, without a network."""
    inner = SGD(model(elements, tensors), lr=1e-3)
    optimizer = DiLoCo(inner, sync_every=1)
    source, target = torch.randn(elements), torch.empty(elements)

    def copy() -> float:
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    return _paired(lambda: outside_inner(inner, optimizer)[0], copy, rounds)


def two_ranks(
    rank: int, world_size: int, report: Report, elements: int, tensors: int, rounds: int
) -> dict[str, dict[str, float]]:
    """An exchange and a whole sync over the default process group."""
    inner = SGD(model(elements, tensors), lr=1e-3)
    optimizer = DiLoCo(inner, sync_every=1)
    reducer = AllReduce()
    flat = torch.randn(elements)

    def timed(call: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def sync() -> float:
        dist.barrier()
        return outside_inner(inner, optimizer)[0]

    def all_reduce() -> float:
        return timed(lambda: dist.all_reduce(flat))

    exchange = _paired(lambda: timed(lambda: reducer.reduce(flat)), all_reduce, rounds)
    return {"exchange": exchange, "sync_two_ranks": _paired(sync, all_reduce, rounds)}


def _paired(call: Callable[[], float], reference: Callable[[], float], rounds: int) -> dict[str, float]:
    """Medians of `call`, of `reference` timed before and after each, and of the ratio in each round."""
    call(), reference()
    calls: list[float] = []
    references = [reference()]
    for _ in range(rounds):
        calls.append(call())
        references.append(reference())
    ratios = [2 * calls[i] / (references[i] + references[i + 1]) for i in range(rounds)]
    return {
        "ms": statistics.median(calls) * 1e3,
        "reference_ms": statistics.median(references) * 1e3,
        "ratio": statistics.median(ratios),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="lowcomm bench-engine",
        description="What the engine costs beside the work it wraps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--elements", type=int, default=10_000_000, help="parameters of the model")
    p.add_argument("--tensors", type=int, default=100, help="tensors of the model")
    p.add_argument("--rounds", type=int, default=41, help="rounds of each measurement; medians are reported")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parser().parse_args(argv)
    sizes = (options.elements // (250 * options.tensors) * 250 * options.tensors, options.tensors, options.rounds)
    if sizes[0] == 0:
        print("lowcomm bench-engine: --elements must be at least 250 for each of --tensors", file=sys.stderr)
        return 2
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    results = {"local_step": local_step(*sizes), "sync_alone": sync_alone(*sizes)}
    torch.set_num_threads(before)
    ranks = launch(two_ranks, 2, *sizes, threads=options.threads)
    for name in ranks[0]:
        results[name] = max((rank[name] for rank in ranks), key=lambda result: float(result["ratio"]))

    command = shlex.join(["lowcomm", "bench-engine", *(sys.argv[1:] if argv is None else argv)])
    facts = {**machine(), "threads": options.threads, "elements": sizes[0], "tensors": sizes[1]}
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"\n{'':<56}{'ms':>10}{'reference':>11}{'ratio':>9}{'target':>9}")
    for name, result in results.items():
        numbers = f"{result['ms']:>10.3f}{result['reference_ms']:>11.3f}{result['ratio']:>9.4f}{TARGETS[name]:>9}"
        print(f"{TITLES[name]:<56}{numbers}")
    print(json.dumps({"tool": "bench_engine", **facts, "command": command, "results": results, "targets": TARGETS}))
    return 0
