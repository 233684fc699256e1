"""`lowcomm run RECIPE ...`: train with one method; `lowcomm run RECIPE --help` lists its flags.

Under torchrun the same files are modules: torchrun --nproc-per-node 2 -m lowcomm.recipes.diloco.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["RECIPES", "build_of", "main"]

RECIPES = (
    "local_sgd",
    "qsr",
    "fedavg",
    "hierarchical",
    "diloco",
    "streaming_diloco",
    "eager_diloco",
    "co2",
    "slowmo",
    "sign_momentum",
    "desloc",
    "mtdao",
    "sparseloco",
    "muloco",
    "autoloco",
    "rosenbrock",
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name = arguments[0].replace("-", "_")
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {arguments[0]!r}; there are {', '.join(RECIPES)}")
    return int(importlib.import_module(f"lowcomm.recipes.{name}").main(arguments[1:]))


def usage() -> str:
    """One line for each recipe: the first of its documentation."""
    lines = [
        f"  {name:<17} {(importlib.import_module(f'lowcomm.recipes.{name}').__doc__ or '').splitlines()[0]}"
        for name in RECIPES
    ]
    return "usage: lowcomm run RECIPE [options]\n\nrecipes:\n" + "\n".join(lines)


def build_of(name: str) -> Callable[..., Any]:
    """The function `build` of a recipe that trains in the common loop.

    Raises:
        ValueError: there is no such recipe.
    """
    recipe = importlib.import_module(f"lowcomm.recipes.{name}") if name in RECIPES else None
    build: Callable[..., Any] | None = getattr(recipe, "build", None)
    if build is None:
        raise ValueError(f"there is no recipe {name!r} to compare; there are {', '.join(RECIPES)}")
    return build
