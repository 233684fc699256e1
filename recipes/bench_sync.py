"""Compressed all-reduces between local processes, next to gloo's plain float32 all-reduce of the same vector.

    python -m lowcomm.recipes.bench_sync "Int4()" "TopK()" --world 2 --size 16M
    python -m lowcomm.recipes.bench_sync --world 4 --size 16M --rounds 15

Every codec takes turns with `torch.distributed.all_reduce` within each round; the speed-up is the median over the
rounds of the ratio of the two times (larger is faster), the slowest rank counting. All ranks, encoding, decoding and
the network share this machine, so the ratios are those of a very fast network: a slow one comes closer to the ratio of
bytes. "CPU" is the same ratio for the processor time of all threads of a rank, which other work on the machine disturbs
less.
The last line of the output is one JSON object with everything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..compress import Codec
from ..sync import AllReduce, Receipt
from .bench import elements
from .expressions import codec_from
from .launch import launch
from .measure import machine

__all__ = ["main"]

CODECS = ("None", "Cast('bf16')", "Int8()", "Int4()", "TopK()")
_COLUMNS = ("codec", "algorithm", "ms", "speed-up", "CPU", "MB sent", "encode ms", "wire ms", "decode ms")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    for text in options.codecs:
        _codec(text)  # a mistake is better reported before processes start
    rows = launch(_measure, options.world, options.codecs, options.size, options.rounds, threads=options.threads)
    table = [dict(zip(_COLUMNS, row, strict=True)) for row in rows[0]]
    print("  ".join(f"{name:>12}" for name in _COLUMNS))
    for row in table:
        print("  ".join(f"{value:>12}" if isinstance(value, str) else f"{value:>12.2f}" for value in row.values()))
    about = {"world_size": options.world, "elements": options.size, "threads": options.threads, **machine()}
    print(json.dumps({"rows": table, **about}))
    return 0


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    result = argparse.ArgumentParser(prog="bench_sync", description=(__doc__ or "").split("\n\n")[0])
    result.add_argument("codecs", nargs="*", default=CODECS, help="codec expressions; None: uncompressed")
    result.add_argument("--world", type=int, default=2, help="processes (default 2)")
    result.add_argument("--size", type=elements, default=2**24, help="float32 elements, e.g. 16M (default 2^24)")
    result.add_argument("--rounds", type=int, default=9, help="timed rounds, after two that are not (default 9)")
    result.add_argument("--threads", type=int, default=1, help="threads of each process (default 1)")
    return result


def _codec(text: str) -> Codec | None:
    return None if text == "None" else codec_from(text)


def _measure(
    rank: int, world_size: int, report: Callable[[Any], None], codecs: Sequence[str], size: int, rounds: int
) -> list[tuple[str | float, ...]]:
    x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    return [_row(text, x, rounds) for text in codecs]


def _row(text: str, x: torch.Tensor, rounds: int) -> tuple[str | float, ...]:
    reducer = AllReduce(codec=_codec(text), feedback="auto")
    plain, flat = x.clone(), x.clone()
    ours, theirs, receipts = [], [], []
    our_cpu, their_cpu = [], []
    for index in range(rounds + 2):
        flat.copy_(x)
        plain.copy_(x)
        start, cpu = _together(), time.process_time()
        dist.all_reduce(plain)
        their_cpu.append(time.process_time() - cpu)
        theirs.append(_slowest(time.perf_counter() - start))
        start, cpu = _together(), time.process_time()
        work = reducer.reduce(flat, round=index)
        our_cpu.append(time.process_time() - cpu)
        ours.append(_slowest(time.perf_counter() - start))
        receipts.append(work.wait())
        flat = work.result
    ratio = statistics.median(t / o for t, o in zip(theirs[2:], ours[2:], strict=True))
    cpu_ratio = statistics.median(t / o for t, o in zip(their_cpu[2:], our_cpu[2:], strict=True))
    parts = [_median(receipts[2:], name) for name in ("encode_ms", "wire_ms", "decode_ms")]
    sent = receipts[-1].bytes_sent / 1e6
    return (text, receipts[-1].algorithm, statistics.median(ours[2:]) * 1e3, ratio, cpu_ratio, sent, *parts)


def _together() -> float:
    dist.barrier()
    return time.perf_counter()


def _slowest(seconds: float) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _median(receipts: Sequence[Receipt], name: str) -> float:
    return float(statistics.median(getattr(receipt, name) for receipt in receipts))


if __name__ == "__main__":
    raise SystemExit(main())
