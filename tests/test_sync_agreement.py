"""Ranks that do not mean the same exchange get the same error, before anything is sent."""

from __future__ import annotations

import torch
from lowcomm.sync import AllReduce, Disagreement, NonFinite, SyncError
from lowcomm.sync.hello import hash64
from ranks import run_ranks
from sync_codecs import ExactCodec, SignCodec


def _outcome(call: object) -> tuple[str, str]:
    try:
        call()
    except SyncError as error:
        return type(error).__name__, str(error)
    return "ok", ""


def _mismatch_rank(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    odd = rank == 1
    shared = AllReduce(codec=SignCodec(), feedback="auto")
    shared.reduce(torch.ones(8) * rank)
    before = shared.state(0)["residual"]
    cases = {
        "codec": lambda: AllReduce(codec=SignCodec() if odd else ExactCodec()).reduce(torch.ones(8)),
        "block": lambda: AllReduce(codec=SignCodec(8 if odd else 4)).reduce(torch.ones(8)),
        "none": lambda: AllReduce(codec=None if odd else SignCodec()).reduce(torch.ones(8)),
        "dtype": lambda: AllReduce().reduce(torch.ones(8, dtype=torch.float64 if odd else torch.float32)),
        "reduce": lambda: AllReduce(reduce="sum" if odd else "mean").reduce(torch.ones(8)),
        "round": lambda: shared.reduce(torch.ones(8), round=5 if odd else 4),
        "bucket": lambda: shared.reduce(torch.ones(8), bucket=1 if odd else 2),
        "length": lambda: shared.reduce(torch.ones(9 if odd else 8)),
        "lr": lambda: shared.reduce(
            torch.ones(8), check=hash64(str(rank == 1)), describe=lambda: {"lr": 0.7 if odd else 0.5, "momentum": 0.9}
        ),
        "unexplained": lambda: shared.reduce(torch.ones(8), check=rank),
        "zero weights": lambda: shared.reduce(torch.ones(8), weight=0.0),
    }
    shared_state_bad = AllReduce(codec=SignCodec(), feedback="auto")
    shared_state_bad.load_state(0, {"residual": torch.zeros(9 if odd else 8)})
    results = {name: _outcome(call) for name, call in cases.items()}
    try:
        shared_state_bad.reduce(torch.ones(8))
    except (SyncError, ValueError) as error:
        results["state length"] = (type(error).__name__, str(error))
    results["untouched"] = ("ok", str(torch.equal(before, shared.state(0)["residual"])))
    results["usable"] = _outcome(lambda: shared.reduce(torch.ones(8)))
    return results


def test_every_rank_gets_the_same_error() -> None:
    outcomes = run_ranks(_mismatch_rank, 3)
    expected = {
        "codec": "codec must be the same on all ranks but is rank 0: 'exactcodec:', rank 1: 'signcodec:size=4'",
        "block": "rank 0: 'signcodec:size=4', rank 1: 'signcodec:size=8', rank 2: 'signcodec:size=4'",
        "none": "rank 0: 'signcodec:size=4', rank 1: None",
        "dtype": "dtype must be the same on all ranks but is rank 0: 'torch.float32', rank 1: 'torch.float64'",
        "reduce": "reduce must be the same on all ranks but is rank 0: 'mean', rank 1: 'sum'",
        "round": "round must be the same on all ranks but is rank 0: 4, rank 1: 5",
        "bucket": "bucket must be the same on all ranks but is rank 0: 2, rank 1: 1",
        "length": "vector length must be the same on all ranks but is rank 0: 8, rank 1: 9, rank 2: 8",
        "lr": "lr must be the same on all ranks but is rank 0: 0.5, rank 1: 0.7, rank 2: 0.5",
        "unexplained": "check must be the same on all ranks but is rank 0: 0, rank 1: 1, rank 2: 2",
    }
    for outcome in outcomes:
        for name, message in expected.items():
            assert outcome[name][0] == Disagreement.__name__, (name, outcome[name])
            assert message in outcome[name][1], (name, outcome[name])
        assert "all ranks have weight 0" in outcome["zero weights"][1]
        assert outcome["untouched"] == ("ok", "True")
        assert outcome["usable"] == ("ok", "")
    assert "9 elements but the vector has 8" in outcomes[1]["state length"][1]
    for rank in (0, 2):
        assert outcomes[rank]["state length"][0] == "Aborted" and "ranks [1]" in outcomes[rank]["state length"][1]


def _nonfinite_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for codec in (None, SignCodec(), ExactCodec()):
        for algorithm in ("auto",) if codec is None else ("all_gather", "two_phase"):
            for policy in ("raise", "skip", "use"):
                allreduce = AllReduce(codec=codec, feedback="auto", algorithm=algorithm, nonfinite=policy)
                allreduce.reduce(torch.arange(8.0) + rank)
                before = allreduce.state(0)
                x = torch.arange(8.0)
                x[3] = {0: 1.0, 1: float("nan"), 2: float("-inf")}[rank]
                name = f"{type(codec).__name__} {algorithm} {policy}"
                try:
                    work = allreduce.start(x)
                    receipt = work.wait()
                    results[name] = (receipt.flags, receipt.skipped, work.result)
                except NonFinite as error:
                    results[name] = str(error)
                after = allreduce.state(0)
                unchanged = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
                finite = all(bool(torch.isfinite(v).all()) for v in after.values())
                results[name + " state"] = (unchanged, finite)
    return results


def test_nonfinite_policies() -> None:
    outcomes = run_ranks(_nonfinite_rank, 3)
    names = ["NoneType auto", "SignCodec all_gather", "SignCodec two_phase", "ExactCodec two_phase"]
    for outcome in outcomes:
        for name in names:
            assert "ranks [1, 2] offered NaN and infinity" in outcome[f"{name} raise"]
            assert outcome[f"{name} raise state"] == (True, True)
            flags, skipped, result = outcome[f"{name} skip"]
            assert flags == 3 and skipped and torch.equal(result, torch.zeros(8))
            assert outcome[f"{name} skip state"] == (True, True)
            flags, skipped, result = outcome[f"{name} use"]
            assert flags == 3 and not skipped
            assert torch.equal(result.nan_to_num(5.0), outcomes[0][f"{name} use"][2].nan_to_num(5.0))
            assert outcome[f"{name} use state"][1]
            assert bool(torch.isfinite(result).all()) == (name != "NoneType auto")
        assert torch.equal(outcome["ExactCodec two_phase use"][2][3], torch.tensor(1.0) / 3)


def _overflow_rank(rank: int, world_size: int) -> list[str]:
    allreduce = AllReduce(codec=ExactCodec(), algorithm="two_phase", feedback="auto")
    allreduce.reduce(torch.ones(8))
    return [_outcome(lambda: allreduce.reduce(torch.full((8,), 3e38)))[0], str(allreduce.state(0)["residual"].sum())]


def test_a_sum_that_overflows_is_seen_by_all() -> None:
    assert run_ranks(_overflow_rank, 3) == [["NonFinite", "tensor(0.)"]] * 3
