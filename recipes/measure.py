"""Times on a machine that other jobs share: every measurement is paired with a plain copy made just before and after.

Absolute times drift with load and clock; the ratio to a copy in the same breath drifts far less, and says how near to
memory speed something runs.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__

__all__ = ["Timing", "against_copy", "machine"]

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds of one measurement.

    Attributes:
        ms: one call, in milliseconds.
        copy_ms: one copy, in milliseconds.
        times_copy: median over rounds of (mean of the copies before and after) / call; larger is faster.
        rounds: how many times the call was timed.
    """

    ms: float
    copy_ms: float
    times_copy: float
    rounds: int


def against_copy(call: Call, copy: Call, *, device: str = "cpu", seconds: float = 0.5) -> Timing:
    """Time `call` and `copy` in turn, for about `seconds` and at least 7 rounds; 3 where those take ten times as long.

    Short calls are repeated until a sample lasts two milliseconds, so the clock's resolution does not matter.

    >>> x, y = torch.randn(1000), torch.empty(1000)
    >>> timing = against_copy(lambda: torch.neg(x, out=y), lambda: y.copy_(x), seconds=0.01)
    >>> timing.rounds >= 3 and timing.ms > 0
    True
    """
    call_repeats, copy_repeats = _repeats(call, device), _repeats(copy, device)
    calls: list[float] = []
    copies = [_sample(copy, copy_repeats, device)]
    begin = time.perf_counter()
    while not _enough(len(calls), time.perf_counter() - begin, seconds):
        calls.append(_sample(call, call_repeats, device))
        copies.append(_sample(copy, copy_repeats, device))
    ratios = [(copies[i] + copies[i + 1]) / 2 / calls[i] for i in range(len(calls))]
    return Timing(statistics.median(calls), statistics.median(copies), statistics.median(ratios), len(calls))


def _enough(rounds: int, elapsed: float, seconds: float) -> bool:
    return (rounds >= 7 and elapsed >= seconds) or (rounds >= 3 and elapsed >= 10 * seconds)


def _repeats(call: Call, device: str) -> int:
    _sample(call, 1, device)  # first use: page faults, lazy initialisation
    return max(1, min(10_000, int(2.0 / max(_sample(call, 1, device), 1e-4))))


def _sample(call: Call, repeats: int, device: str) -> float:
    """Milliseconds of one call, averaged over `repeats` calls in a row."""
    if device == "cuda":
        return _cuda_sample(call, repeats)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) * 1e3 / repeats


def _cuda_sample(call: Call, repeats: int) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)
    end: Any = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def machine(device: str = "cpu") -> dict[str, object]:
    """What a result depends on: hardware, versions, the commit if this is a checkout."""
    hardware = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "lowcomm": __version__,
        "commit": _commit(),
        "hardware": hardware,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
