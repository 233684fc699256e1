"""`lowcomm compare`: any methods side by side, same text, model, inner optimizer, schedule and number of tokens.

    lowcomm compare "DiLoCo(sync_every=20)" "LocalSGD(sync_every=20)" --seeds 3
    lowcomm compare DiLoCo --codec Int8 --codec "TopK(density=0.03125)"

Synchronous data parallel always runs first, as the baseline.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import os
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lowcomm.recipes import plot
from lowcomm.recipes.data import load_text
from lowcomm.recipes.model import ModelSettings, Transformer
from lowcomm.recipes.progress import Progress
from lowcomm.recipes.report import summarize, table
from lowcomm.recipes.training import Method, Record, Settings, run_workers

import lowcomm

__all__ = ["Run", "add_arguments", "compare", "main", "parse_call"]

BASELINE = "synchronous"


@dataclass(frozen=True)
class Run:
    """A named method; None is synchronous data parallel."""

    name: str
    method: Method | None

    def describe(self) -> str:
        if self.method is None:
            return "gradients averaged at every step"
        assert isinstance(self.method, functools.partial)
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.method.keywords.items())
        return f"{self.method.func.__name__}({arguments})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lowcomm compare",
        description="Train with several methods at equal settings and tokens, beside synchronous data parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("methods", nargs="+", metavar="METHOD", help='of lowcomm.optim: "DiLoCo(outer_lr=0.8)"')
    parser.add_argument(
        "--codec", action="append", default=[], help='of lowcomm.compress, also run with each method: "Int8"'
    )
    parser.add_argument("--sync-every", type=int, default=20, help="steps between syncs, unless METHOD says it")
    add_arguments(parser, Settings(), output="lowcomm-compare")
    options = parser.parse_args(argv)
    runs = [Run(BASELINE, None)]
    for text in options.methods:
        method = parse_call(text, importlib.import_module("lowcomm.optim"))
        keywords = {"sync_every": options.sync_every, **method.keywords}
        runs.append(Run(text, functools.partial(method.func, **keywords)))
        for codec in options.codec:
            compress = parse_call(codec, importlib.import_module("lowcomm.compress"))()
            runs.append(Run(f"{text} + {codec}", functools.partial(method.func, **keywords, compress=compress)))
    return compare("compare", runs, options, argv)


def parse_call(text: str, module: ModuleType) -> functools.partial[Any]:
    """`Name` or `Name(key=value, ...)`, a public class of `module`, as a partial call; values are Python literals.

    >>> import lowcomm.compress
    >>> parse_call("EF14", lowcomm.compress).func.__name__
    'EF14'
    """
    rule = f"{text!r} is not of the form Name or Name(key=value, ...)"
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(rule) from None
    if not isinstance(call.func, ast.Name) or call.args or "None" in keywords:
        raise ValueError(rule)
    if call.func.id not in module.__all__ or not isinstance(getattr(module, call.func.id), type):
        raise ValueError(f"{module.__name__} has no class {call.func.id!r}; it has {', '.join(module.__all__)}")
    return functools.partial(getattr(module, call.func.id), **keywords)


def add_arguments(parser: argparse.ArgumentParser, settings: Settings, output: str) -> None:
    """Options that all comparisons share; `settings` holds the defaults."""
    model = settings.model
    text = parser.add_argument_group("text")
    text.add_argument("--text", metavar="PATH", help="file or folder (default: the Python standard library's *.py)")
    text.add_argument("--data", metavar="hf:NAME", help="Hugging Face dataset with a column 'text'")
    training = parser.add_argument_group("training, the same for all runs")
    training.add_argument("--workers", type=int, default=2, help="local processes, one torch thread each")
    training.add_argument("--steps", type=int, default=settings.steps, help="inner steps")
    training.add_argument("--batch", type=int, default=settings.batch, help="sequences per worker and step")
    training.add_argument("--context", type=int, default=model.context, help="bytes per sequence")
    training.add_argument("--width", type=int, default=model.width, help="channels of the transformer")
    training.add_argument("--depth", type=int, default=model.depth, help="blocks of the transformer")
    training.add_argument("--heads", type=int, default=model.heads, help="attention heads")
    training.add_argument("--lr", type=float, default=settings.lr, help="AdamW's highest learning rate")
    training.add_argument("--lr-warmup", type=int, default=settings.lr_warmup, help="steps of rising learning rate")
    training.add_argument("--evaluations", type=int, default=settings.evaluations, help="validations per run")
    training.add_argument(
        "--validation-windows", type=int, default=settings.validation_windows, help="sequences per validation"
    )
    training.add_argument("--seed", type=int, default=settings.seed, help="first seed")
    training.add_argument("--seeds", type=int, default=1, help="repetitions, of which the table shows the mean")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path(output), help="folder for logs and plot")


def compare(tool: str, runs: Sequence[Run], options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Train all `runs` as the options say; print table and JSON; write logs and plot."""
    if not (options.data is None or options.data.startswith("hf:")):
        raise ValueError(f"--data must be hf:NAME but is {options.data!r}")
    if options.workers < 1 or options.seeds < 1:
        raise ValueError(f"--workers and --seeds must be at least 1 but are {options.workers} and {options.seeds}")
    settings = [settings_of(options, options.seed + i) for i in range(options.seeds)]
    text = load_text(options.text, None if options.data is None else options.data[3:])
    parameters = sum(p.numel() for p in Transformer(settings[0].model).parameters())
    tokens = settings[0].steps * options.workers * settings[0].batch * settings[0].model.context
    print(
        f"{parameters:,} parameters, {options.workers} workers, {tokens:,} bytes of {text.name} "
        f"({text.train.numel():,} to train on, {text.validation.numel():,} held out)",
        flush=True,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = [(run, each) for each in settings for run in runs]
    paths = [options.output / f"{slug(run.name)}-seed{each.seed}.jsonl" for run, each in jobs]
    with Progress([f"{run.name}, seed {each.seed}" for run, each in jobs]) as progress:

        def on_report(report: dict[str, Any]) -> None:
            progress.update(report)
            if "records" in report:
                run, each = jobs[report["job"]]
                write_log(paths[report["job"]], run, each, options.workers, report["records"])

        results = run_workers([(each, run.method) for run, each in jobs], text, options.workers, on_report)
    logs: dict[str, list[list[Record]]] = {run.name: [] for run in runs}
    for (run, _), records in zip(jobs, results, strict=True):
        logs[run.name].append(records)
    summary = summarize(logs)
    print(table(summary))
    figure = plot.try_draw(paths, options.output / "loss.png")
    print(f"logs: {options.output}" + (f", plot: {figure}" if figure else ""))
    for entry, run in zip(summary["runs"], runs, strict=True):
        entry["method"] = run.describe()
    command = ["lowcomm", tool, *(argv or [])]
    head = {
        "tool": tool,
        "command": shlex.join(command),
        **environment(),
        "text": text.name,
        "parameters": parameters,
        "workers": options.workers,
        "tokens": tokens,
        "settings": asdict(settings[0]),
    }
    print(json.dumps({**head, **summary, "plot": str(figure) if figure else None}))
    return 0


def settings_of(options: argparse.Namespace, seed: int) -> Settings:
    return Settings(
        model=ModelSettings(options.width, options.depth, options.heads, options.context),
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        lr_warmup=options.lr_warmup,
        evaluations=options.evaluations,
        validation_windows=options.validation_windows,
        seed=seed,
    )


def environment() -> dict[str, Any]:
    """What a result depends on beside the settings."""
    return {
        "version": lowcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def slug(name: str) -> str:
    """
    >>> slug("DiLoCo(outer_lr=0.8) + Int4")
    'diloco-outer_lr-0.8-int4'
    """
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


def write_log(path: Path, run: Run, settings: Settings, workers: int, records: list[Record]) -> None:
    """JSON lines: what was run, then one record per validation."""
    head = {"run": run.name, "method": run.describe(), "workers": workers, "settings": asdict(settings)}
    with open(path, "w") as file:
        for line in (head, *records):
            file.write(json.dumps(line) + "\n")
