"""`lowcomm bench`: how fast codecs are, how many bits they really produce, and how far off what comes back is.

    lowcomm bench "Int4()" "TopK(density=1/64)" --sizes 1M 27.264M --threads 1 2
    lowcomm bench --peers --plot rate.png --csv speed.csv

Speed is GB/s of float32 input, and as a multiple of a plain float32 `copy_` of the same vector timed in the same breath
(larger is faster). Error is ||x - decode(encode(x))||^2 / ||x||^2 on 2^20 elements of three distributions.
The last line of the output is one JSON object with everything.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..compress import Codec, kernel_level
from .expressions import codec_from
from .measure import Timing, against_copy, machine
from .peers import PEERS, Peer, missing

__all__ = ["main"]

CODECS = (
    *("Cast('bf16')", "Cast('fp16')", "Int8()", "Int4()", "Int4(rounding='stochastic')", "Int4(affine=True)", "Int2()"),
    *("Float8()", "Float8('e5m2')", "E3M0()", "QSGD()", "NuQSGD()", "NaturalCompression()", "ZeroPlusPlus()"),
    *("Codebook()", "Sign()", "StoSign(8.0)", "Ternary()", "Ternary('stochastic')"),
    *("TopK()", "TopK(scope='global')", "RandomK()", "Threshold(2.5)", "SampledTopK()"),
    *("Eden(bits=1)", "Eden(bits=2)", "Eden(bits=4)", "PowerSGD()", "DCTTopK()", "CountSketch()", "SRHT()"),
)
OPERATIONS = ("encode", "decode", "decode_add", "feedback")
DISTRIBUTIONS = ("gauss", "laplace", "student3")
ERROR_ELEMENTS = 2**20


@dataclass(frozen=True)
class Quality:
    """Rate and error of one codec: bits really produced per element, and NMSE for each distribution."""

    codec: str
    peer: bool
    bits: float
    gauss: float
    laplace: float
    student3: float


@dataclass(frozen=True)
class Speed:
    """One operation of one codec at one size: milliseconds, GB/s of float32 input, multiple of a float32 copy."""

    codec: str
    peer: bool
    elements: int
    threads: int
    operation: str
    ms: float
    gbs: float
    times_copy: float
    copy_ms: float
    rounds: int


def sample(distribution: str, n: int, device: str = "cpu") -> Tensor:
    """(n,) float32 drawn from "gauss", "laplace" or "student3" (Student's t, 3 degrees of freedom), always the same.

    >>> sample("laplace", 1000).shape
    torch.Size([1000])
    """
    generator = torch.Generator().manual_seed(20 + DISTRIBUTIONS.index(distribution))
    x = torch.randn(n, generator=generator)
    if distribution == "laplace":
        x = torch.empty(n).exponential_(generator=generator).copysign(x)
    elif distribution == "student3":
        chi2 = sum((torch.randn(n, generator=generator).square_() for _ in range(3)), torch.zeros(n))
        x = x / (chi2 / 3).sqrt_()
    return x.to(device)


def as_matrix(n: int) -> list[tuple[int, ...]]:
    """The shape that codecs of matrices are told for n elements: as many columns up to 1024 as divide n.

    >>> as_matrix(2**20), as_matrix(1_000_000)
    ([(1024, 1024)], [(1000, 1000)])
    """
    columns = next(d for d in range(1024, 0, -1) if n % d == 0)
    return [(n // columns, columns)]


def nmse(x: Tensor, decoded: Tensor) -> float:
    """||x - decoded||^2 / ||x||^2, in float64."""
    error = (x.double() - decoded.double()).square().sum()
    return float(error / x.double().square().sum())


def codec_quality(name: str, codec: Codec, device: str) -> Quality:
    """Rate and errors of `codec` on `ERROR_ELEMENTS` elements."""
    codec = codec.for_shapes(as_matrix(ERROR_ELEMENTS))
    body = torch.empty(codec.nbytes(ERROR_ELEMENTS), dtype=torch.uint8, device=device)
    errors = {}
    for distribution in DISTRIBUTIONS:
        x = sample(distribution, ERROR_ELEMENTS, device)
        decoded = torch.empty_like(x)
        codec.encode(x, body)
        codec.decode(body, decoded)
        errors[distribution] = nmse(x, decoded)
    return Quality(name, False, 8 * body.numel() / ERROR_ELEMENTS, **errors)


def peer_quality(peer: Peer) -> Quality:
    """Rate and errors of what another library sends."""
    errors, bits = {}, 0.0
    for distribution in DISTRIBUTIONS:
        x = sample(distribution, ERROR_ELEMENTS)
        message = peer.encode(x)
        errors[distribution] = nmse(x, peer.decode(message, x))
        bits = 8 * message.nbytes / ERROR_ELEMENTS
    return Quality(peer.name, True, bits, **errors)


def codec_calls(codec: Codec, x: Tensor) -> dict[str, Callable[[], object]]:
    """The four operations on preallocated buffers."""
    codec = codec.for_shapes(as_matrix(x.numel()))
    body = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    out, residual = torch.empty_like(x), torch.zeros_like(x)
    feedback_body = torch.empty_like(body)
    codec.encode(x, body)
    return {
        "encode": lambda: codec.encode(x, body),
        "decode": lambda: codec.decode(body, out),
        "decode_add": lambda: codec.decode_add(body, out),
        "feedback": lambda: codec.encode_feedback(x, residual, residual, feedback_body),
    }


def peer_calls(peer: Peer, x: Tensor) -> dict[str, Callable[[], object]]:
    """What a peer has of the operations, called as its users call it: it allocates its results."""
    message = peer.encode(x)
    return {"encode": lambda: peer.encode(x), "decode": lambda: peer.decode(message, x)}


def speeds(
    name: str, calls: dict[str, Callable[[], object]], x: Tensor, threads: int, seconds: float, peer: bool
) -> Iterator[Speed]:
    """Time every call against a copy of `x`."""
    target = torch.empty_like(x)
    for operation, call in calls.items():
        timing: Timing = against_copy(call, lambda: target.copy_(x), device=x.device.type, seconds=seconds)
        gbs = 4 * x.numel() / timing.ms / 1e6
        yield Speed(
            name, peer, x.numel(), threads, operation, timing.ms, gbs, timing.times_copy, timing.copy_ms, timing.rounds
        )


def elements(text: str) -> int:
    """A size from text: `65536`, `2**24`, `64k`, `27.264M`, `1G` (powers of ten).

    >>> elements("27.264M"), elements("2**20")
    (27264000, 1048576)
    """
    base, power, exponent = text.partition("**")
    scale = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    try:
        value = int(base) ** int(exponent) if power else round(float(text.rstrip("kMG")) * scale)
    except ValueError:
        value = 0
    if not 1 <= value <= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of elements such as 65536, 2**24, 64k or 27.264M")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="lowcomm bench",
        description="Speed, rate and error of codecs. Speeds are also given as a multiple of a float32 copy in the "
        "same run; larger is faster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("codecs", nargs="*", metavar="CODEC", default=CODECS, help="such as 'TopK(density=1/64)' or Int4")
    p.add_argument("--sizes", nargs="+", type=elements, default=[2**24], metavar="N", help="elements: 64k, 1M, 2**24")
    p.add_argument("--threads", nargs="+", type=int, default=[1], metavar="T", help="CPU threads")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the vectors live")
    p.add_argument("--seconds", type=float, default=0.5, help="time spent on each operation")
    p.add_argument("--peers", action="store_true", help="the same for other libraries, where installed (CPU)")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the speeds as CSV")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw error against rate (needs matplotlib)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    arguments = parser().parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("lowcomm bench: --device cuda needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        print("lowcomm bench: --plot needs matplotlib (pip install 'lowcomm[demo]')", file=sys.stderr)
        return 2
    try:
        codecs = {text: codec_from(text) for text in arguments.codecs}
    except ValueError as error:
        print(f"lowcomm bench: {error}", file=sys.stderr)
        return 2
    checked = {peer: missing(peer) for peer in PEERS} if arguments.peers else {}
    peers = [peer for peer, reason in checked.items() if reason is None]
    absent = list(dict.fromkeys(reason for reason in checked.values() if reason is not None))
    command = shlex.join(["lowcomm", "bench", *(sys.argv[2:] if argv is None else argv)])
    facts = {**machine(arguments.device), "kernels": kernel_level(), "command": command}
    print("  ".join(f"{key} {value}" for key, value in facts.items() if key != "command"))

    qualities = _qualities(codecs, peers, arguments.device)
    timed = _timed(codecs, peers, arguments)
    for line in absent:
        print(line)
    if arguments.csv:
        _write_csv(arguments.csv, timed)
    if arguments.plot:
        plot(qualities, arguments.plot)
    result = {"tool": "bench", **facts, "device": arguments.device, "missing": absent}
    print(json.dumps({**result, "quality": [asdict(q) for q in qualities], "speed": [asdict(s) for s in timed]}))
    return 0


def _qualities(codecs: dict[str, Codec], peers: list[Peer], device: str) -> list[Quality]:
    width = _width(codecs, peers)
    print(f"\n{'':<{width}}  bits/element" + "".join(f"{'NMSE ' + name:>15}" for name in DISTRIBUTIONS))
    found = []
    for name, codec in codecs.items():
        found.append(codec_quality(name, codec, device))
        _print_quality(found[-1], width)
    for peer in peers:
        found.append(peer_quality(peer))
        _print_quality(found[-1], width)
    return found


def _print_quality(q: Quality, width: int) -> None:
    errors = "".join(f"{value:>15.3g}" for value in (q.gauss, q.laplace, q.student3))
    print(f"{q.codec:<{width}}  {q.bits:>12.4f}{errors}", flush=True)


def _timed(codecs: dict[str, Codec], peers: list[Peer], arguments: argparse.Namespace) -> list[Speed]:
    width = _width(codecs, peers)
    found: list[Speed] = []
    threads_before = torch.get_num_threads()
    for n in arguments.sizes:
        x = sample("gauss", n, arguments.device)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            print(f"\n{n} elements, {threads} thread{'s' if threads > 1 else ''}")
            print(" " * width + "".join(f"{name.replace('_', '-'):>27}" for name in OPERATIONS))
            print(" " * width + f"{'ms':>12}{'GB/s':>8}{'x copy':>7}" * len(OPERATIONS))
            for name, codec in codecs.items():
                rows = list(speeds(name, codec_calls(codec, x), x, threads, arguments.seconds, peer=False))
                found += _print_speeds(name, rows, width)
            for peer in peers:
                rows = list(speeds(peer.name, peer_calls(peer, x), x, threads, arguments.seconds, peer=True))
                found += _print_speeds(peer.name, rows, width)
    torch.set_num_threads(threads_before)
    return found


def _print_speeds(name: str, rows: list[Speed], width: int) -> list[Speed]:
    cells = "".join(f"{row.ms:>12.4g}{row.gbs:>8.2f}{row.times_copy:>7.2f}" for row in rows)
    print(f"{name:<{width}}{cells}", flush=True)
    return rows


def _width(codecs: dict[str, Codec], peers: list[Peer]) -> int:
    return max(len(name) for name in [*codecs, *(peer.name for peer in peers)])


def _write_csv(path: Path, rows: list[Speed]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(Speed.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def plot(qualities: list[Quality], path: Path) -> None:
    """Draw error against rate, one panel for each distribution, to the file `path`."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(15, 5), layout="constrained")
    axes = figure.subplots(1, len(DISTRIBUTIONS), sharex=True, sharey=True)
    for axis, distribution in zip(axes, DISTRIBUTIONS, strict=True):
        for q in qualities:
            error = getattr(q, distribution)
            axis.scatter(q.bits, error, marker="x" if q.peer else "o", color="tab:gray" if q.peer else "tab:blue")
            if not q.peer:  # names of peers would cover each other; the table has them
                axis.annotate(q.codec, (q.bits, error), fontsize=8, xytext=(5, 4), textcoords="offset points")
        axis.margins(x=0.3)
        axis.set(xscale="log", yscale="log", title=distribution, xlabel="bits per element")
        axis.grid(alpha=0.3)
    if any(q.peer for q in qualities):
        figure.suptitle("dots: lowcomm, crosses: other libraries", fontsize=9)
    axes[0].set_ylabel("||x - decoded||^2 / ||x||^2")
    figure.savefig(path, dpi=120)
