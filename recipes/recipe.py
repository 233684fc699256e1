"""What makes a file of one function a program: flags from its keywords, local processes or torchrun, a log.

A recipe is a module with `build(model, settings, *, ...)`, which returns the optimizer, and a dict `PAPER` with the
settings of the publication. `run(build, PAPER, argv)` trains with it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .arguments import add_training_arguments, settings_of, text_of
from .expressions import codec_from
from .launch import Report, launch
from .measure import machine
from .training import Record, Settings, train

__all__ = ["run"]

SETTINGS = Settings(steps=240, batch=8, lr=4e-3, lr_warmup=24, evaluations=8, validation_windows=256)


def run(
    build: Callable[..., Any],
    paper: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    train: Callable[..., list[Record]] = train,
) -> int:
    """Train with the optimizer that `build` makes; print a line for each validation, and one JSON object at the end.

    Args:
        build: see above; every keyword is a flag.
        paper: defaults of flags under `--preset paper`.
        argv: arguments of the command line.
        train: the loop, with the signature of `training.train`.
    """
    options = parser(build, paper, argv).parse_args(argv)
    keywords = {name: getattr(options, name) for name in flags(build)}
    settings = settings_of(options, options.seed)
    job = (settings, functools.partial(build, **keywords), text_of(options))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has made the processes
        records, chief = torchrun(train, *job)
    else:
        records, chief = launch(local, options.workers, train, *job, on_report=show)[0], True
    if chief:
        if options.log is not None:
            write_log(options.log, name_of(build), keywords, settings, records)
        print(
            json.dumps({"recipe": name_of(build), **records[-1], "settings": vars(options), **machine()}, default=str)
        )
    return 0


def local(rank: int, world_size: int, report: Report, train: Callable[..., list[Record]], *job: Any) -> list[Record]:
    """One local process's part."""
    return train(rank, world_size, report if rank == 0 else silent, *job)


def torchrun(train: Callable[..., list[Record]], *job: Any) -> tuple[list[Record], bool]:
    """This process's part under torchrun, on its GPU where there is one; (records, whether this is rank 0)."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    records = train(rank, dist.get_world_size(), show if rank == 0 else silent, *job, device)
    dist.destroy_process_group()
    return records, rank == 0


def show(report: Record) -> None:
    """One line for a validation."""
    if "validation_loss" in report:
        print(
            "step {step}, validation loss {validation_loss:.4f}, {megabytes:.2f} MB sent in {syncs} syncs, "
            "{seconds:.1f} s, {blocked_seconds:.1f} s of them blocked".format(
                megabytes=report["bytes_sent"] / 1e6, **report
            ),
            flush=True,
        )


def silent(report: Record) -> None:
    """For all ranks but the first."""


def write_log(path: Path, name: str, keywords: dict[str, Any], settings: Settings, records: list[Record]) -> None:
    """JSON lines for `lowcomm.recipes.plot`: what was run, then one record for each validation."""
    with open(path, "w") as file:
        for line in ({"run": name, "method": keywords, "settings": vars(settings)}, *records):
            file.write(json.dumps(line, default=str) + "\n")


# ---- flags ----------------------------------------------------------------------------------------------------------


def parser(
    build: Callable[..., Any], paper: Mapping[str, Any], argv: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """The flags of a recipe, with the defaults of the preset that `argv` names."""
    lines = (inspect.getdoc(sys.modules[build.__module__]) or "").split("\n")
    result = argparse.ArgumentParser(
        prog=f"lowcomm run {name_of(build)}",
        description=lines[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if paper:
        result.add_argument("--preset", choices=["paper"], help="defaults: the publication's instead of small ones")
    method = result.add_argument_group("method")
    for name, (kind, default) in flags(build).items():
        said = f"paper: {paper[name]}" if name in paper else "of the optimizer"
        method.add_argument(f"--{name.replace('_', '-')}", default=default, help=said, **kind)
    add_training_arguments(result, SETTINGS)
    result.add_argument("--log", type=Path, metavar="PATH", help="JSON lines for lowcomm.recipes.plot")
    if paper and result.parse_args(argv).preset == "paper":
        result.set_defaults(**paper)
    return result


def flags(build: Callable[..., Any]) -> dict[str, tuple[dict[str, Any], Any]]:
    """argparse's settings and the default for every keyword of `build`."""
    kinds = typing.get_type_hints(build)
    parameters = inspect.signature(build).parameters.values()
    return {p.name: (converter(kinds[p.name]), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def converter(kind: Any) -> dict[str, Any]:
    """argparse's settings for a type: bool, int, float, a Literal or a codec, each perhaps None.

    >>> converter(int | None)
    {'type': <class 'int'>}
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind}
    return {"type": codec, "metavar": "CODEC"}


def codec(text: str) -> Any:
    """`codec_from`, with None for no codec and errors as argparse wants them."""
    try:
        return None if text == "None" else codec_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def name_of(build: Callable[..., Any]) -> str:
    """The recipe's name: its file's."""
    return Path(inspect.getfile(build)).stem
