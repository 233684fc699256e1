"""Draw validation loss against tokens and against bytes sent, from the logs of `demo`, `compare` or a recipe.

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

__all__ = ["draw", "main", "try_draw"]

COLOURS = ("#444444", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
STYLES = ("-", "-", "--")  # so that a curve under another one can be seen


def read_log(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """(name of the run, its records)."""
    with open(path) as file:
        head, *records = [json.loads(line) for line in file]
    return head["run"], records


def draw(logs: Sequence[Path], output: Path) -> None:
    """Write a picture with two panels; runs of one name share a colour.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours: dict[str, str] = {}
    for path in logs:
        name, records = read_log(path)
        label = None if name in colours else name
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        style = STYLES[list(colours).index(name) % len(STYLES)]
        for panel, key in zip(panels, ("tokens", "bytes_sent"), strict=True):
            panel.plot(
                [record[key] for record in records],
                [record["validation_loss"] for record in records],
                color=colour,
                linestyle=style,
                label=label,
                marker=".",
            )
    panels[0].set(xlabel="tokens, all workers", ylabel="validation loss, nats per byte")
    panels[1].set(xlabel="bytes sent by each worker", xscale="log")
    panels[0].legend()
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(output, dpi=120)


def try_draw(logs: Sequence[Path], output: Path) -> Path | None:
    """`draw`, or where matplotlib is missing say so and return None."""
    try:
        draw(logs, output)
    except ImportError:
        print("no plot: it takes matplotlib (pip install 'lowcomm[demo]')", file=sys.stderr)
        return None
    return output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowcomm.recipes.plot", description=__doc__.split("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="JSON-lines logs")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="picture to write (default: loss.png)")
    options = parser.parse_args(argv)
    draw(options.logs, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
