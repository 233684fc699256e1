"""Robust rules: documented values, their properties, and the same bits on all ranks in both algorithms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lowcomm.compress import Codec
from lowcomm.sync import AllReduce, SyncError
from lowcomm.sync.robust import (
    CenteredClipping,
    GeometricMedian,
    GradientAgreement,
    Krum,
    MajorityVote,
    Median,
    NormalizedMean,
    NormMedianClip,
    Rule,
    TrimmedMean,
)
from ranks import run_ranks
from sync_codecs import ExactCodec, SignCodec

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
POINTS = torch.tensor(VECTORS["robust"]["points"])
RULES = [
    Median(),
    TrimmedMean(1),
    Krum(1),
    Krum(1, keep=None),
    GeometricMedian(),
    CenteredClipping(radius=2.0),
    CenteredClipping(radius=None, iterations=3),
    NormMedianClip(),
    NormMedianClip(contributors=True),
    NormalizedMean(),
    GradientAgreement(),
    GradientAgreement(halving=True),
    MajorityVote(),
    MajorityVote(tie="previous"),
]


def test_documented_values() -> None:
    oracle = VECTORS["robust"]
    for rule, name in [
        (Median(), "median"),
        (TrimmedMean(1), "trimmed_mean_b1"),
        (CenteredClipping(radius=2.0), "centered_clip_v0zero_tau2_1it"),
        (CenteredClipping(radius=2.0, iterations=3), "centered_clip_v0zero_tau2_3it"),
        (Krum(1, keep=3), "multikrum_f1_m3"),
        (NormMedianClip(), "norm_median_clip_mean"),
        (GeometricMedian(10, smoothing=0.1, start="zero"), "geomedian_weiszfeld_10it_nu01_z0zero"),
    ]:
        got = rule.combine(POINTS)
        torch.testing.assert_close(got, torch.tensor(oracle[name]), rtol=1e-6, atol=1e-7, msg=f"{rule}: {got}")
    assert Krum(1).scores(POINTS).tolist() == oracle["krum_f1_scores"]
    assert torch.equal(Krum(1).combine(POINTS), POINTS[oracle["krum_f1_index"]])
    gaf = VECTORS["gaf_tau097"]
    result = GradientAgreement(0.97, halving=True).combine(torch.tensor(gaf["inputs"]))
    torch.testing.assert_close(result, torch.tensor(gaf["result"]), rtol=1e-6, atol=0)
    vote = VECTORS["majority_vote"]
    signs = 1.0 - 2.0 * torch.tensor(vote["bits"], dtype=torch.float32)
    assert (MajorityVote().combine(signs) < 0).int().tolist() == vote["result"]


# GradientAgreement starts somewhere; it is checked below.
@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, GradientAgreement)], ids=repr)
def test_order_of_ranks_does_not_matter(rule: Rule) -> None:
    values = torch.Generator().manual_seed(0)
    x = torch.randn(7, 40, generator=values)
    shuffled = x[torch.randperm(7, generator=values)]
    torch.testing.assert_close(rule.combine(x), rule.combine(shuffled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [r for r in RULES if isinstance(r, Median | TrimmedMean | Krum)], ids=repr)
def test_translation_moves_the_result_along(rule: Rule) -> None:
    values = torch.Generator().manual_seed(1)
    x, shift = torch.randn(7, 40, generator=values).double(), torch.randn(40, generator=values).double()
    torch.testing.assert_close(rule.combine(x + shift), rule.combine(x) + shift, rtol=1e-9, atol=1e-9)
    median = GeometricMedian(50, smoothing=1e-3)
    torch.testing.assert_close(median.combine(x + shift), median.combine(x) + shift, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_identical_inputs_give_that_input(rule: Rule) -> None:
    x = torch.randn(40)
    rows = x.expand(7, 40)
    got = rule.combine(rows.clone(), previous=x.clone() if isinstance(rule, CenteredClipping) else None)
    if isinstance(rule, MajorityVote):
        expected = torch.where(x < 0, -1.0, 1.0)
    elif isinstance(rule, NormalizedMean):
        expected = x / x.norm()
    else:
        expected = x
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule", [r for r in RULES if not isinstance(r, GradientAgreement | NormalizedMean | MajorityVote)], ids=repr
)
def test_one_arbitrary_rank_moves_the_result_by_a_bounded_amount(rule: Rule) -> None:
    honest = torch.randn(6, 40)
    for scale in (1e2, 1e6, 1e15):
        for attack in (torch.full((40,), scale), -scale * honest.sum(0), torch.randn(40) * scale):
            result = rule.combine(torch.cat([honest, attack[None]]))
            assert float(result.norm()) < 2 * float(honest.norm(dim=1).max()), (scale, rule)


def test_agreement_filter_skips_and_rotates() -> None:
    opposed = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert GradientAgreement().combine(opposed) is None
    x = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0], [-1.0, 0.01]])
    assert GradientAgreement().combine(x, round=0)[0] == 1.0
    assert GradientAgreement().combine(x, round=2)[0] == -1.0


def test_ties_of_the_vote() -> None:
    x = torch.tensor([[1.0, -1.0, 1.0], [1.0, -1.0, -1.0]])
    assert [MajorityVote(tie).combine(x)[2].item() for tie in (1, -1, 0)] == [1.0, -1.0, 0.0]
    assert MajorityVote("previous").combine(x, previous=-torch.ones(3)).tolist() == [1.0, -1.0, -1.0]


def test_rules_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="at least 5 contributing ranks but there are 4"):
        Krum(1).combine(torch.randn(4, 3))
    with pytest.raises(ValueError, match="more than 4 contributing ranks but there are 4"):
        TrimmedMean(2).combine(torch.randn(4, 3))
    with pytest.raises(ValueError, match="tie"):
        MajorityVote(2)


def _vector(rank: int, t: int) -> torch.Tensor:
    x = torch.randn(33, generator=torch.Generator().manual_seed(100 * t + rank)) + 1.0
    return x * 1e6 if rank == 4 else x


def _combinations() -> list[tuple[str, Codec, Rule]]:
    exact = [(algorithm, ExactCodec(), rule) for algorithm in ("all_gather", "two_phase") for rule in RULES]
    return [*exact, *(("all_gather", SignCodec(), rule) for rule in (Median(), Krum(1)))]


def _rule_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for algorithm, codec, rule in _combinations():
        reducer = AllReduce(codec=codec, algorithm=algorithm, reduce=rule)
        for t in range(1 + rule.stateful):
            work = reducer.reduce(_vector(rank, t), round=t)
            results[f"{algorithm} {type(codec).__name__} {rule} {t}"] = work.result.clone()
        assert set(reducer.state(0)) == set(reducer.state_names())
    voter = AllReduce(codec=SignCodec(), algorithm="two_phase", reduce=MajorityVote())
    results["vote"] = voter.reduce(_vector(rank, 3)).result
    left_out = AllReduce(reduce=Median())
    results["left out"] = left_out.reduce(_vector(rank, 4), weight=float(rank < 3)).result
    skipping = AllReduce(codec=ExactCodec(), feedback="auto", algorithm="two_phase", reduce=GradientAgreement(0.5))
    sign = -1.0 if rank == 0 else 1.0
    work = skipping.reduce(torch.full((33,), sign), weight=float(rank < 2))
    results["skipped"] = (work.wait().skipped, float(work.result.abs().sum()), skipping.state(0))
    for name, weight, rule in (("weights", 1.0 + rank, Median()), ("few", float(rank < 3), Krum())):
        try:
            AllReduce(codec=ExactCodec(), algorithm="two_phase", reduce=rule).reduce(_vector(rank, 0), weight=weight)
        except (SyncError, ValueError) as error:
            results[name] = str(error)
    return results


def _decoded(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    body, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, body)
    codec.decode(body, out)
    return out


def test_rules_between_ranks() -> None:
    outcomes = run_ranks(_rule_rank, 5)
    for algorithm, codec, rule in _combinations():
        previous = None
        for t in range(1 + rule.stateful):
            x = torch.stack([_decoded(codec, _vector(rank, t)) for rank in range(5)])
            expected = rule.combine(x, previous=previous, round=t)
            previous = expected if rule.stateful else None
            name = f"{algorithm} {type(codec).__name__} {rule} {t}"
            for outcome in outcomes:
                assert torch.equal(outcome[name], outcomes[0][name]), name
                if algorithm == "all_gather":
                    assert torch.equal(outcome[name], expected), name
                else:
                    torch.testing.assert_close(outcome[name], expected, rtol=1e-6, atol=1e-6, msg=name)
    for outcome in outcomes:
        votes = torch.stack([_vector(rank, 3).sign() for rank in range(5)]).sum(0).sign()
        assert torch.equal(outcome["vote"], votes)
        assert torch.equal(outcome["left out"], Median().combine(torch.stack([_vector(r, 4) for r in range(3)])))
        skipped, size, state = outcome["skipped"]
        assert skipped and size == 0.0 and state == {}
        assert "weights differ" in outcome["weights"] or "could not" in outcome["weights"]
        assert "at least 5 contributing" in outcome["few"] or "could not" in outcome["few"]
