"""The recipes: every one trains on two ranks, has the flags and the preset it says, and runs from the command line."""

import contextlib
import functools
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import E3M0, Int4
from lowcomm.recipes import bench_overlap, fedavg, recipe, rosenbrock
from lowcomm.recipes.data import Text
from lowcomm.recipes.links import unavailable
from lowcomm.recipes.model import ModelSettings
from lowcomm.recipes.run import RECIPES, build_of
from lowcomm.recipes.training import Settings, train
from ranks import run_ranks

from lowcomm.__main__ import main

TRAINED = [name for name in RECIPES if name != "rosenbrock"]
SETTINGS = Settings(
    ModelSettings(width=16, depth=2, heads=2, context=16),
    steps=24,
    batch=4,
    lr=2e-2,
    lr_warmup=3,
    evaluations=4,
    validation_windows=8,
)
SHORT = ["--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "6"]
SHORT += ["--lr-warmup", "2", "--evaluations", "2", "--validation-windows", "8", "--lr", "0.02"]


def text() -> Text:
    verse = torch.frombuffer(bytearray(b"to be or not to be, that is the question\n" * 200), dtype=torch.uint8)
    return Text("Hamlet", verse, verse[:2000])


def _train(rank: int, world_size: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    records = {}
    for name in names:
        build = build_of(name)
        keywords = {"sync_every": 4} if "sync_every" in build.__annotations__ else {}
        loop: Any = train
        if name == "fedavg":
            keywords, loop = {"samples": 16, "epochs": 1, "fraction": 0.5}, fedavg.train
        method = functools.partial(build, **keywords)
        records[name] = loop(rank, world_size, recipe.silent, SETTINGS, method, text())
    return records


def test_every_recipe_trains_on_two_ranks() -> None:
    first, second = run_ranks(_train, 2, TRAINED)
    for name in TRAINED:
        losses = [record["validation_loss"] for record in first[name]]
        assert losses[-1] < losses[0] - 0.2, (name, losses)
        assert losses == [record["validation_loss"] for record in second[name]], name
        assert first[name][-1]["bytes_sent"] > 0, name


def test_overlap_and_state_are_told() -> None:
    records = run_ranks(_train, 2, ["diloco", "streaming_diloco", "eager_diloco"])[0]
    assert [records[name][-1]["overlap_steps"] for name in records] == [0, 1, 4]
    assert records["diloco"][1]["state_per_parameter"] == pytest.approx(4.0)  # AdamW's two, anchor, momentum
    assert records["eager_diloco"][1]["state_per_parameter"] == pytest.approx(
        6.0
    )  # the message in flight, the own share


@pytest.mark.parametrize("name", TRAINED)
def test_presets_are_flags(name: str) -> None:
    module = importlib.import_module(f"lowcomm.recipes.{name}")
    argv = ["--preset", "paper"] if module.PAPER else []
    small = vars(recipe.parser(module.build, module.PAPER, []).parse_args([]))
    options = vars(recipe.parser(module.build, module.PAPER, argv).parse_args(argv))
    assert set(module.PAPER) <= set(small)
    assert {key: options[key] for key in module.PAPER} == module.PAPER
    for key, value in recipe.flags(module.build).items():
        assert small[key] == value[1], "without the preset, the constants at the top hold"


def test_flags_go_before_presets() -> None:
    build, paper = build_of("streaming_diloco"), importlib.import_module("lowcomm.recipes.streaming_diloco").PAPER
    argv = ["--preset", "paper", "--delay", "3", "--compress", "Int4()", "--first-send", "early"]
    options = recipe.parser(build, paper, argv).parse_args(argv)
    assert (options.delay, options.compress, options.first_send) == (3, Int4(), "early")
    assert (options.sync_every, options.outer_lr) == (100, 0.4)
    none = recipe.parser(build, {}, []).parse_args(["--compress", "None"])
    assert none.compress is None
    assert recipe.parser(build, {}, []).parse_args([]).compress == E3M0()
    with pytest.raises(SystemExit):
        recipe.parser(build, {}, []).parse_args(["--compress", "Zip()"])


def lowcomm(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert main(list(arguments)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "verse.txt"
    path.write_bytes(b"to be or not to be, that is the question\n" * 1000)
    return str(path)


def test_run_prints_validations_and_json(tmp_path: Path, text_file: str) -> None:
    log = tmp_path / "log.jsonl"
    out = lowcomm("run", "diloco", *SHORT, "--sync-every", "3", "--text", text_file, "--log", str(log))
    *lines, last = out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 3", "step 6"]
    result = json.loads(last)
    assert (result["recipe"], result["step"], result["syncs"]) == ("diloco", 6, 2)
    assert result["settings"]["sync_every"] == 3
    head, *records = map(json.loads, log.read_text().splitlines())
    assert head["run"] == "diloco" and records[-1]["bytes_sent"] == result["bytes_sent"]


def test_run_lists_recipes_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    out = lowcomm("run", "--help")
    assert all(f"  {name} " in out for name in RECIPES)
    assert main(["run", "sgd"]) == 1
    assert "there is no recipe 'sgd'; there are local_sgd" in capsys.readouterr().err
    assert main(["run"]) == 2


def test_a_recipe_runs_under_torchrun(text_file: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "lowcomm.recipes.desloc", *SHORT, "--sync-every", "2", "--text", text_file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6, validation loss") == 1
    assert json.loads(done.stdout.splitlines()[-1])["recipe"] == "desloc"


def test_compare_takes_recipes_and_reuses_logs(tmp_path: Path, text_file: str) -> None:
    arguments = ["compare", "diloco(outer_lr=1.0)", *SHORT, "--sync-every", "3", "--text", text_file]
    arguments += ["--bandwidth", "1e6", "--step-time", "0.5", "--output", str(tmp_path), "--reuse"]
    first = json.loads(lowcomm(*arguments).splitlines()[-1])
    assert first["runs"][1]["method"].startswith("diloco(sync_every=3, outer_lr=1.0, outer_momentum=")
    seconds = first["runs"][1]["seconds_on_network"]["1 Mbit/s"]
    assert seconds == pytest.approx(3.0 + 8 * first["runs"][1]["bytes_sent"] / 1e6)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    again = json.loads(lowcomm(*arguments).splitlines()[-1])
    assert again["runs"] == first["runs"]
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}


def test_compare_refuses_what_a_recipe_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "qsr(beta=1)"]) == 1
    assert "the recipe does not take beta" in capsys.readouterr().err
    assert main(["compare", "rosenbrock"]) == 1
    assert "no recipe 'rosenbrock' to compare" in capsys.readouterr().err


def test_fedavg_clients_have_less_and_less() -> None:
    assert [fedavg.samples_of(96, rank, 4) for rank in range(4)] == [96, 84, 72, 60]
    batches = list(fedavg.client_batches(text().train, 10, 2, SETTINGS, round_=1))
    assert [len(tokens) for tokens, _ in batches] == [4, 4, 2] * 2


@pytest.mark.skipif(bool(unavailable()), reason="needs network namespaces")
def test_overlap_benchmark_over_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--link", "1gbit", "--elements", "4096", "--step", "0.005", "--sync-every", "4", "--delay", "1"]
    assert bench_overlap.main([*arguments, "--rounds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["local"]["exchange_ms"] == 0.0 < rows["EagerDiLoCo"]["exchange_ms"]
    assert all(row["ms"] >= 5.0 for row in rows.values())


# ---- Rosenbrock -----------------------------------------------------------------------------------------------------


def test_gradient_is_that_of_the_rosenbrock_function() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    a, b = x.unbind(1)
    ((1 - a) ** 2 + 100 * (b - a**2) ** 2).sum().backward()
    torch.testing.assert_close(rosenbrock.gradient(x.detach()), x.grad)


def test_rows_are_workers_of_adam() -> None:
    """With no noise and one period for everything, the mean is one worker's run of Adam."""
    trace = rosenbrock.simulate((("params", 1),), noise=0.0, steps=50)
    x = torch.tensor(rosenbrock.START, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=rosenbrock.LR, betas=rosenbrock.BETAS)
    for _ in range(50):
        x.grad = rosenbrock.gradient(x.detach()[None])[0]
        optimizer.step()
    assert trace.distance[-1].item() == pytest.approx(float((x.detach() - 1).norm()), rel=1e-6)
    assert float(trace.spread.max()) == pytest.approx(0.0, abs=1e-12)


def test_own_and_zeroed_moments_swing_more() -> None:
    spread = {
        name: rosenbrock.simulate(periods, reset, steps=2400).late()["spread"]
        for name, (periods, reset) in rosenbrock.METHODS.items()
    }
    assert spread["keep"] > 1.15 * spread["DES-LOC"]
    assert spread["reset"] > 2.0 * spread["DES-LOC"]
