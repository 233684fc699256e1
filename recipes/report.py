"""From the records of several runs to a summary, a table, and the time that slower networks would take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lowcomm.recipes.training import Record

__all__ = ["align", "summarize", "table", "time_to_loss"]

BANDWIDTHS = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}  # bits per second, each worker's uplink
INITIAL_LOSS = math.log(256)  # of a model that knows nothing about bytes


def summarize(logs: dict[str, list[list[Record]]]) -> dict[str, Any]:
    """Means over seeds for each run, and its loss and bytes relative to the first run's.

    Args:
        logs: records by run name and seed; the first run is the baseline.

    Returns:
        "runs" (one entry per run: means, and under "seeds" each seed's last record) and "target_loss" (by seed: the
        highest final loss of all runs, so that every run reaches it), to which "seconds_to_target" refers.
    """
    seeds = len(next(iter(logs.values())))
    targets = [max(records[seed][-1]["validation_loss"] for records in logs.values()) for seed in range(seeds)]
    runs = [summarize_run(name, records, targets) for name, records in logs.items()]
    for run in runs:
        run["loss_increase_percent"] = 100 * (run["validation_loss"] / runs[0]["validation_loss"] - 1)
        run["times_fewer_bytes"] = runs[0]["bytes_sent"] / run["bytes_sent"] if run["bytes_sent"] else math.inf
    return {"target_loss": targets, "runs": runs}


def summarize_run(name: str, logs: Sequence[list[Record]], targets: Sequence[float]) -> dict[str, Any]:
    last = [records[-1] for records in logs]

    def mean(key: str) -> float:
        return statistics.fmean(record[key] for record in last)

    return {
        "name": name,
        "validation_loss": mean("validation_loss"),
        "bytes_sent": round(mean("bytes_sent")),
        "syncs": round(mean("syncs")),
        "seconds": mean("seconds"),
        "blocked_seconds": mean("blocked_seconds"),
        "tokens_per_second": last[0]["tokens"] / mean("seconds"),
        "seconds_to_target": {
            label: statistics.fmean(time_to_loss(r, t, bandwidth) for r, t in zip(logs, targets, strict=True))
            for label, bandwidth in BANDWIDTHS.items()
        },
        "seeds": last,
    }


def time_to_loss(records: Sequence[Record], target: float, bandwidth: float) -> float:
    """Seconds until the validation loss first falls to `target` if every byte took 8 / bandwidth seconds.

    Time and bytes are interpolated between validations. The time is what was measured without the waiting, plus the
    bytes sent over the bandwidth, nothing overlapped: computed, not measured.
    """
    before: Record = {"validation_loss": INITIAL_LOSS, "seconds": 0.0, "blocked_seconds": 0.0, "bytes_sent": 0}
    for record in records:
        if record["validation_loss"] <= target:
            drop = before["validation_loss"] - record["validation_loss"]
            part = (before["validation_loss"] - target) / drop if drop > 0 else 1.0
            return slow_time(before, bandwidth) * (1 - part) + slow_time(record, bandwidth) * part
        before = record
    return math.inf


def slow_time(record: Record, bandwidth: float) -> float:
    compute: float = record["seconds"] - record["blocked_seconds"]
    return compute + 8 * int(record["bytes_sent"]) / bandwidth


def table(summary: dict[str, Any]) -> str:
    """The summary as text for a terminal."""
    head = ["", "val loss", "", "MB sent", "fewer", "syncs", "blocked s", "tokens/s", *BANDWIDTHS]
    rows = [head] + [
        [
            run["name"],
            f"{run['validation_loss']:.4f}",
            f"{run['loss_increase_percent']:+.1f} %",
            f"{run['bytes_sent'] / 1e6:,.2f}",
            f"{run['times_fewer_bytes']:,.0f}x",
            f"{run['syncs']:,}",
            f"{run['blocked_seconds']:.1f}",
            f"{run['tokens_per_second']:,.0f}",
            *(f"{seconds:,.0f} s" for seconds in run["seconds_to_target"].values()),
        ]
        for run in summary["runs"]
    ]
    seeds = len(summary["target_loss"])
    target = statistics.fmean(summary["target_loss"])
    note = (
        f"{'Means of ' + str(seeds) + ' seeds' if seeds > 1 else 'One seed'}; MB sent by each worker; blocked: time "
        f"spent waiting for the exchange, here over the loopback interface.\nLast columns: time to validation loss "
        f"{target:.4f}, which all reach, on a network of that bandwidth: computed as measured time without the waiting "
        "plus bytes over bandwidth."
    )
    return align(rows, left=1) + "\n\n" + note


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
