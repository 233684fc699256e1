"""What an installed lowcomm consists of, and that it needs torch and numpy only."""

import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("compress", "cuda", "optim", "recipes", "sync")
SHIPPED = {
    "lowcomm": ("src/lowcomm", (".py", ".typed")),
    "lowcomm.cuda": ("cuda", (".cu", ".cuh")),
    "lowcomm.recipes": ("recipes", (".py", ".sh")),
    **{f"lowcomm.{layer}": (layer, (".py",)) for layer in ("compress", "optim", "sync")},
}
TORCH_AND_NUMPY_ONLY = """
import sys
import torch, numpy, torch._dynamo, torch.distributed.tensor
before = {name.split(".")[0] for name in sys.modules}
import lowcomm, lowcomm.optim
after = {name.split(".")[0] for name in sys.modules}
print(*sorted(after - before - set(sys.stdlib_module_names)))
"""


def _names(folder: Path, endings: tuple[str, ...]) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in endings}


@pytest.mark.parametrize("package", SHIPPED)
def test_every_source_file_is_installed(package: str) -> None:
    folder, endings = SHIPPED[package]
    installed = importlib.resources.files("lowcomm").joinpath(*package.split(".")[1:])
    with importlib.resources.as_file(installed) as path:
        there = {name for name in _names(path, endings) if package != "lowcomm" or "/" not in name}
    assert there == _names(ROOT / folder, endings)


def test_installed_package_holds_nothing_else() -> None:
    with importlib.resources.as_file(importlib.resources.files("lowcomm")) as path:
        folders = {entry.name for entry in path.iterdir() if entry.is_dir() and entry.name != "__pycache__"}
    assert folders <= set(LAYERS)


def test_cuda_folder_holds_no_python() -> None:
    # with Python in it, `import cuda` from this directory would hide NVIDIA's package of that name
    assert not list((ROOT / "cuda").rglob("*.py"))


def test_import_needs_torch_and_numpy_only() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH_AND_NUMPY_ONLY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lowcomm"]


def test_command_line_lists_its_tools_and_refuses_others() -> None:
    def lowcomm(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "lowcomm", *arguments], capture_output=True, text=True)

    assert lowcomm("--version").stdout.strip() == _version()
    usage = lowcomm("--help")
    assert usage.returncode == 0
    assert "demo" in usage.stdout
    refused = lowcomm("no-such-tool")
    assert refused.returncode == 2
    assert "no-such-tool" in refused.stderr


def _version() -> str:
    text = (ROOT / "src/lowcomm/__init__.py").read_text()
    return text.split('__version__ = "')[1].split('"')[0]


def test_metadata() -> None:
    try:
        metadata = importlib.metadata.metadata("lowcomm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("imported from the source tree, not installed")
    assert metadata["Version"] == _version()
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert sorted(text.split(">")[0] for text in required) == ["numpy", "torch"]
