"""`lowcomm bench-sync`: compressed all-reduces between local processes, next to gloo's plain float32 all-reduce.

    lowcomm bench-sync "Int4()" "TopK()" --world 2 --size 16M
    lowcomm bench-sync --link 100mbit --size 4M          (as root: two network namespaces and a limited cable)

Every codec takes turns with `torch.distributed.all_reduce` within each round; the speed-up is the median over the
rounds of the ratio of the two times (larger is faster), the slowest rank counting. "bytes" is the ratio of the bytes
sent, "of bytes" the speed-up over it: 1 where time falls with the bytes. Over loopback all ranks, encoding, decoding
and the network share this machine, so the ratios are those of a very fast network.

With --overlap, "blocked" is the time spent waiting in `wait`, over the time of the exchange, when as much computing
(matrix products, calibrated) lies between `start` and `wait`.

Codec expressions may name the algorithm: "two_phase: Int4()". The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..compress import Codec
from ..sync import AllReduce, Receipt
from .bench import elements
from .expressions import codec_from
from .launch import Report, launch
from .links import Link
from .measure import machine

__all__ = ["main"]

CODECS = ("None", "Int8()", "Int4()", "Sign()", "TopK()", "two_phase: Int4()", "two_phase: Sign()")
_NAMES = ("codec", "algorithm")
_COLUMNS = ("ms", "gloo ms", "speed-up", "bytes", "of bytes", "MB sent", "encode ms", "wire ms", "decode ms", "blocked")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parser().parse_args(argv)
    for text in options.codecs:
        AllReduce(**_reducer_options(text))  # a mistake is better reported before processes start
    if options.link and options.world != 2:
        raise ValueError(f"--link joins two processes but --world is {options.world}")
    if options.link:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the link is torn down then, too
    with Link(options.link, options.delay) if options.link else contextlib.nullcontext() as link:
        prepare = None if link is None else link.enter
        rows = launch(_measure, options.world, options.codecs, options, threads=options.threads, prepare=prepare)[0]
    command = shlex.join(["lowcomm", "bench-sync", *(sys.argv[1:] if argv is None else argv)])
    about = {"world_size": options.world, "elements": options.size, "pieces": options.pieces, "link": options.link}
    facts = {**machine(), "threads": options.threads, **about}
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"\n{'codec':<22}{'algorithm':<12}" + "".join(f"{name:>11}" for name in _COLUMNS))
    for row in rows:
        print(f"{row['codec']:<22}{row['algorithm']:<12}" + "".join(f"{row[name]:>11.4g}" for name in _COLUMNS))
    if not options.overlap:
        rows = [{name: value for name, value in row.items() if name != "blocked"} for row in rows]
    print(json.dumps({"tool": "bench_sync", **facts, "command": command, "rows": rows}))
    return 0


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    result = argparse.ArgumentParser(
        prog="lowcomm bench-sync",
        description="Compressed all-reduces between local processes, next to gloo's plain float32 all-reduce.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument("codecs", nargs="*", default=CODECS, help='such as "Int4()" or "two_phase: Int4()"; or None')
    result.add_argument("--world", type=int, default=2, help="processes")
    result.add_argument("--size", type=elements, default=2**24, help="float32 elements, e.g. 16M")
    result.add_argument("--rounds", type=int, default=9, help="timed rounds, after two that are not")
    result.add_argument("--pieces", type=int, default=1, help="buckets of a vector: one is encoded as another travels")
    result.add_argument("--threads", type=int, default=1, help="threads of each process")
    result.add_argument("--overlap", action="store_true", help="measure the time blocked under computing, too")
    result.add_argument("--link", help="rate of a cable between two network namespaces, e.g. 100mbit; needs root")
    result.add_argument("--delay", type=float, default=0.0, help="its one-way delay in ms")
    return result


def _reducer_options(text: str) -> dict[str, Any]:
    algorithm, _, expression = text.rpartition(":") if ":" in text.split("(")[0] else ("auto", "", text)
    codec: Codec | None = None if expression.strip() == "None" else codec_from(expression.strip())
    return {"codec": codec, "feedback": "auto", "algorithm": algorithm.strip()}


def _measure(
    rank: int, world_size: int, report: Report, codecs: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    x = torch.randn(options.size, generator=torch.Generator().manual_seed(rank))
    return [_row(text, x, options) for text in codecs]


class _Exchange:
    """One vector in several buckets, through one reducer."""

    def __init__(self, text: str, x: torch.Tensor, pieces: int) -> None:
        self.reducer = AllReduce(**_reducer_options(text))
        self._source, self._flats = x, [part.clone() for part in x.chunk(pieces)]
        self._round = 0

    def run(self, between: Callable[[], None] | None = None) -> Receipt:
        """Fill the buckets from the source, wait for all ranks, start, compute, wait; the receipt of the whole."""
        for flat, part in zip(self._flats, self._source.chunk(len(self._flats)), strict=True):
            flat.copy_(part)
        self.begin = _together()
        alone = len(self._flats) == 1 and between is None
        send = self.reducer.reduce if alone else self.reducer.start
        works = [send(flat, bucket=i, round=self._round) for i, flat in enumerate(self._flats)]
        if between is not None:
            between()
        receipt = Receipt.combined([work.wait() for work in works])
        self.seconds = time.perf_counter() - self.begin
        self._round += 1
        self._flats = [work.result for work in works]
        return receipt


def _row(text: str, x: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    exchange, plain = _Exchange(text, x, options.pieces), x.clone()
    ours, theirs, receipts = [], [], []
    for _ in range(options.rounds + 2):
        plain.copy_(x)
        start = _together()
        dist.all_reduce(plain)
        theirs.append(_slowest(time.perf_counter() - start))
        receipts.append(exchange.run())
        ours.append(_slowest(exchange.seconds))
    seconds, dense = statistics.median(ours[2:]), statistics.median(theirs[2:])
    speed_up = statistics.median(t / o for t, o in zip(theirs[2:], ours[2:], strict=True))
    sent = receipts[-1].bytes_sent
    ratio = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * x.numel() / sent
    times = [_median(receipts[2:], name) for name in ("encode_ms", "wire_ms", "decode_ms")]
    blocked = _blocked(exchange, seconds, options.rounds) / seconds if options.overlap else math.nan
    values = (seconds * 1e3, dense * 1e3, speed_up, ratio, speed_up / ratio, sent / 1e6, *times, blocked)
    return dict(zip((*_NAMES, *_COLUMNS), (text, receipts[-1].algorithm, *values), strict=True))


def _blocked(exchange: _Exchange, seconds: float, rounds: int) -> float:
    """Seconds blocked in `wait` when `seconds` of computing lie between `start` and `wait`."""
    a = torch.randn(192, 192)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    begin = time.perf_counter()
    compute(100)
    count = max(1, int(100 * seconds / (time.perf_counter() - begin)))
    receipts = [exchange.run(lambda: compute(count)) for _ in range(max(3, rounds // 2))]
    return _slowest(_median(receipts[1:], "blocked_ms") / 1e3)


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
