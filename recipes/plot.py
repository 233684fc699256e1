"""Draw validation loss against tokens, bytes sent and time on a slow network, from logs of `demo`, `compare`, recipes.

    python -m lowcomm.recipes.plot lowcomm-demo/*.jsonl --output loss.png

Takes matplotlib: pip install 'lowcomm[demo]'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import bits, slow_time

__all__ = ["draw", "main", "try_draw"]

COLOURS = ("#444444", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
BANDWIDTH = 100e6  # bits per second
STYLES = ("-", "-", "--")  # so that a curve under another one can be seen


def read_log(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """(name of the run, its records)."""
    with open(path) as file:
        head, *records = [json.loads(line) for line in file]
    return head["run"], records


def draw(logs: Sequence[Path], output: Path, bandwidth: float = BANDWIDTH, step_seconds: float | None = None) -> None:
    """Write a picture with three panels; runs of one name share a colour. The last panel's time is computed.

    Args:
        logs: JSON-lines files.
        output: picture to write.
        bandwidth: bits per second of the last panel's network.
        step_seconds: of computing there; None: as measured.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    colours: dict[str, str] = {}
    for path in logs:
        name, records = read_log(path)
        label = None if name in colours else name
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        style = STYLES[list(colours).index(name) % len(STYLES)]
        across = (
            [record["tokens"] for record in records],
            [record["bytes_sent"] for record in records],
            [slow_time(record, bandwidth, step_seconds) for record in records],
        )
        for panel, values in zip(panels, across, strict=True):
            panel.plot(
                values,
                [record["validation_loss"] for record in records],
                color=colour,
                linestyle=style,
                label=label,
                marker=".",
            )
    panels[0].set(xlabel="tokens, all workers", ylabel="validation loss, nats per byte")
    panels[1].set(xlabel="bytes sent by each worker", xscale="log")
    panels[2].set(xlabel=f"seconds at {bits(bandwidth)}, computed", xscale="log")
    panels[0].legend(fontsize="x-small")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(output, dpi=120)


def try_draw(
    logs: Sequence[Path], output: Path, bandwidth: float = BANDWIDTH, step_seconds: float | None = None
) -> Path | None:
    """`draw`, or where matplotlib is missing say so and return None."""
    try:
        draw(logs, output, bandwidth, step_seconds)
    except ImportError:
        print("no plot: it takes matplotlib (pip install 'lowcomm[demo]')", file=sys.stderr)
        return None
    return output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowcomm.recipes.plot", description=__doc__.split("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="JSON-lines logs")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="picture to write (default: loss.png)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bits per second of the third panel (1e8)")
    options = parser.parse_args(argv)
    draw(options.logs, options.output, options.bandwidth)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
