"""Progress on standard error: a tqdm bar on a terminal that has tqdm, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

LINE_SECONDS = 10.0  # between lines where there is no terminal


class Progress:
    """Show how far each of several jobs is. `update` takes the reports of `training.run_workers`."""

    def __init__(self, titles: Sequence[str]) -> None:
        self.titles = titles
        self.terminal = sys.stderr.isatty()
        self.job, self.begin, self.shown = -1, 0.0, 0.0
        self.bar: Any = None
        self.tqdm: Any = None
        if self.terminal:
            with contextlib.suppress(ImportError):
                self.tqdm = importlib.import_module("tqdm").tqdm

    def update(self, report: dict[str, Any]) -> None:
        if "loss" not in report:
            return
        if report["job"] != self.job:
            self._close()
            self.job, self.begin, self.shown = report["job"], time.monotonic(), 0.0
            if self.tqdm is not None:
                self.bar = self.tqdm(total=report["steps"], desc=self.titles[self.job], unit="step")
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {report['loss']:.3f}", refresh=False)
            self.bar.update(report["step"] - self.bar.n)
        else:
            self._line(int(report["step"]), int(report["steps"]), float(report["loss"]))

    def _line(self, step: int, steps: int, loss: float) -> None:
        now = time.monotonic()
        if self.terminal or now - self.shown >= LINE_SECONDS or step == steps:
            self.shown = now
            line = f"{self.titles[self.job]}: step {step}/{steps}, loss {loss:.3f}, {now - self.begin:.0f} s"
            print(
                "\r" + line if self.terminal else line,
                end="   " if self.terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.terminal and self.job >= 0:
            print(file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
