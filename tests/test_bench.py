"""The codec benchmark measures what it says, on tiny sizes."""

import csv
import json
from pathlib import Path

import pytest
import torch
from lowcomm.compress import TopK
from lowcomm.recipes import bench, bench_engine
from lowcomm.recipes.bench_engine import outside_inner
from lowcomm.recipes.expressions import codec_from
from lowcomm.recipes.measure import against_copy
from lowcomm.recipes.peers import PEERS, Message, Peer, missing


@pytest.fixture(autouse=True)
def _small_error_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ERROR_ELEMENTS", 2**15)


@pytest.mark.parametrize("text", ["TopK", "TopK()", " TopK(density=1 / 64) ", "TopK(density=(2-1)*0.5/32)"])
def test_codec_expressions(text: str) -> None:
    assert codec_from(text) == TopK()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TopK5()",
        "Codec()",
        "os.system('true')",
        "TopK(**{})",
        "TopK(no=1)",
        "TopK(density=2)",
        "TopK(k=2**6)",
        "TopK() or 1",
    ],
)
def test_codec_expressions_refuse_the_rest(text: str) -> None:
    with pytest.raises(ValueError, match="codec"):
        codec_from(text)


def test_bench_reports_rates_errors_and_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "speed.csv", tmp_path / "rate.png"
    options = ["--sizes", "1k", "4096", "--threads", "1", "2", "--seconds", "0.001"]
    assert bench.main(["TopK", "TopK(density=1/4)", *options, "--csv", str(table), "--plot", str(picture)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    n = bench.ERROR_ELEMENTS
    quality = {row["codec"]: row for row in result["quality"]}
    assert quality["TopK"]["bits"] == 8 * TopK().nbytes(n) / n
    assert 0 < quality["TopK(density=1/4)"]["gauss"] < quality["TopK"]["gauss"] < 1
    cells = {(row["codec"], row["elements"], row["threads"], row["operation"]) for row in result["speed"]}
    assert len(cells) == 2 * 2 * 2 * 4
    assert all(row["ms"] > 0 and row["times_copy"] > 0 and row["rounds"] >= 3 for row in result["speed"])
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(cells)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_gigabytes_are_of_float32_input() -> None:
    x = torch.randn(1000)
    row = next(bench.speeds("x", {"encode": lambda: x.sum()}, x, 1, 0.001, peer=False))
    assert row.gbs == pytest.approx(4000 / (row.ms * 1e-3) / 1e9)


def test_a_copy_is_as_fast_as_a_copy() -> None:
    x, y = torch.randn(2**18), torch.empty(2**18)
    timing = against_copy(lambda: y.copy_(x), lambda: y.copy_(x), seconds=0.1)
    assert 0.3 < timing.times_copy < 3


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.package in ("torch", "numpy")], ids=lambda p: p.name)
def test_peers_decode_what_they_encode(peer: Peer) -> None:
    assert missing(peer) is None
    quality = bench.peer_quality(peer)
    assert quality.gauss < 0.9
    assert 0.5 < quality.bits < 17


def test_a_missing_peer_is_said() -> None:
    absent = Peer("x y", "no-such-package", "no_such_module", lambda x: Message(()), lambda message, x: x)
    assert "no-such-package: not installed" in str(missing(absent))
    broken = Peer("x y", "torch", "torch", lambda x: Message((1 / 0,)), lambda message, x: x)
    assert "x y: fails here" in str(missing(broken))


@pytest.mark.parametrize("arguments", [["Nonsense()"], ["TopK()", "--device", "cuda"]])
def test_bad_arguments_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert bench.main(arguments) == 2
    assert capsys.readouterr().err.startswith("lowcomm bench: ")


@pytest.mark.parametrize("size", ["0", "-1", "1.5x", "many", "2**40"])
def test_bad_sizes_are_refused(size: str) -> None:
    with pytest.raises(SystemExit):
        bench.main(["TopK()", f"--sizes={size}"])


def test_samples_have_the_moments_of_their_distributions() -> None:
    gauss, laplace = bench.sample("gauss", 2**18), bench.sample("laplace", 2**18)
    assert gauss.var().item() == pytest.approx(1.0, rel=0.02)
    assert laplace.var().item() == pytest.approx(2.0, rel=0.03)
    # Student's t with 3 degrees of freedom: E|x| = 2 sqrt(3) / pi
    assert bench.sample("student3", 2**18).abs().mean().item() == pytest.approx(1.1027, rel=0.02)


def test_time_outside_the_inner_step_is_separated() -> None:
    parameter = torch.zeros(4, requires_grad=True)
    parameter.grad = torch.ones(4)
    inner = torch.optim.SGD([parameter], lr=1.0)
    outside, inside = outside_inner(inner, inner)
    assert torch.equal(parameter.detach(), -torch.ones(4))
    assert inside > 0
    assert outside >= 0
    inner.step()
    assert torch.equal(parameter.detach(), -2 * torch.ones(4))


def test_engine_benchmark_measures_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine.main(["--elements", "25000", "--tensors", "10", "--rounds", "3"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["results"]) == {"local_step", "sync_alone", "exchange", "sync_two_ranks"}
    assert all(part["ratio"] > 0 and part["ms"] > 0 for part in result["results"].values())
