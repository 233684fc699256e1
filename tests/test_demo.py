"""The demo, the comparison, the torchrun script and the worker launcher, end to end on tiny settings."""

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lowcomm.recipes import plot, train
from lowcomm.recipes.data import Batches, load_text, windows
from lowcomm.recipes.launch import launch
from lowcomm.recipes.model import ModelSettings, Transformer, rotary_table, rotate
from lowcomm.recipes.report import summarize, table, time_to_loss

from lowcomm.__main__ import main

TINY = ["--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch", "2", "--lr-warmup", "2"]
SHORT = [*TINY, "--steps", "12", "--evaluations", "3", "--validation-windows", "8", "--sync-every", "4"]


def lowcomm(*arguments: str) -> tuple[str, str]:
    """Standard output and standard error of a tool that succeeds."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(list(arguments)) == 0
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"chapter {i}\n" + "to be or not to be, that is the question\n" * 20)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[str, str, Path]:
    """Standard output, standard error and folder of a tiny demo."""
    folder = tmp_path_factory.mktemp("demo")
    out, err = lowcomm("demo", *SHORT, "--seeds", "2", "--text", str(text_folder), "--output", str(folder))
    return out, err, folder


def test_demo_ends_with_one_json_object(demo: tuple[str, str, Path]) -> None:
    result = json.loads(demo[0].splitlines()[-1])
    synchronous, diloco, compressed = result["runs"]
    size = 4 * result["parameters"]
    assert result["tokens"] == 12 * 2 * 2 * 16
    assert synchronous["bytes_sent"] == 12 * size  # 2 (N-1)/N of the gradient, N = 2
    assert 3 * size <= diloco["bytes_sent"] < 3 * size + 1000
    assert 3 * size / 8 < compressed["bytes_sent"] < 3 * size / 6
    assert [len(run["seeds"]) for run in result["runs"]] == [2, 2, 2]
    for run in result["runs"]:
        assert 0 < run["validation_loss"] < math.log(256) + 1
        assert 0 <= run["blocked_seconds"] <= run["seconds"]
        slow, middle, fast = run["seconds_to_target"].values()
        assert 0 < fast <= middle <= slow < math.inf
    assert diloco["loss_increase_percent"] == pytest.approx(
        100 * (diloco["validation_loss"] / synchronous["validation_loss"] - 1)
    )


def test_demo_prints_a_table_and_progress(demo: tuple[str, str, Path]) -> None:
    rows = demo[0].splitlines()
    head = next(i for i, row in enumerate(rows) if "val loss" in row)
    assert [row.split("  ")[0] for row in rows[head + 2 : head + 5]] == ["synchronous", "DiLoCo", "DiLoCo + Int4"]
    for column in ("MB sent", "syncs", "blocked s", "tokens/s", "100 Mbit/s", "1 Gbit/s"):
        assert column in rows[head]
    assert "computed" in demo[0]
    assert re.search(r"DiLoCo, seed 1: step 12/12, loss \d", demo[1])


def test_demo_writes_logs_and_plot(demo: tuple[str, str, Path], tmp_path: Path) -> None:
    folder = demo[2]
    logs = sorted(folder.glob("*.jsonl"))
    assert len(logs) == 6
    for log in logs:
        head, *records = map(json.loads, log.read_text().splitlines())
        assert head["settings"]["steps"] == 12
        assert [record["step"] for record in records] == [4, 8, 12]
        assert [record["tokens"] for record in records] == [256, 512, 768]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot.main([*map(str, logs), "--output", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")


def test_plot_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.try_draw([], tmp_path / "loss.png") is None
    assert "matplotlib" in capsys.readouterr().err


def test_compare_runs_methods_and_codecs(tmp_path: Path, text_folder: Path) -> None:
    arguments = ["DiLoCo(outer_lr=1.0, outer_momentum=0.0)", "LocalSGD", "--codec", "Int8", *SHORT]
    arguments += ["--evaluations", "6"]  # between syncs too, where LocalSGD has no shared weights
    out, _ = lowcomm("compare", *arguments, "--text", str(text_folder), "--output", str(tmp_path))
    runs = {run["name"]: run for run in json.loads(out.splitlines()[-1])["runs"]}
    diloco, local_sgd = runs["DiLoCo(outer_lr=1.0, outer_momentum=0.0)"], runs["LocalSGD"]
    assert diloco["validation_loss"] == pytest.approx(local_sgd["validation_loss"], rel=1e-4)
    assert runs["LocalSGD + Int8"]["bytes_sent"] < local_sgd["bytes_sent"] / 3
    assert runs["LocalSGD + Int8"]["method"].startswith("LocalSGD(sync_every=4, compress=Int8")


def _processes(session: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, their_session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(their_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_demo_is_the_end_of_its_workers(end: signal.Signals, tmp_path: Path, text_folder: Path) -> None:
    command = [sys.executable, "-m", "lowcomm", "demo", *TINY, "--steps", "1000000", "--evaluations", "1"]
    command += [
        "--text",
        str(text_folder),
        "--output",
        str(tmp_path),
        "--workers",
        "1" if end == signal.SIGKILL else "2",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a test run in the background ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "synchronous, seed 0: step" in line:
            break
    assert len(_processes(process.pid)) >= 2
    process.send_signal(end)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in rest
    deadline = time.monotonic() + 20
    while _processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes(process.pid) == []


def _fail_or_wait(rank: int, world_size: int, report: object, how: str) -> int:
    if rank == world_size - 1 and how == "error":
        raise ValueError("no luck")
    if rank == world_size - 1 and how == "die":
        os._exit(3)
    torch.distributed.barrier()  # with the other gone, only the launcher ends this
    return rank


@pytest.mark.parametrize(
    ("workers", "how", "message"), [(2, "error", "worker 1 failed.*no luck"), (1, "die", "worker 0 .* exit code 3")]
)
def test_launch_reports_a_failed_worker(workers: int, how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        launch(_fail_or_wait, workers, how)


def test_train_script_under_torchrun(text_folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", train.__file__]
    command += ["--text", str(text_folder), "--steps", "4", "--sync-every", "2", "--batch", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 4, loss \d\.\d+, 0\.\d+ MB sent", done.stdout)
    assert re.search(r"validation loss \d\.\d+", done.stdout)


# ---- model ----------------------------------------------------------------------------------------------------------


def test_model_is_causal_and_tied() -> None:
    model = Transformer(ModelSettings(width=16, depth=2, heads=2, context=8))
    for block in model.blocks:
        torch.nn.init.normal_(block.down.weight, std=0.3)
        torch.nn.init.normal_(block.attention.output.weight, std=0.3)
    tokens = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])
    assert sum(p.numel() for p in model.parameters()) == 256 * 16 + 2 * (12 * 16 * 16 + 2 * 16) + 16
    with pytest.raises(ValueError, match="at most 8 tokens here but this one has 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"multiple of 2 \* heads = 6"):
        ModelSettings(width=16, heads=3)


def test_rotary_scores_depend_on_distance_only() -> None:
    cos, sin = rotary_table(32, 8)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).expand(32, 2, 8).unbind(1)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).T
    for distance in (-3, 0, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(q, cos, sin).norm(dim=-1), q.norm(dim=-1))


def test_model_learns() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelSettings(width=32, depth=2, heads=2, context=16))
    tokens, targets = windows(torch.arange(40, dtype=torch.uint8), torch.arange(16), 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


# ---- data -----------------------------------------------------------------------------------------------------------


def test_standard_library_text_holds_files_out() -> None:
    text = load_text()
    assert text.train.numel() > 2**21
    assert 2**16 < text.validation.numel() < text.train.numel() / 8
    line = bytes(text.validation[1000:1400].tolist())
    assert line not in bytes(text.train.tolist())


def test_text_from_file_and_folder(tmp_path: Path, text_folder: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 251)) * 200)
    text = load_text(str(file))
    assert (text.train.numel(), text.validation.numel()) == (47_500, 2_500)
    folder = load_text(str(text_folder))
    chapters = [
        set(re.findall(rb"chapter (\d+)\n", bytes(part.tolist()))) for part in (folder.train, folder.validation)
    ]
    assert chapters[1] and not chapters[0] & chapters[1]
    assert len(chapters[0] | chapters[1]) == 60
    (tmp_path / "small.txt").write_text("too short")
    for path, rule in ((tmp_path / "small.txt", "give more text"), (tmp_path / "none", "no such file or folder")):
        with pytest.raises(ValueError, match=rule):
            load_text(str(path))


def test_workers_see_disjoint_text_and_equal_order() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    workers = [iter(Batches(text, size=3, length=4, rank=rank, world_size=2, seed=5)) for rank in range(2)]
    rounds = 250 // 4 // 6 - 1  # a safe part of the first pass
    batches = [[next(worker) for _ in range(rounds)] for worker in workers]
    starts = [int(row[0]) for worker in batches for tokens, _ in worker for row in tokens]
    assert len(starts) == len(set(starts)) == rounds * 6
    assert len({start % 4 for start in starts}) == 1
    tokens, targets = batches[0][0]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    again = next(iter(Batches(text, size=3, length=4, rank=0, world_size=2, seed=5)))
    assert torch.equal(again[0], tokens)
    other = next(iter(Batches(text, size=3, length=4, rank=0, world_size=2, seed=6)))
    assert not torch.equal(other[0], tokens)
    with pytest.raises(ValueError, match="250 bytes of text are too few"):
        Batches(text, size=32, length=4, rank=0, world_size=2)


# ---- report ---------------------------------------------------------------------------------------------------------


def _record(loss: float, num_bytes: int, seconds: float, blocked: float) -> dict[str, float]:
    times = {"seconds": seconds, "blocked_seconds": blocked}
    common = {"tokens": 1000, "syncs": 2, "step": 10, "overlap_steps": 0, "state_per_parameter": 4.0}
    return {"validation_loss": loss, "bytes_sent": num_bytes, **common, **times}


def test_time_to_loss_is_compute_plus_bytes_over_bandwidth() -> None:
    records = [_record(3.0, 1000, 10.0, 4.0), _record(2.0, 2000, 22.0, 8.0)]
    assert time_to_loss(records, 2.0, bandwidth=8000) == pytest.approx(14 + 2)
    assert time_to_loss(records, 2.5, bandwidth=8000) == pytest.approx((6 + 1 + 14 + 2) / 2)
    assert time_to_loss(records, 1.9, bandwidth=8000) == math.inf


def test_summary_takes_means_over_seeds() -> None:
    logs = {
        "base": [[_record(2.0, 4000, 10.0, 5.0)], [_record(4.0, 4000, 10.0, 5.0)]],
        "local": [[_record(2.2, 100, 8.0, 0.0)], [_record(4.1, 100, 8.0, 0.0)]],
    }
    summary = summarize(logs)
    assert summary["target_loss"] == [2.2, 4.1]
    base, local = summary["runs"]
    assert base["validation_loss"] == 3.0
    assert local["loss_increase_percent"] == pytest.approx(5.0)
    assert local["times_fewer_bytes"] == 40.0
    assert local["tokens_per_second"] == 125.0
    assert "+5.0 %" in table(summary) and "40x" in table(summary)
