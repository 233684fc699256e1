"""The list of public names, in Markdown: `python -m lowcomm.recipes.reference` (`make reference`)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..compress import Codec, Feedback
from ..optim import LowCommOptimizer

__all__ = ["page"]

BITS_ELEMENTS = 2**20
HEAD = """# Reference

Every public name, with the first line of its documentation; `help(name)` has the rest: formula, arguments, errors, an
example, the source. Made by `make reference`; a test compares.
"""


def page() -> str:
    """The whole page.

    >>> "| `DiLoCo` |" in page()
    True
    """
    optim, compress, sync = (_members(name) for name in ("optim", "compress", "sync"))
    optimizers = [pair for pair in optim if _is_kind(pair[1], LowCommOptimizer)]
    codecs = [pair for pair in compress if _is_kind(pair[1], Codec) and pair[1] is not Codec]
    feedbacks = [pair for pair in compress if _is_kind(pair[1], Feedback)]
    sections = [
        HEAD,
        "## lowcomm.optim: optimizers\n\n" + _table(optimizers),
        "## lowcomm.optim: schedules and helpers\n\n" + _table(_without(optim, optimizers)),
        f"## lowcomm.compress: codecs\n\nBits per element are for {BITS_ELEMENTS:,} elements and default settings.\n\n"
        + _codec_table(codecs),
        "## lowcomm.compress: error feedback\n\n" + _table(feedbacks),
        "## lowcomm.compress: the rest\n\n" + _table(_without(compress, codecs + feedbacks)),
        "## lowcomm.sync\n\n" + _table(sync),
    ]
    return "\n".join(section if section.endswith("\n") else section + "\n" for section in sections)


Member = tuple[str, Any]


def _members(package: str) -> list[Member]:
    module = importlib.import_module(f"..{package}", __package__)
    return [(name, getattr(module, name)) for name in sorted(module.__all__)]


def _is_kind(value: Any, kind: type) -> bool:
    return inspect.isclass(value) and issubclass(value, kind)


def _without(members: Iterable[Member], others: Iterable[Member]) -> list[Member]:
    names = {name for name, _ in others}
    return [pair for pair in members if pair[0] not in names]


def _table(members: Iterable[Member]) -> str:
    rows = [f"| `{name}` | {_summary(value)} |" for name, value in members]
    return "\n".join(["| name | |", "|---|---|", *rows])


def _codec_table(members: Iterable[Member]) -> str:
    rows = [f"| `{name}` | {_bits(kind)} | {_summary(kind)} |" for name, kind in members]
    return "\n".join(["| name | bits | |", "|---|---|---|", *rows])


def _bits(kind: Callable[[], Codec]) -> str:
    try:
        codec = kind()
    except TypeError:
        return "its arguments say"
    return f"{codec.for_shapes([(1024, BITS_ELEMENTS // 1024)]).bits_per_element(BITS_ELEMENTS):.4g}"


def _summary(value: Any) -> str:
    """The first sentence of a docstring; of a constant, its value."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"= {value!r}"
    first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = first.split(". ")[0].rstrip(".")
    return sentence.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
