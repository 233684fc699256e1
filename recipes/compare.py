"""`lowcomm compare`: any methods side by side, same text, model, inner optimizer, schedule and number of tokens.

    lowcomm compare diloco streaming_diloco "desloc(sync_every=32)" --seeds 3
    lowcomm compare "DiLoCo(sync_every=20, outer_lr=1.0)" --codec Int8 --codec "TopK(density=1/32)"

A METHOD is a recipe (lower case, see `lowcomm run`) or a class of `lowcomm.optim` around AdamW. Synchronous data
parallel always runs first, as the baseline.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowcomm.recipes import plot
from lowcomm.recipes.arguments import add_training_arguments, settings_of, text_of
from lowcomm.recipes.data import Text
from lowcomm.recipes.expressions import name_and_keywords, parse_call
from lowcomm.recipes.measure import machine
from lowcomm.recipes.model import Transformer
from lowcomm.recipes.progress import Progress
from lowcomm.recipes.report import BANDWIDTHS, summarize, table
from lowcomm.recipes.run import build_of
from lowcomm.recipes.training import Method, Record, Settings, around_adamw, run_workers

__all__ = ["Run", "add_arguments", "compare", "main", "parse_call"]

BASELINE = "synchronous"


@dataclass(frozen=True)
class Run:
    """A named method; None is synchronous data parallel.

    Attributes:
        name: in the table.
        wrap: an optimizer class of `lowcomm.optim` with keywords, or a recipe's `build` with keywords.
    """

    name: str
    wrap: functools.partial[Any] | None

    @property
    def method(self) -> Method | None:
        """What `training.train` takes."""
        if self.wrap is None or not isinstance(self.wrap.func, type):
            return self.wrap
        return functools.partial(around_adamw, self.wrap)

    def describe(self) -> str:
        if self.wrap is None:
            return "gradients averaged at every step"
        keywords, function = self.wrap.keywords, self.wrap.func
        if not isinstance(function, type):  # a recipe's defaults may change
            parameters = inspect.signature(function).parameters.values()
            keywords = {**{p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}, **keywords}
        name = function.__name__ if isinstance(function, type) else function.__module__.rpartition(".")[2]
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in keywords.items())})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lowcomm compare",
        description="Train with several methods at equal settings and tokens, beside synchronous data parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "methods", nargs="+", metavar="METHOD", help='recipe or class of lowcomm.optim: "diloco(outer_lr=0.8)"'
    )
    parser.add_argument(
        "--codec", action="append", default=[], help='of lowcomm.compress, also run with each method: "Int8"'
    )
    parser.add_argument("--sync-every", type=int, help="steps between syncs, unless METHOD says it (20 for classes)")
    add_arguments(parser, Settings(), output="lowcomm-compare")
    options = parser.parse_args(argv)
    runs = [Run(BASELINE, None)]
    for text in options.methods:
        method = method_of(text, options.sync_every)
        runs.append(Run(text, method))
        for codec in options.codec:
            compress = parse_call(codec, importlib.import_module("lowcomm.compress"))()
            runs.append(Run(f"{text} + {codec}", functools.partial(method, compress=compress)))
    return compare("compare", runs, options, argv)


def method_of(text: str, sync_every: int | None) -> functools.partial[Any]:
    """A recipe or a class with keywords, of which `sync_every` is one unless the text or the recipe says otherwise."""
    name, keywords = name_and_keywords(text)
    if name.islower():
        build = build_of(name)
        parameters = inspect.signature(build).parameters.values()
        takes = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        default = {} if sync_every is None or "sync_every" not in takes else {"sync_every": sync_every}
        unknown = set(keywords) - takes
        if unknown:
            raise ValueError(f"{text!r}: the recipe does not take {', '.join(sorted(unknown))}")
        return functools.partial(build, **{**default, **keywords})
    wrap = parse_call(text, importlib.import_module("lowcomm.optim"))
    return functools.partial(wrap.func, **{"sync_every": 20 if sync_every is None else sync_every, **wrap.keywords})


def add_arguments(parser: argparse.ArgumentParser, settings: Settings, output: str) -> None:
    """Options that all comparisons share; `settings` holds the defaults."""
    add_training_arguments(parser, settings)
    parser.add_argument("--seeds", type=int, default=1, help="repetitions, of which the table shows the mean")
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="+",
        default=list(BANDWIDTHS),
        help="of each worker, bits per second: the table's last columns and the plot's last panel",
    )
    parser.add_argument(
        "--step-time",
        type=float,
        help="computing seconds of a step in those columns; None: as measured",
    )
    parser.add_argument("--reuse", action="store_true", help="take runs that --output holds logs of from there")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path(output), help="folder for logs and plot")


def compare(tool: str, runs: Sequence[Run], options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Train all `runs` as the options say; print table and JSON; write logs and plot."""
    if options.workers < 1 or options.seeds < 1:
        raise ValueError(f"--workers and --seeds must be at least 1 but are {options.workers} and {options.seeds}")
    settings = [settings_of(options, options.seed + i) for i in range(options.seeds)]
    text = text_of(options)
    parameters = sum(p.numel() for p in Transformer(settings[0].model).parameters())
    tokens = settings[0].steps * options.workers * settings[0].batch * settings[0].model.context
    print(
        f"{parameters:,} parameters, {options.workers} workers, {tokens:,} bytes of {text.name} "
        f"({text.train.numel():,} to train on, {text.validation.numel():,} held out)",
        flush=True,
    )
    logs, paths = train_all(runs, settings, options, text)
    summary = summarize(logs, options.bandwidth, options.step_time)
    print(table(summary))
    figure = plot.try_draw(paths, options.output / "loss.png", min(options.bandwidth), options.step_time)
    print(f"logs: {options.output}" + (f", plot: {figure}" if figure else ""))
    for entry, run in zip(summary["runs"], runs, strict=True):
        entry["method"] = run.describe()
    command = ["lowcomm", tool, *(argv or [])]
    head = {
        "tool": tool,
        "command": shlex.join(command),
        **machine(),
        "text": text.name,
        "parameters": parameters,
        "workers": options.workers,
        "tokens": tokens,
        "settings": asdict(settings[0]),
    }
    print(json.dumps({**head, **summary, "plot": str(figure) if figure else None}))
    return 0


def train_all(
    runs: Sequence[Run], settings: Sequence[Settings], options: argparse.Namespace, text: Text
) -> tuple[dict[str, list[list[Record]]], list[Path]]:
    """Train every run with every seed, unless its log is to be reused; records by name and seed, and the logs."""
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = [(run, each) for each in settings for run in runs]
    paths = [options.output / f"{slug(run.name)}-seed{each.seed}.jsonl" for run, each in jobs]
    heads = [head_of(run, each, options.workers) for run, each in jobs]
    results = [read_log(path, head) if options.reuse else None for path, head in zip(paths, heads, strict=True)]
    left = [i for i, records in enumerate(results) if records is None]
    with Progress([f"{jobs[i][0].name}, seed {jobs[i][1].seed}" for i in left]) as progress:

        def on_report(report: dict[str, Any]) -> None:
            progress.update(report)
            if "records" in report:
                i = left[report["job"]]
                results[i] = report["records"]
                write_log(paths[i], heads[i], report["records"])

        if left:
            run_workers([(jobs[i][1], jobs[i][0].method) for i in left], text, options.workers, on_report)
    logs: dict[str, list[list[Record]]] = {run.name: [] for run in runs}
    for (run, _), records in zip(jobs, results, strict=True):
        assert records is not None
        logs[run.name].append(records)
    return logs, paths


def slug(name: str) -> str:
    """
    >>> slug("DiLoCo(outer_lr=0.8) + Int4")
    'diloco-outer_lr-0.8-int4'
    """
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


def head_of(run: Run, settings: Settings, workers: int) -> dict[str, Any]:
    """A log's first line: what was run."""
    return {"run": run.name, "method": run.describe(), "workers": workers, "settings": asdict(settings)}


def read_log(path: Path, head: dict[str, Any]) -> list[Record] | None:
    """The records of a run with this head, or None."""
    if not path.exists():
        return None
    first, *records = map(json.loads, path.read_text().splitlines())
    return records if first == head and records else None


def write_log(path: Path, head: dict[str, Any], records: list[Record]) -> None:
    """JSON lines: what was run, then one record per validation."""
    with open(path, "w") as file:
        for line in (head, *records):
            file.write(json.dumps(line) + "\n")
