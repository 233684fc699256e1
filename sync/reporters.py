"""Receipts to where numbers are watched: callbacks for `AllReduce(on_receipt=...)` and `register_sync_hook`.

Nothing is imported: the callbacks call what they are given. Every number of a receipt has its own name, such as
"sync/bytes_sent" (`Receipt.scalars`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any, TextIO

from .receipt import Receipt

__all__ = ["to_csv", "to_tensorboard", "to_wandb"]

Reporter = Callable[[Receipt], None]


def to_tensorboard(writer: Any, prefix: str = "sync/") -> Reporter:
    """For a torch.utils.tensorboard.SummaryWriter, or anything with `add_scalar(name, value, step)`.

    The step is the round.

    >>> class Writer:
    ...     def add_scalar(self, name, value, step):
    ...         if name == "sync/bytes_sent":
    ...             print(name, value, step)
    >>> to_tensorboard(Writer())(Receipt(3, 0, "dense", 5, 2, bytes_sent=7))
    sync/bytes_sent 7.0 3
    """

    def report(receipt: Receipt) -> None:
        for name, value in receipt.scalars(prefix).items():
            writer.add_scalar(name, value, receipt.round)

    return report


def to_wandb(run: Any, prefix: str = "sync/") -> Reporter:
    """For the module wandb, a run of it, or anything with `log(dict)`.

    The round is one of the numbers; the run's own step counter is left alone.
    """

    def report(receipt: Receipt) -> None:
        run.log(receipt.scalars(prefix))

    return report


def to_csv(file: TextIO) -> Reporter:
    """One row for each receipt, in a file open for writing (newline=""); the first receipt makes the columns.

    Numbers that only later receipts have are left out, those that they lack are empty.

    >>> import sys
    >>> receipt = Receipt(3, 0, "dense", 5, 2)
    >>> to_csv(sys.stdout)(receipt)  # doctest: +ELLIPSIS
    round,bucket,elements,world_size,contributors,...
    3.0,0.0,5.0,2.0,...
    """
    writers: list[csv.DictWriter[str]] = []

    def report(receipt: Receipt) -> None:
        numbers = receipt.scalars()
        if not writers:
            writers.append(csv.DictWriter(file, list(numbers), extrasaction="ignore", lineterminator="\n"))
            writers[0].writeheader()
        writers[0].writerow(numbers)
        file.flush()

    return report
