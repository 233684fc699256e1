"""Documentation that cannot rot: examples run, public names are explained, links lead somewhere."""

import doctest
import importlib
import inspect
import re
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lowcomm.recipes import reference

import lowcomm
from lowcomm import compress, optim

ROOT = Path(__file__).parent.parent
PACKAGES = ("compress", "optim", "recipes", "sync")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODULES = sorted(
    f"lowcomm.{path.parent.name}.{path.stem}".removesuffix(".__init__")
    for package in PACKAGES
    for path in (Path(lowcomm.__path__[0]) / package).glob("*.py")
)
PUBLIC = [
    (package, name)
    for package in ("compress", "optim", "sync")
    for name in importlib.import_module(f"lowcomm.{package}").__all__
]


def _page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda value: str(value))
def test_public_names_are_explained(package: str, name: str) -> None:
    value = getattr(importlib.import_module(f"lowcomm.{package}"), name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    assert not (value.__doc__ or "").startswith(f"{name}("), f"{name} has only the signature that dataclasses make up"
    for method in vars(value) if inspect.isclass(value) else ():
        if not method.startswith("_") and inspect.isfunction(vars(value)[method]):
            assert method in _documented(package), f"{name}.{method} has no docstring, nor has any method of that name"


def _documented(package: str) -> set[str]:
    """Methods that are explained once, in a base class or protocol, and implemented in many."""
    module = importlib.import_module(f"lowcomm.{package}")
    classes = [getattr(module, name) for name in module.__all__ if inspect.isclass(getattr(module, name))]
    return {name for kind in classes for name, value in vars(kind).items() if getattr(value, "__doc__", None)}


def _concrete(base: str, package: str) -> list[type]:
    module = importlib.import_module(f"lowcomm.{package}")
    values = [getattr(module, name) for name in module.__all__ if name != base]
    return [value for value in values if inspect.isclass(value) and issubclass(value, getattr(module, base))]


@pytest.mark.parametrize("kind", [*_concrete("Codec", "compress"), *_concrete("LowCommOptimizer", "optim")])
def test_codecs_and_optimizers_have_an_example(kind: type) -> None:
    bases = (compress.Codec, optim.LowCommOptimizer)
    assert any(">>>" in (base.__doc__ or "") for base in kind.__mro__ if base not in bases)


def test_the_reference_page_is_current() -> None:
    written = (ROOT / "docs/reference.md").read_text()
    assert written == reference.page(), "run `make reference`"


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_python_in_pages_runs(page: Path) -> None:
    """Blocks marked `python` run one after the other, as one program for each page that has a `model` to begin with."""
    model = torch.nn.Sequential(OrderedDict(embed=torch.nn.Embedding(8, 4), head=torch.nn.Linear(4, 8)))
    names: dict[str, object] = {"__name__": "__page__", "torch": torch, "model": model}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, names, str(page), None, 0)
            assert (
                doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, clear_globs=False).failed == 0
            )
            names = test.globs
        else:
            exec(compile(block, str(page), "exec"), names)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in missing if f"({name})" not in index] == []


def test_modules_say_what_they_are_for() -> None:
    for name in MODULES:
        module: ModuleType = importlib.import_module(name)
        assert (module.__doc__ or "").strip(), name
