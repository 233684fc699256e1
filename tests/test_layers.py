"""Rules of the source tree that no compiler checks: imports point one way, code is ASCII and knows no machine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("compress", "sync", "optim", "recipes")  # each may import those before it
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
CODE_ENDINGS = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".toml"}
TEXT_ENDINGS = CODE_ENDINGS | {".csv", ".json", ".md", ".txt"}
FOLDERS = ("compress", "cuda", "docs", "optim", "recipes", "src", "sync", "tests", ".ci")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")


def _tree() -> list[Path]:
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "egg-info" not in str(path)]
    paths = [path for path in [*ROOT.iterdir(), *below] if path.is_file()]
    return [path for path in paths if path.suffix in TEXT_ENDINGS or path.name in ("Makefile", "run")]


def _imported_layers(source: str) -> set[str]:
    """The layers that a file with this text imports from other folders."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level >= 2:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("lowcomm."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lowcomm.")}
    return found & set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    assert _imported_layers(path.read_text()) <= set(LAYERS[: LAYERS.index(own) + 1])


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("from ..optim import DiLoCo", {"optim"}),
        ("from ..optim.engine import Engine", {"optim"}),
        ("from .. import sync", {"sync"}),
        ("import lowcomm.recipes.bench", {"recipes"}),
        ("from lowcomm.sync import AllReduce", {"sync"}),
        ("from .sync import AllReduce", set()),
        ("import torch.optim", set()),
    ],
)
def test_imports_are_recognised(line: str, layers: set[str]) -> None:
    assert _imported_layers(line) == layers


def test_compress_knows_no_process_groups() -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == "compress":
            assert "torch.distributed" not in path.read_text(), path


def test_code_is_ascii() -> None:
    for path in _tree():
        if path.suffix in CODE_ENDINGS or path.name == "Makefile":
            assert path.read_bytes().isascii(), path


def test_no_path_of_a_machine() -> None:
    for path in _tree():
        found = MACHINE_PATH.search(path.read_text())
        assert found is None, f"{path}: {found}"
