"""Text as bytes: the Python standard library, any file or folder, or a Hugging Face dataset; and batches for workers.

Validation text comes from files (or documents) that no worker trains on.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batches", "Text", "load_text", "windows"]

HELD_OUT = 20  # one document in this many is for validation
MAX_BYTES = 1 << 28  # read no more than this many bytes of text
SKIPPED_FOLDERS = ("__pycache__", "encodings", "site-packages", "test", "tests", "idle_test", "pydoc_data")
SEPARATOR = b"\n\0"  # between documents


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on.

    Attributes:
        name: where they come from.
        train: (n,) uint8.
        validation: (m,) uint8.
    """

    name: str
    train: Tensor
    validation: Tensor


def load_text(path: str | None = None, dataset: str | None = None) -> Text:
    """Read training and validation text.

    Args:
        path: a file, of which the last twentieth is for validation, or a folder, of whose text files one in twenty
            is. Default: the *.py files of this Python's standard library.
        dataset: name of a Hugging Face dataset with a column "text", read through the `datasets` package.

    Raises:
        ValueError: there is too little text, or both `path` and `dataset` are given.
        RuntimeError: the `datasets` package is missing.
    """
    if path is not None and dataset is not None:
        raise ValueError(f"give a path or a dataset, not both: {path!r} and {dataset!r}")
    if dataset is not None:
        return split_documents(f"hf:{dataset}", huggingface_documents(dataset))
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return split_documents("Python standard library", folder_documents(root, "*.py"))
    if os.path.isdir(path):
        return split_documents(path, folder_documents(Path(path), "*"))
    if not os.path.isfile(path):
        raise ValueError(f"no such file or folder: {path!r}")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES)
    cut = len(content) - len(content) // HELD_OUT
    return checked(path, content[:cut], content[cut:])


def folder_documents(root: Path, pattern: str) -> Iterator[bytes]:
    """The files below `root`, in the order of their names; binary files are left out."""
    names = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob(pattern)
        if not set(file.relative_to(root).parts[:-1]) & set(SKIPPED_FOLDERS)
    )
    for name in names:
        if (root / name).is_file():
            content = (root / name).read_bytes()
            if b"\0" not in content:
                yield content


def huggingface_documents(name: str) -> Iterator[bytes]:
    """The column "text" of a dataset's split "train"."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise RuntimeError(f"reading hf:{name} takes the datasets package: pip install 'lowcomm[hf]'") from None
    rows = datasets.load_dataset(name, split="train", streaming=True)
    for row in rows:
        if "text" not in row:
            raise ValueError(f"dataset {name!r} has no column 'text' but {sorted(row)}")
        yield row["text"].encode()


def split_documents(name: str, documents: Iterable[bytes]) -> Text:
    """Put the first of every `HELD_OUT` documents aside for validation."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, content in enumerate(documents):
        parts[number % HELD_OUT == 0].append(content)
        size += len(content)
        if size >= MAX_BYTES:
            break
    return checked(name, SEPARATOR.join(parts[0]), SEPARATOR.join(parts[1]))


def checked(name: str, train: bytes, validation: bytes) -> Text:
    if min(len(train), len(validation)) < 1024:
        raise ValueError(
            f"{name} has {len(train)} bytes to train on and {len(validation)} to validate on; both take at least "
            "1024: give more text"
        )
    return Text(name, as_tensor(train), as_tensor(validation))


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), length) int64: the targets are the inputs one byte later."""
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


class Batches:
    """Endless batches for one worker; in one pass over the text no two workers see the same bytes.

    Each pass cuts the text at a new offset into windows, shuffles them alike on every worker, and deals them out.

    Args:
        text: (n,) uint8.
        size: sequences in a batch.
        length: bytes in a sequence.
        rank, world_size: which worker this is, and of how many.
        seed: equal on all workers.

    Raises:
        ValueError: the text is too short for one batch per worker.
    """

    def __init__(self, text: Tensor, size: int, length: int, rank: int, world_size: int, seed: int = 0) -> None:
        usable = text.numel() - 1 - (length - 1)  # after the largest offset
        if usable // length < size * world_size:
            raise ValueError(
                f"{text.numel()} bytes of text are too few for {world_size} workers with batches of {size} sequences "
                f"of {length} bytes; use more text or a smaller batch"
            )
        self.text, self.size, self.length = text, size, length
        self.rank, self.world_size, self.seed = rank, world_size, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in itertools.count():
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = int(torch.randint(self.length, (), generator=generator))
            count = (self.text.numel() - 1 - offset) // self.length
            order = torch.randperm(count, generator=generator)
            rounds = count // (self.size * self.world_size)
            dealt = order[: rounds * self.size * self.world_size].view(rounds, self.world_size, self.size)
            for chosen in dealt[:, self.rank]:
                yield windows(self.text, offset + chosen * self.length, self.length)
