"""The command line: usage, errors, and the bandwidth simulator."""

import json
import math

import lowcomm.compress
import pytest
import torch
from lowcomm.compress import Int4, TopK
from lowcomm.recipes.compare import parse_call
from lowcomm.recipes.plan import Network, plan, traffic
from lowcomm.sync import AllReduce
from ranks import run_ranks

from lowcomm.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(list(arguments))
    except SystemExit as end:  # argparse
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("tool", ["demo", "compare", "plan"])
def test_help_states_defaults(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, tool, "--help")
    assert status == 0
    assert f"usage: lowcomm {tool}" in out
    assert "(default: " in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["demo", "--steps", "many"], 2, "invalid int value: 'many'"),
        (["demo", "--steps", "0"], 1, "must be at least 1"),
        (["demo", "--lr", "-1"], 1, "lr must be above 0 but is -1.0"),
        (["demo", "--workers", "0"], 1, "--workers and --seeds must be at least 1"),
        (["demo", "--width", "30"], 1, "width must be a multiple of 2 * heads = 8"),
        (["demo", "--data", "wikitext"], 1, "--data must be hf:NAME but is 'wikitext'"),
        (["demo", "--text", "no-such-folder"], 1, "no such file or folder: 'no-such-folder'"),
        (["demo", "--text", "a", "--data", "hf:b"], 1, "not both"),
        (["demo", "--codec", "Zip"], 1, "lowcomm.compress has no class 'Zip'"),
        (["demo", "--codec", "Int4(9)"], 1, "is not of the form Name or Name(key=value, ...)"),
        (["compare"], 2, "METHOD"),
        (["compare", "SGD"], 1, "lowcomm.optim has no class 'SGD'; it has"),
        (["plan", "--bandwidth", "0"], 1, "must be above 0"),
        (["plan", "--target", "1"], 1, "--target must lie between 0 and 1"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = run(capsys, *arguments)
    assert found == status
    assert message in err
    assert "Traceback" not in err


def test_parse_call_takes_literals_only() -> None:
    assert parse_call("TopK(density=0.25)", lowcomm.compress)() == TopK(density=0.25)
    for text in ("TopK(density=open('x'))", "lowcomm.Int4", "Int4(", "Int4(**{})", "encode + 1", ""):
        with pytest.raises(ValueError, match="not of the form"):
            parse_call(text, lowcomm.compress)
    with pytest.raises(ValueError, match="has no class 'available_levels'"):
        parse_call("available_levels", lowcomm.compress)


# ---- plan -----------------------------------------------------------------------------------------------------------


def test_plan_formulas() -> None:
    network = Network(bandwidth=8e6, latency=0.5)
    synchronous = plan("s", network, (10**6, 2), step_seconds=1.0)
    assert (synchronous.exchange_seconds, synchronous.round_seconds, synchronous.busy) == (2.0, 3.0, 1 / 3)
    local = plan("l", network, (10**6, 2), step_seconds=1.0, sync_every=10, synchronous_step=3.0)
    assert local.round_seconds == 12.0
    assert local.speedup == pytest.approx(2.5)
    hidden = plan("o", network, (10**6, 2), step_seconds=1.0, sync_every=10, overlap=1, synchronous_step=3.0)
    assert hidden.round_seconds == 11.0
    for row in (local, hidden):
        faster = Network(row.bandwidth_needed, 0.5)
        overlap = 1 if row is hidden else 0
        again = plan("", faster, (10**6, 2), step_seconds=1.0, sync_every=10, overlap=overlap, target=0.95)
        assert plan("", network, (10**6, 2), step_seconds=1.0, sync_every=10, overlap=overlap).busy < 0.95
        if math.isfinite(row.bandwidth_needed):
            assert again.busy == pytest.approx(0.95)
    assert plan("", Network(8e6, 1.0), (1, 1), step_seconds=1.0).bandwidth_needed == math.inf


def _bytes_sent(rank: int, world_size: int, n: int) -> list[tuple[int, int]]:
    found = []
    for bucket, codec in enumerate((None, Int4(), TopK(density=0.25))):
        receipt = AllReduce(None, codec).reduce(torch.randn(n), bucket=bucket).wait()
        found.append((receipt.payload_bytes, receipt.header_bytes))
    return found


@pytest.mark.parametrize(("world_size", "n"), [(2, 3120), (3, 3120), (3, 1_500_000)])
def test_plan_counts_the_bytes_that_are_sent(world_size: int, n: int) -> None:
    """With three workers the short vector takes one phase, the long one two."""
    for sent in run_ranks(_bytes_sent, world_size, n):
        assert [payload for payload, _ in sent] == [
            traffic(n, world_size, codec)[0] for codec in (None, Int4(), TopK(density=0.25))
        ]
        assert {header for _, header in sent} == {65 * (world_size - 1)}


def test_plan_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--parameters", "1e6", "--workers", "4", "--sync-every", "10", "50", "--codec", "Int4"]
    status, out, _ = run(capsys, "plan", *arguments, "--bandwidth", "1e8", "1e9")
    assert status == 0
    *lines, last = out.splitlines()
    result = json.loads(last)
    assert len(result["plans"]) == 2 * (1 + 2 * 2) == len(lines) - 2
    synchronous, every_10, every_50 = result["plans"][:3]
    assert synchronous["bytes_per_round"] == 2 * 3 * 4 * 10**6 // 4
    assert synchronous["bytes_per_step"] / every_50["bytes_per_step"] == pytest.approx(50, rel=1e-3)
    assert synchronous["busy"] < every_10["busy"] < every_50["busy"] < 1
