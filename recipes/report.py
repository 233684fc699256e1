"""From the records of several runs to a summary, a table, and the time that slower networks would take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lowcomm.recipes.training import Record

__all__ = ["align", "bits", "slow_time", "summarize", "table", "time_to_loss"]

BANDWIDTHS = (10e6, 100e6, 1e9)  # bits per second, each worker's uplink
INITIAL_LOSS = math.log(256)  # of a model that knows nothing about bytes


def summarize(
    logs: dict[str, list[list[Record]]],
    bandwidths: Sequence[float] = BANDWIDTHS,
    step_seconds: float | None = None,
) -> dict[str, Any]:
    """Means over seeds for each run, and its loss and bytes relative to the first run's.

    Args:
        logs: records by run name and seed; the first run is the baseline.
        bandwidths: of the networks whose time is computed, bits per second.
        step_seconds: of computing in those times; None: as measured, run by run.

    Returns:
        "runs" (one entry per run: means, and under "seeds" each seed's last record) and "target_loss" (by seed: the
        highest final loss of all runs, so that every run reaches it), to which "seconds_to_target" refers.
        "seconds_on_network" is the time of the whole run there.
    """
    seeds = len(next(iter(logs.values())))
    targets = [max(records[seed][-1]["validation_loss"] for records in logs.values()) for seed in range(seeds)]
    runs = [summarize_run(name, records, targets, bandwidths, step_seconds) for name, records in logs.items()]
    for run in runs:
        run["loss_increase_percent"] = 100 * (run["validation_loss"] / runs[0]["validation_loss"] - 1)
        run["times_fewer_bytes"] = runs[0]["bytes_sent"] / run["bytes_sent"] if run["bytes_sent"] else math.inf
    return {"target_loss": targets, "runs": runs}


def summarize_run(
    name: str,
    logs: Sequence[list[Record]],
    targets: Sequence[float],
    bandwidths: Sequence[float],
    step_seconds: float | None,
) -> dict[str, Any]:
    last = [records[-1] for records in logs]

    def mean(key: str) -> float:
        return statistics.fmean(record[key] for record in last)

    return {
        "name": name,
        "validation_loss": mean("validation_loss"),
        "validation_loss_spread": spread([record["validation_loss"] for record in last]),
        "bytes_sent": round(mean("bytes_sent")),
        "syncs": round(mean("syncs")),
        "seconds": mean("seconds"),
        "blocked_seconds": mean("blocked_seconds"),
        "tokens_per_second": last[0]["tokens"] / mean("seconds"),
        "state_per_parameter": mean("state_per_parameter"),
        "seconds_to_target": {
            bits(bandwidth): statistics.fmean(
                time_to_loss(r, t, bandwidth, step_seconds) for r, t in zip(logs, targets, strict=True)
            )
            for bandwidth in bandwidths
        },
        "seconds_on_network": {
            bits(bandwidth): statistics.fmean(slow_time(record, bandwidth, step_seconds) for record in last)
            for bandwidth in bandwidths
        },
        "seeds": last,
    }


def spread(values: Sequence[float]) -> float:
    """Standard deviation of the seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def time_to_loss(
    records: Sequence[Record], target: float, bandwidth: float, step_seconds: float | None = None
) -> float:
    """Seconds on a network of `bandwidth` until the validation loss first falls to `target`.

    Time is interpolated between validations.
    """
    loss, seconds = INITIAL_LOSS, 0.0
    for record in records:
        now = slow_time(record, bandwidth, step_seconds)
        if record["validation_loss"] <= target:
            drop = loss - record["validation_loss"]
            part = (loss - target) / drop if drop > 0 else 1.0
            return seconds * (1 - part) + now * part
        loss, seconds = record["validation_loss"], now
    return math.inf


def slow_time(record: Record, bandwidth: float, step_seconds: float | None = None) -> float:
    """Seconds that the run so far would take on a network of `bandwidth` bits per second: computed, not measured.

    The time measured without waiting, or `step_seconds` for each step, plus for every sync its bytes over the
    bandwidth, less the steps that hide it; but no less than all bytes take.
    """
    measured = float(record["seconds"] - record["blocked_seconds"])
    compute = measured if step_seconds is None else step_seconds * int(record["step"])
    network = 8 * float(record["bytes_sent"]) / bandwidth
    hidden = compute * float(record["syncs"] * record["overlap_steps"] / record["step"])
    return max(compute + max(0.0, network - hidden), network)


def table(summary: dict[str, Any]) -> str:
    """The summary as text for a terminal."""
    networks = list(summary["runs"][0]["seconds_to_target"])
    head = ["", "val loss", "+-", "", "MB sent", "fewer", "syncs", "state", "blocked s", "tokens/s", *networks]
    rows = [head] + [
        [
            run["name"],
            f"{run['validation_loss']:.4f}",
            f"{run['validation_loss_spread']:.4f}" if len(run["seeds"]) > 1 else "-",
            f"{run['loss_increase_percent']:+.1f} %",
            f"{run['bytes_sent'] / 1e6:,.2f}",
            f"{run['times_fewer_bytes']:,.0f}x",
            f"{run['syncs']:,}",
            f"{run['state_per_parameter']:.1f}",
            f"{run['blocked_seconds']:.1f}",
            f"{run['tokens_per_second']:,.0f}",
            *(f"{seconds:,.1f} s" for seconds in run["seconds_to_target"].values()),
        ]
        for run in summary["runs"]
    ]
    seeds = len(summary["target_loss"])
    target = statistics.fmean(summary["target_loss"])
    note = (
        f"{'Means and standard deviations of ' + str(seeds) + ' seeds' if seeds > 1 else 'One seed'}; MB sent by each "
        "worker; state: numbers kept for each parameter, 2 of them AdamW's; blocked: time spent waiting for the "
        f"exchange, here over the loopback interface.\nLast columns: time to validation loss {target:.4f}, which all "
        "reach, on a network of that bandwidth: computed as the time of the steps without the waiting plus bytes over "
        "bandwidth, as far as the method's overlap does not hide it."
    )
    return align(rows, left=1) + "\n\n" + note


def bits(rate: float) -> str:
    """A bandwidth with its unit.

    >>> bits(1e8), bits(2.5e9)
    ('100 Mbit/s', '2.5 Gbit/s')
    """
    if rate == math.inf:
        return "never"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} bit/s"


def align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns of equal width under a ruled head; the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
