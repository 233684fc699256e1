"""Feedback state: committed only by exchanges that succeeded on all ranks, in order; held, chained, copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lowcomm.compress import EF21
from lowcomm.sync import Aborted, AllReduce, NonFinite, SyncError
from ranks import run_ranks
from sync_codecs import ExactCodec, SignCodec
from sync_emulation import emulate_two_phase


def _vector(rank: int, t: int, n: int = 37) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * t + rank))


def _same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _abort_rank(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int]:
    """What was put in, what came out, what is kept, over rounds of which many fail for different reasons."""
    reducer = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase")
    put_in, came_out, failures = torch.zeros(37), torch.zeros(37), 0
    for t in range(50):
        x, kind = _vector(rank, t), t * 7 % 5
        before = reducer.state(0)
        sent = x.clone()
        if kind == 1 and rank == t % world_size:
            sent[5] = float("nan")
        held = kind in (3, 4)
        try:
            work = reducer.start(sent, round=t, check=rank if kind == 2 else 0, hold=held)
            work.wait()
            if kind == 3:
                work.discard()
                raise Aborted("by the caller")
            work.commit()
            put_in, came_out = put_in + x, came_out + work.result
        except SyncError:
            failures += 1
            assert _same_state(before, reducer.state(0)), t
    return put_in, came_out, reducer.state(0), failures


def test_nothing_is_lost_over_rounds_that_fail() -> None:
    outcomes = run_ranks(_abort_rank, 3)
    assert [failures for *_, failures in outcomes] == [30] * 3
    mean_in = torch.stack([o[0] for o in outcomes]).double().mean(0)
    mean_kept = torch.stack([o[2]["residual"] for o in outcomes]).double().mean(0)
    owned = torch.cat([o[2]["owner_residual"] for o in outcomes]).double()
    for _, came_out, *_ in outcomes:
        assert torch.equal(came_out, outcomes[0][1])
        torch.testing.assert_close(came_out.double() + mean_kept + owned, mean_in, rtol=0, atol=1e-4)


def _chain_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, hold in (("plain", False), ("held", True)):
        reducer = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase")
        works = [reducer.start(_vector(rank, t), round=t, hold=hold) for t in range(6)]
        results[name] = [(work.wait(), work.commit(), work.result)[2] for work in works]
        results[name + " state"] = reducer.state(0)
    ahead = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase")
    works = [ahead.start(_vector(rank, t), round=t, hold=True) for t in range(6)]
    for work in works[:3]:
        work.wait()
    works[0].commit()
    with pytest.raises(RuntimeError, match="not committed"):
        works[2].commit()
    with pytest.raises(ValueError, match="hold=True"):
        ahead.reduce(_vector(rank, 9))
    committed = ahead._states.snapshot()
    works[1].discard()
    results["after a discard"] = [_error(work.wait) for work in works]
    results["undone"] = _same_state(committed[0][0], {"residual": ahead.state(0)["residual"]})
    results["goes on"] = _error(lambda: ahead.reduce(_vector(rank, 9)))
    broken = AllReduce(codec=SignCodec(), feedback="auto")
    bad = _vector(rank, 0)
    bad[rank] = float("inf") if rank == 1 else 0.0
    works = [broken.start(bad), *(broken.start(_vector(rank, t), round=t) for t in (1, 2))]
    works.append(broken.start(_vector(rank, 0), bucket=1))
    results["after a failure"] = [_error(work.wait) for work in works]
    results["twice"] = _error(works[0].wait)
    return results


def _error(call: object) -> str:
    try:
        call()
    except SyncError as error:
        return type(error).__name__
    return "ok"


def test_exchanges_in_flight_build_on_each_other() -> None:
    world_size, n = 3, 37
    residuals, owners = [torch.zeros(n)] * 3, [torch.zeros(16), torch.zeros(16), torch.zeros(5)]
    outcomes = run_ranks(_chain_rank, world_size)
    for t in range(6):
        vectors = [_vector(rank, t) for rank in range(world_size)]
        expected, residuals, owners = emulate_two_phase(SignCodec(), vectors, residuals, owners, step=t)
        for outcome in outcomes:
            assert torch.equal(outcome["plain"][t], expected) and torch.equal(outcome["held"][t], expected)
    for rank, outcome in enumerate(outcomes):
        for name in ("plain state", "held state"):
            assert torch.equal(outcome[name]["residual"], residuals[rank])
            assert torch.equal(outcome[name]["owner_residual"], owners[rank])
        assert outcome["after a discard"] == ["ok", "Aborted", "Aborted", "Aborted", "Aborted", "Aborted"]
        assert outcome["undone"] and outcome["goes on"] == "ok"
        assert outcome["after a failure"] == ["NonFinite", "Aborted", "Aborted", "ok"]
        assert outcome["twice"] == NonFinite.__name__


def _estimate_rank(rank: int, world_size: int) -> dict[str, object]:
    """EF21 keeps a mean of estimates that every rank, also one with weight 0, must update."""
    results: dict[str, object] = {"aggregates": []}
    reducer = AllReduce(codec=SignCodec(), feedback=EF21())
    for t in range(6):
        if t % 3 == 2:
            pair = [reducer.start(_vector(rank, 10 * t + k), round=t, hold=True) for k in (0, 1)]
            for work in pair:
                work.wait()
            if t == 2:
                for work in pair:
                    work.discard()
            else:
                for work in pair:
                    work.commit()
        else:
            reducer.reduce(_vector(rank, t), round=t, weight=float(rank != t % world_size))
        state = reducer.state(0)
        results["aggregates"].append(state["aggregate"])
        results["estimate"] = state["estimate"]
    return results


def test_estimates_survive_absence_holding_and_undoing() -> None:
    outcomes = run_ranks(_estimate_rank, 3)
    for outcome in outcomes:
        for t in range(6):
            assert torch.equal(outcome["aggregates"][t], outcomes[0]["aggregates"][t])
        assert torch.equal(outcome["aggregates"][1], outcome["aggregates"][2])  # round 2 was undone
        assert not torch.equal(outcome["aggregates"][4], outcome["aggregates"][5])


def _optional_rank(rank: int, world_size: int) -> list[object]:
    reducer = AllReduce(codec=SignCodec(), feedback="auto")
    reducer.reduce(_vector(rank, 0))
    before = reducer.state(0)
    nobody = reducer.start(_vector(rank, 1), weight=0.0, optional=True, hold=True)
    receipt = nobody.wait()
    nobody.commit()
    unchanged = _same_state(before, reducer.state(0))
    some = reducer.reduce(torch.full((8,), 3.0), bucket=1, optional=rank > 0, weight=float(rank == 0), check=rank)
    return [receipt.algorithm, receipt.payload_bytes, unchanged, some.result]


def test_optional_ranks() -> None:
    for algorithm, payload, unchanged, result in run_ranks(_optional_rank, 3):
        assert (algorithm, payload, unchanged) == ("none", 0, True)
        assert torch.equal(result, torch.full((8,), 3.0))


def test_copies_and_pickles_carry_state_but_no_connection() -> None:
    reducer = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase", reduce="sum")
    for t in range(3):
        reducer.reduce(_vector(0, t), round=t)
    twin, loaded = copy.deepcopy(reducer), pickle.loads(pickle.dumps(reducer))
    with pytest.raises(RuntimeError, match="connect"):
        loaded.reduce(_vector(0, 3), round=3)
    loaded.connect()
    results = [r.reduce(_vector(0, 3), round=3).result for r in (reducer, twin, loaded)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert _same_state(reducer.state(0), twin.state(0)) and _same_state(reducer.state(0), loaded.state(0))
    twin.load_state(0, {})
    assert twin.state(0) == {} and reducer.state(0)


def test_load_state_resumes_bit_for_bit() -> None:
    straight = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase")
    for t in range(3):
        straight.reduce(_vector(0, t), round=t)
    resumed = AllReduce(codec=SignCodec(), feedback="auto", algorithm="two_phase")
    resumed.load_state(0, straight.state(0))
    for t in range(3, 6):
        one, two = (r.reduce(_vector(0, t), round=t).result for r in (straight, resumed))
        assert torch.equal(one, two)
    assert _same_state(straight.state(0), resumed.state(0))
    assert set(straight.state(0)) == set(straight.state_names())


def test_options_are_checked() -> None:
    for options, message in [
        ({"algorithm": "ring-ring"}, "algorithm must be one of"),
        ({"reduce": "median-ish"}, "reduce must be one of"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"feedback": EF21()}, "codec is None"),
        ({"codec": ExactCodec(), "feedback": "on"}, "feedback must be"),
        ({"algorithm": "two_phase"}, "codec=None"),
    ]:
        with pytest.raises(ValueError, match=message):
            AllReduce(**options)
    reducer = AllReduce()
    for call, message in [
        (lambda: reducer.reduce(torch.ones(2, 2)), "1-D"),
        (lambda: reducer.reduce(torch.ones(2, dtype=torch.bfloat16)), "float32"),
        (lambda: reducer.reduce(torch.ones(4)[::2]), "contiguous"),
        (lambda: reducer.reduce(torch.ones(2), weight=-1.0), "weight"),
        (lambda: reducer.reduce(torch.ones(2), bucket=-1), "bucket"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_statistics_of_receipts() -> None:
    reducer = AllReduce(codec=SignCodec(), feedback="auto", statistics=True)
    x = _vector(0, 0)
    for hold in (False, True):
        before = reducer.state(0).get("residual", torch.zeros(37))
        work = reducer.reduce(x.clone(), hold=hold)
        receipt, sent = work.wait(), work.result
        assert receipt.density == 1.0
        assert receipt.cosine == pytest.approx(float(torch.cosine_similarity(x, sent, dim=0)), rel=1e-5)
        assert receipt.residual_norm == pytest.approx(float((before + x - sent).norm()), rel=1e-5)
    quiet = AllReduce(statistics=True).reduce(torch.tensor([0.0, 2.0])).wait()
    assert (quiet.density, quiet.residual_norm, quiet.cosine) == (0.5, None, 1.0)
    assert AllReduce().reduce(torch.ones(2)).wait().density is None
