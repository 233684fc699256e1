"""Sums of float vectors: linear codecs, unions of supports, shared supports; and the promises of `plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import EF14, EF21, Cast, CountSketch, EFDecay, Int8, TopK, history_support, leader_support
from lowcomm.sync import Aborted, AllReduce, Median, SharedTopK
from lowcomm.sync.peers import Peers
from ranks import run_ranks
from sync_codecs import ExactCodec, NonzeroCodec, SignCodec
from sync_emulation import bounds, emulate_two_phase, encode_decode

ORACLE = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())["union_allreduce"]
N = 203


def _vector(rank: int, t: int, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * t + rank + 7 * n))


def _sparse(rank: int, t: int) -> torch.Tensor:
    x = _vector(rank, t)
    return x * (x.abs() > 1.2)


def _linear_rank(rank: int, world_size: int) -> dict[str, object]:
    codec = CountSketch(rows=3, density=1 / 2)
    reducer = AllReduce(codec=codec, feedback=EF14())
    results: dict[str, object] = {"name": reducer.plan(N).algorithm}
    for t in range(3):
        results[f"{t}"] = reducer.reduce(_vector(rank, t), round=t).result.clone()
    results["residual"] = reducer.state(0)["residual"]
    results["absent"] = reducer.reduce(_vector(rank, 5), bucket=1, weight=float(rank != 1)).result
    return results


def test_linear_codecs_sum_their_bodies() -> None:
    world_size, codec = 3, CountSketch(rows=3, density=1 / 2)
    outcomes = run_ranks(_linear_rank, world_size)
    residuals = [torch.zeros(N) for _ in range(world_size)]
    bodies = [torch.empty(codec.nbytes(N), dtype=torch.uint8) for _ in range(world_size)]
    for t in range(3):
        for rank in range(world_size):
            residuals[rank] = residuals[rank] + _vector(rank, t)
            codec.encode(residuals[rank], bodies[rank], step=t)
            decoded = torch.empty(N)
            codec.decode(bodies[rank], decoded, step=t)
            residuals[rank] = residuals[rank] - decoded
        table = torch.stack([body.view(torch.float32) for body in bodies]).mean(0)
        expected = torch.empty(N)
        codec.decode(table.view(torch.uint8), expected, step=t)
        for outcome in outcomes:
            assert torch.equal(outcome[f"{t}"], outcomes[0][f"{t}"])
            torch.testing.assert_close(outcome[f"{t}"], expected, rtol=1e-5, atol=1e-5)
    for rank, outcome in enumerate(outcomes):
        assert outcome["name"] == "linear"
        assert torch.equal(outcome["absent"], outcomes[0]["absent"])
        torch.testing.assert_close(outcome["residual"], residuals[rank], rtol=1e-5, atol=1e-5)


def _union_rank(rank: int, world_size: int) -> dict[str, object]:
    plain = AllReduce(algorithm="union")
    coded = AllReduce(codec=TopK(density=1 / 16, chunk=64), feedback="auto", algorithm="union")
    gathered = AllReduce(codec=TopK(density=1 / 16, chunk=64), feedback="auto", algorithm="all_gather")
    results: dict[str, object] = {"oracle": None}
    if world_size == 2:
        results["oracle"] = plain.reduce(torch.tensor(ORACLE[f"x{rank}"]), bucket=9).result
    for t in range(3):
        x = _sparse(rank, t)
        mean = x.clone()
        dist.all_reduce(mean)
        work = plain.reduce(x)
        receipt = work.wait()
        results[f"plain {t}"] = (work.result.clone(), mean / world_size, receipt.payload_bytes)
        pair = [reducer.reduce(_vector(rank, t), round=t).result for reducer in (coded, gathered)]
        results[f"coded {t}"] = [part.clone() for part in pair]
    results["states"] = (coded.state(0)["residual"], gathered.state(0)["residual"])
    results["empty"] = plain.reduce(torch.empty(0)).result.numel()
    results["absent"] = plain.reduce(_sparse(rank, 8), weight=float(rank > 0)).result
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_union_equals_the_dense_sum(world_size: int) -> None:
    outcomes = run_ranks(_union_rank, world_size)
    for outcome in outcomes:
        if world_size == 2:
            assert outcome["oracle"].tolist() == ORACLE["mean"]
        for t in range(3):
            result, mean, payload = outcome[f"plain {t}"]
            assert torch.equal(result, outcomes[0][f"plain {t}"][0])
            torch.testing.assert_close(result, mean, rtol=1e-6, atol=1e-7)
            union = int(torch.stack([_sparse(rank, t) != 0 for rank in range(world_size)]).any(0).sum())
            width = (N + 8 * world_size - 1) // (8 * world_size)
            assert payload == 2 * (world_size - 1) * width + 2 * (world_size - 1) * 4 * union // world_size
            coded, gathered = outcome[f"coded {t}"]
            torch.testing.assert_close(coded, gathered, rtol=1e-6, atol=1e-7)
        assert torch.equal(*outcome["states"])
        assert outcome["empty"] == 0
        present = torch.stack([_sparse(rank, 8) for rank in range(1, world_size)]).mean(0)
        torch.testing.assert_close(outcome["absent"], present, rtol=1e-6, atol=1e-7)


def test_oracle_of_the_union() -> None:
    for name in ("x0", "x1"):
        bits = sum(1 << i for i, value in enumerate(ORACLE[name]) if value)
        assert f"{bits:02x}" == ORACLE["mask" + name[1]]


def _shared_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for support in ("leader", "history", "energy"):
        reducer = AllReduce(codec=SharedTopK(1 / 8, support, group=4), feedback=EFDecay(0.5))
        works = [reducer.start(_vector(rank, t), round=t) for t in range(4)]
        receipts = [work.wait() for work in works]
        results[support] = [work.result for work in works]
        results[support + " state"] = reducer.state(0)
        results[support + " bytes"] = [receipt.payload_bytes for receipt in receipts]
        results[support + " plan"] = reducer.plan(N).bytes_sent - (world_size - 1) * 65
        assert set(reducer.state(0)) == set(reducer.state_names())
    undone = AllReduce(codec=SharedTopK(1 / 8, "history"), feedback="auto")
    undone.reduce(_vector(rank, 0))
    before = undone.state(0)
    pair = [undone.start(_vector(rank, t), round=t, hold=True) for t in (1, 2)]
    for work in pair:
        work.wait()
    pair[0].discard()
    after = undone.state(0)
    results["undone"] = all(torch.equal(before[name], after[name]) for name in before)
    return results


def test_shared_supports() -> None:
    world_size, k = 3, 26
    outcomes = run_ranks(_shared_rank, world_size)
    for support in ("leader", "history", "energy"):
        residuals, update = [torch.zeros(N) for _ in range(world_size)], torch.zeros(N)
        for t in range(4):
            p = [0.5 * e + _vector(rank, t) for rank, e in enumerate(residuals)]
            if support == "leader":
                chosen = leader_support(p[t % world_size], k)
            elif support == "history":
                chosen = history_support(update, k, step=t)
            else:
                energy = sum(torch.nn.functional.pad(v.square(), (0, 1)).view(-1, 4).sum(1) for v in p)
                groups = energy.topk(k // 4).indices.sort().values
                chosen = (groups[:, None] * 4 + torch.arange(4)).flatten()
                chosen = chosen[chosen < N]
            update = torch.zeros(N)
            update[chosen] = torch.stack([v[chosen] for v in p]).mean(0)
            residuals = [v.index_fill(0, chosen, 0.0) for v in p]
            for outcome in outcomes:
                assert torch.equal(outcome[support][t], outcomes[0][support][t])
                torch.testing.assert_close(outcome[support][t], update, rtol=1e-5, atol=1e-6)
            update = outcomes[0][support][t]
        for rank, outcome in enumerate(outcomes):
            torch.testing.assert_close(outcome[support + " state"]["residual"], residuals[rank], rtol=1e-5, atol=1e-6)
    for outcome in outcomes:
        assert outcome["undone"]
        assert outcome["history bytes"] == [2 * 2 * 4 * k // 3] * 4
    for t in range(4):  # the leader alone sends the support
        sent = [outcome["leader bytes"][t] for outcome in outcomes]
        assert max(sent) == sent[t % world_size] == outcomes[0]["leader plan"] and len(set(sent)) == 2


def _plan_rank(rank: int, world_size: int) -> None:
    reducers = [
        AllReduce(),
        AllReduce(reduce="mean_contributors"),
        AllReduce(confirm=False),
        AllReduce(reduce=Median()),
        AllReduce(codec=SignCodec(), feedback="auto"),
        AllReduce(codec=SignCodec(), second_codec=Cast("bf16"), feedback="auto"),
        AllReduce(codec=SignCodec(), algorithm="all_gather"),
        AllReduce(codec=NonzeroCodec()),
        AllReduce(codec=CountSketch()),
        AllReduce(codec=SignCodec(), algorithm="ring"),
        AllReduce(codec=SharedTopK(1 / 8, "history")),
        AllReduce(codec=SharedTopK(1 / 8, "energy")),
    ]
    for point_to_point in (True, False):
        for reducer in reducers:
            reducer._peers = Peers(dist.group.WORLD, point_to_point)
            for n in (0, 1, 5, 1000):
                plan = reducer.plan(n)
                receipt = reducer.reduce(_vector(rank, 0, n), bucket=n).wait()
                assert plan.algorithm == receipt.algorithm
                bound = isinstance(reducer._codec, SharedTopK) and reducer._codec.support == "energy" and n > 5
                assert plan.bytes_sent >= receipt.bytes_sent if bound else plan.bytes_sent == receipt.bytes_sent
                assert plan.seconds(0.0, 1.0) == plan.bytes_sent and plan.seconds(1.0, 1e30) == pytest.approx(
                    plan.steps
                )


def test_plans_come_true() -> None:
    run_ranks(_plan_rank, 3)


def test_choices() -> None:
    for options, name in [
        ({}, "dense"),
        ({"codec": SignCodec()}, "all_gather"),
        ({"codec": CountSketch()}, "linear"),
        ({"codec": CountSketch(), "reduce": "mean_contributors"}, "all_gather"),
        ({"codec": SharedTopK()}, "shared"),
        ({"codec": ExactCodec(), "algorithm": "two_phase"}, "two_phase"),
        ({"reduce": Median()}, "two_phase"),
    ]:
        assert AllReduce(**options).plan(10).algorithm == name
    for options, message in [
        ({"codec": SignCodec(), "algorithm": "linear"}, "linear codec"),
        ({"codec": SharedTopK(), "feedback": EF21()}, "EF14, EFDecay or no feedback"),
        ({"codec": SharedTopK(), "algorithm": "two_phase"}, "algorithm of its own"),
        ({"codec": SharedTopK(), "reduce": Median()}, "summed as floats"),
        ({"codec": NonzeroCodec(), "algorithm": "two_phase"}, "requantizable"),
        ({"codec": NonzeroCodec(), "algorithm": "ring"}, "requantizable"),
        ({"codec": SignCodec(), "feedback": "auto", "algorithm": "ring"}, "no error feedback"),
        ({"codec": SignCodec(), "second_codec": SignCodec(), "algorithm": "all_gather"}, "second_codec"),
    ]:
        with pytest.raises(ValueError, match=message):
            AllReduce(**options)
    for bad in ({"density": 0.0}, {"support": "oracle"}):
        with pytest.raises(ValueError, match="must be"):
            SharedTopK(**bad)
    with pytest.raises(ValueError, match="Codec"):
        AllReduce(codec="int8")


def _ring_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for codec in (ExactCodec(), Int8(block=32)):
        reducer = AllReduce(codec=codec, algorithm="ring")
        for n in (0, 1, 3, 101):
            results[f"{codec.config} {n}"] = reducer.reduce(_vector(rank, 0, n), bucket=n).result
        results[f"{codec.config} weighted"] = reducer.reduce(_vector(rank, 1), weight=float(rank)).result
    broken = AllReduce(codec=SignCodec(), algorithm="ring")
    if rank == 1:
        broken._algorithm._encode = lambda *_: MemoryError("no memory")
    try:
        broken.reduce(_vector(rank, 2))
    except (Aborted, MemoryError) as error:
        results["error"] = type(error).__name__
    results["after"] = AllReduce(codec=ExactCodec(), algorithm="ring").reduce(_vector(rank, 3)).result
    return results


def _emulate_ring(codec: object, vectors: list[torch.Tensor]) -> torch.Tensor:
    world_size, n = len(vectors), vectors[0].numel()
    result = torch.empty(n)
    for chunk, (start, stop) in enumerate(bounds(n, world_size, codec.block)):
        total = vectors[chunk][start:stop]
        for hop in range(1, world_size):
            total = vectors[(chunk + hop) % world_size][start:stop] + encode_decode(codec, total)
        result[start:stop] = encode_decode(codec, total / world_size)
    return result


def test_ring() -> None:
    world_size = 4
    outcomes = run_ranks(_ring_rank, world_size)
    for codec in (ExactCodec(), Int8(block=32)):
        for n in (0, 1, 3, 101):
            expected = _emulate_ring(codec, [_vector(rank, 0, n) for rank in range(world_size)])
            for outcome in outcomes:
                assert torch.equal(outcome[f"{codec.config} {n}"], expected), (codec, n)
        weighted = sum(rank * _vector(rank, 1) for rank in range(world_size)) / 6
        for outcome in outcomes:
            assert torch.equal(outcome[f"{codec.config} weighted"], outcomes[0][f"{codec.config} weighted"])
            torch.testing.assert_close(outcome[f"{codec.config} weighted"], weighted, rtol=0.05, atol=0.05)
    assert [outcome["error"] for outcome in outcomes] == ["Aborted", "MemoryError", "Aborted", "Aborted"]
    mean = torch.stack([_vector(rank, 3) for rank in range(world_size)]).mean(0)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["after"], mean, rtol=1e-5, atol=1e-6)


def test_ring_error_grows_with_the_ranks_and_that_of_two_phases_does_not() -> None:
    generator, common, codec = torch.Generator().manual_seed(0), torch.randn(2**14), Int8(block=256)
    ring, phases = [], []
    for world_size in (2, 16):
        own = [torch.randn(2**14, generator=generator) for _ in range(world_size)]
        vectors = [0.9**0.5 * common + 0.1**0.5 * x for x in own]
        mean, zeros = torch.stack(vectors).double().mean(0), [torch.zeros(2**14)] * world_size
        owners = [torch.zeros(b - a) for a, b in bounds(2**14, world_size, 256)]
        for errors, got in (
            (ring, _emulate_ring(codec, vectors)),
            (phases, emulate_two_phase(codec, vectors, zeros, owners)[0]),
        ):
            errors.append(float((got - mean).square().sum() / mean.square().sum()))
    assert ring[1] > 3 * ring[0] and phases[1] < phases[0]
