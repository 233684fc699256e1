"""Error feedback: published step-by-step vectors, conservation with failed rounds, limits, membership changes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import (
    DGC,
    EF14,
    EF21,
    EF21SGDM,
    Codec,
    EControl,
    EFDecay,
    EMAFeedback,
    Feedback,
    average_state,
    econtrol_eta,
    handover_state,
    load_tensors,
    reinject,
    reset_state,
    save_tensors,
)
from ranks import run_ranks
from reference_codecs import Dense, KeepLargest, RoundTo
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
INPUTS = [torch.tensor(g) for g in VECTORS["ef_inputs"]]
CPU = torch.device("cpu")
ALL_RULES: list[Feedback] = [
    EF14(),
    EFDecay(),
    EMAFeedback(reset_every=5),
    EF21(),
    EF21(weight=2.0),
    EF21SGDM(),
    EControl(eta=0.1),
    DGC(),
    DGC(nesterov=True, clip_norm=1.0, num_ranks=4),
    DGC(masking=False),
]
rules = pytest.mark.parametrize("feedback", ALL_RULES, ids=repr)


def send(feedback: Feedback, codec: Codec, x: Tensor, state: dict[str, Tensor], **place: int) -> Any:
    """(decoded message, candidate, flags); checks that the committed state is left alone."""
    before = {name: value.clone() for name, value in state.items()}
    body = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    flags, candidate = feedback.encode(codec, x.clone(), state, body, **place)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert set(candidate) == set(feedback.init(1, CPU))
    decoded = torch.empty_like(x)
    codec.decode(body, decoded, **place)
    return decoded, candidate, flags


def run(feedback: Feedback, codec: Codec, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    """What one rank sends and holds after each round: the state, "sent" and "result"."""
    state, history = feedback.init(inputs[0].numel(), CPU), []
    for step, x in enumerate(inputs):
        sent, state, _ = send(feedback, codec, x, state, step=step)
        result = feedback.aggregate(sent.clone(), state)
        history.append({**{name: value.clone() for name, value in state.items()}, "sent": sent, "result": result})
    return history


@pytest.mark.parametrize(
    ("name", "feedback", "keys"),
    [
        ("ef14_top1", EF14(), {"sent": "sent", "e": "residual"}),
        ("sparseloco_ef_beta05_top1", EFDecay(beta=0.5), {"sent": "sent", "e": "residual"}),
        ("loco_ema_beta05_top1", EMAFeedback(beta=0.5), {"sent": "sent", "e": "residual"}),
        ("ef21_top1_g0zero", EF21(), {"sent": "sent", "g": "estimate"}),
        ("ef21_sgdm_eta05_top1", EF21SGDM(eta=0.5), {"v": "momentum", "sent": "sent", "g": "estimate"}),
        ("econtrol_eta05_top1", EControl(eta=0.5), {"sent": "sent", "h": "estimate", "e": "residual"}),
        ("dgc_m05_top1", DGC(momentum=0.5), {"sent": "sent", "u": "velocity", "v": "residual"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_steps(name: str, feedback: Feedback, keys: dict[str, str]) -> None:
    for got, expected in zip(run(feedback, KeepLargest(), INPUTS), VECTORS[name], strict=True):
        for key, ours in keys.items():
            assert got[ours].tolist() == expected[key], (key, expected)


def test_ef21_weights() -> None:
    case = VECTORS["ef21w_top1_N4"]
    n_ranks, weights = 4, case["w"]
    states = [EF21().init(3, CPU) for _ in range(n_ranks)]
    plain = [EF21().init(3, CPU) for _ in range(n_ranks)]
    for gradients, expected in zip(case["g"], case["rounds"], strict=True):
        for kind, group in (("weighted", states), ("plain", plain)):
            sent, candidates, mean = [], [], torch.zeros(3)
            for rank, g in enumerate(gradients):
                weight = n_ranks * weights[rank] if kind == "weighted" else 1.0
                message, candidate, _ = send(EF21(weight), KeepLargest(), torch.tensor(g), group[rank])
                sent.append(message)
                candidates.append(candidate)
                mean += message * weight / n_ranks
            results = [EF21().aggregate(mean.clone(), candidate) for candidate in candidates]
            group[:] = candidates
            assert all(result.tolist() == expected["H"] for result in results)  # weights do not change H for top-k
            if kind == "weighted":
                assert [message.tolist() for message in sent] == expected["sent"]
                assert [candidate["estimate"].tolist() for candidate in candidates] == expected["h"]


@rules
@pytest.mark.parametrize("codec", [Dense(), KeepLargest(k=3), RoundTo()], ids=repr)
def test_failed_rounds_leave_no_trace(feedback: Feedback, codec: Codec) -> None:
    """Candidates of failed rounds are dropped: the run is bit for bit the one without those rounds."""
    torch.manual_seed(0)
    chance = random.Random(1)
    clean, noisy = feedback.init(17, CPU), feedback.init(17, CPU)
    for step in range(30):
        while chance.random() < 0.4:  # the message is built, the exchange fails, the displacement stays
            send(feedback, codec, torch.randn(17), noisy, step=step, rank=1)
        x = torch.randn(17)
        (sent, clean, _), (sent_again, noisy, _) = (
            send(feedback, codec, x, state, step=step, rank=1) for state in (clean, noisy)
        )
        assert torch.equal(sent, sent_again)
        feedback.aggregate(sent.clone(), clean), feedback.aggregate(sent.clone(), noisy)
        assert all(torch.equal(clean[name], noisy[name]) for name in clean)


@pytest.mark.parametrize("beta", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_residual_conserves_what_was_put_in(beta: float, n_ranks: int) -> None:
    """sum beta^(t-s) applied + mean e + pending = sum beta^(t-s) of the mean input, whatever fails."""
    torch.manual_seed(2)
    chance = random.Random(3)
    feedback = EF14() if beta == 1.0 else EFDecay(beta)
    states = [feedback.init(20, CPU) for _ in range(n_ranks)]
    pending = torch.zeros(n_ranks, 20)  # displacements of failed rounds that stay in the parameters
    put_in, applied, largest = torch.zeros(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64), 0.0
    for step in range(50):
        pending += torch.randn(n_ranks, 20)
        messages = [
            send(feedback, RoundTo(0.5) if step % 2 else KeepLargest(k=4), pending[rank], states[rank], step=step)
            for rank in range(n_ranks)
        ]
        outcome = chance.choice(["counted", "kept", "discarded"])
        if outcome == "kept":
            continue
        put_in = put_in * beta + pending.double().mean(0)
        applied *= beta
        if outcome == "counted":
            applied += torch.stack([sent for sent, _, _ in messages]).double().mean(0)
            states = [candidate for _, candidate, _ in messages]
        else:
            states = [feedback.discard(pending[rank].clone(), states[rank]) for rank in range(n_ranks)]
        pending.zero_()
        residual = torch.stack([state["residual"] for state in states])
        largest = max(largest, float(residual.abs().max()) + 4)
        assert torch.allclose(applied + residual.double().mean(0), put_in, rtol=0, atol=(step + 2) * 2**-23 * largest)


def test_absent_ranks_keep_or_return_their_share() -> None:
    """Each rank on its own is counted, keeps its displacement, or has it discarded; the sum over ranks is conserved."""
    torch.manual_seed(11)
    chance = random.Random(12)
    feedback, n_ranks = EF14(), 4
    states = [feedback.init(10, CPU) for _ in range(n_ranks)]
    pending, put_in, applied = torch.zeros(n_ranks, 10), torch.zeros(10), torch.zeros(10)
    for step in range(50):
        fresh = torch.randint(-8, 9, (n_ranks, 10)).float()  # integers: every sum below is exact
        pending += fresh
        put_in += fresh.sum(0)
        for rank in range(n_ranks):
            sent, candidate, _ = send(feedback, KeepLargest(k=2), pending[rank], states[rank], step=step)
            outcome = chance.choice(["counted", "kept", "discarded"])
            if outcome == "counted":
                states[rank] = candidate
                applied += sent
            elif outcome == "discarded":
                states[rank] = feedback.discard(pending[rank].clone(), states[rank])
            if outcome != "kept":
                pending[rank].zero_()
        held = torch.stack([state["residual"] for state in states]).sum(0)
        assert torch.equal(applied + held + pending.sum(0), put_in)


def test_estimates_equal_the_receivers_copies_and_aggregate_their_mean() -> None:
    torch.manual_seed(4)
    chance = random.Random(5)
    for feedback in (EF21(), EF21SGDM(eta=0.3), EControl(eta=0.2)):
        states = [feedback.init(20, CPU) for _ in range(3)]
        copies = torch.zeros(3, 20)  # what a receiver adds up from the bytes alone
        total = [torch.zeros(20, dtype=torch.float64) for _ in range(3)]
        for step in range(50):
            xs = torch.randn(3, 20)
            messages = [send(feedback, KeepLargest(k=5), xs[rank], states[rank], step=step) for rank in range(3)]
            if chance.random() < 0.3:
                states = [feedback.discard(xs[rank].clone(), states[rank]) for rank in range(3)]
                continue
            mean = torch.stack([sent for sent, _, _ in messages]).mean(0)
            states = [candidate for _, candidate, _ in messages]
            results = [feedback.aggregate(mean.clone(), state) for state in states]
            for rank in range(3):
                copies[rank] += messages[rank][0]
                total[rank] += xs[rank].double() - states[rank]["estimate"].double()
                assert torch.equal(copies[rank], states[rank]["estimate"])
                assert torch.equal(results[rank], results[0])
                assert torch.equal(results[rank], states[rank]["aggregate"])
                if isinstance(feedback, EControl):  # e is the sum of g - h
                    assert torch.allclose(states[rank]["residual"].double(), total[rank], atol=1e-4)
            assert torch.allclose(results[0], copies.mean(0), atol=1e-5)


def test_aggregate_belongs_to_the_caller() -> None:
    """The caller may overwrite what it gets (an outer step in place) without touching the state."""
    for feedback in ALL_RULES:
        state = feedback.init(4, CPU)
        sent, candidate, _ = send(feedback, Dense(), torch.ones(4), state)
        feedback.aggregate(sent, candidate).fill_(100.0)
        assert all(float(value.abs().max()) < 10 for value in candidate.values())


def test_overlapped_messages_lose_no_aggregate() -> None:
    """A message built on the candidate of one still on its way ends with the same state as one after the other."""
    torch.manual_seed(13)
    x, y, codec = torch.randn(8), torch.randn(8), KeepLargest(k=2)
    for feedback in (EF21(), EF21SGDM(), EControl()):
        start = feedback.init(8, CPU)
        first, candidate, _ = send(feedback, codec, x, start, step=0)
        second, later, _ = send(feedback, codec, y, candidate, step=1)
        results = [feedback.aggregate(first.clone(), candidate), feedback.aggregate(second.clone(), later)]
        expected = run(feedback, codec, [x, y])
        assert all(torch.equal(got, want["result"]) for got, want in zip(results, expected, strict=True))
        assert all(torch.equal(later[name], expected[1][name]) for name in later)


def test_ranks_of_different_weight_have_the_same_settings() -> None:
    assert repr(EF21(weight=0.5)) == repr(EF21(weight=2.0)) and EF21(weight=0.5) != EF21(weight=2.0)


@pytest.mark.parametrize("delta", [0.1, 0.5])
def test_residual_bound(delta: float) -> None:
    torch.manual_seed(6)
    n = 40
    codec, root = KeepLargest(k=round(delta * n)), math.sqrt(1 - delta)
    inputs = [torch.nn.functional.normalize(torch.randn(n), dim=0) for _ in range(100)]
    norms = [float(state["residual"].norm()) for state in run(EF14(), codec, inputs)]
    assert max(norms) <= root / (1 - root)
    assert min(norms) > 0.1  # the bound is not met by sending everything


def test_limits() -> None:
    torch.manual_seed(7)
    inputs = [torch.randn(12) for _ in range(20)]
    codec = KeepLargest(k=2)

    def same(one: Feedback, other: Feedback, *keys: str) -> bool:
        pairs = zip(run(one, codec, inputs), run(other, codec, inputs), strict=True)
        return all(torch.equal(a[key], b[key]) for a, b in pairs for key in ("sent", "result", *keys))

    assert same(EFDecay(beta=1.0), EF14(), "residual")
    assert same(EF21SGDM(eta=1.0), EF21(), "estimate")
    assert same(EControl(eta=0.0), EF21(), "estimate")
    assert same(EMAFeedback(beta=0.0, reset_every=0), EF14(), "residual")
    assert same(DGC(momentum=0.0), EF14(), "residual")
    assert not same(EFDecay(beta=0.9), EF14())


@rules
def test_a_lossless_codec_leaves_nothing(feedback: Feedback) -> None:
    torch.manual_seed(8)
    inputs = [torch.randn(9) for _ in range(6)]
    for step, (x, got) in enumerate(zip(inputs, run(feedback, Dense(), inputs), strict=True)):
        if isinstance(feedback, DGC):
            assert not got["residual"].any()
        elif isinstance(feedback, EF21SGDM):
            assert torch.allclose(got["result"], got["momentum"], atol=1e-6), step
        else:
            scale = getattr(feedback, "weight", 1.0)
            assert torch.allclose(got["result"] * scale, x, atol=1e-6), step
            assert torch.allclose(got.get("residual", torch.zeros(9)), torch.zeros(9), atol=1e-6)


def test_dense_start() -> None:
    g, mean = torch.tensor([3.0, 1.0, -2.0]), torch.tensor([1.0, 0.0, 0.5])
    for feedback in (EF21(), EF21SGDM(), EControl()):
        sent, exact, _ = send(feedback, Dense(), g, feedback.init(3, CPU))
        feedback.aggregate(mean.clone(), exact)
        started = feedback.start(g, mean)
        assert all(torch.equal(started[name], exact[name]) for name in exact)
        assert torch.equal(sent, g)
    weighted = EF21(weight=2.0).start(g, mean)
    assert torch.equal(weighted["estimate"], g / 2) and torch.equal(weighted["aggregate"], mean)


def test_momentum_starts_after_failed_and_zero_rounds() -> None:
    feedback, codec = EF21SGDM(eta=0.25), Dense()
    state = feedback.init(2, CPU)
    send(feedback, codec, torch.tensor([8.0, 8.0]), state)
    _, state, _ = send(feedback, codec, torch.zeros(2), state, step=1)
    _, state, _ = send(feedback, codec, torch.tensor([4.0, 0.0]), state, step=2)
    assert state["momentum"].tolist() == [4.0, 0.0]
    _, state, _ = send(feedback, codec, torch.tensor([0.0, 4.0]), state, step=3)
    assert state["momentum"].tolist() == [3.0, 1.0]


def test_moving_average_resets() -> None:
    state = {"residual": torch.full((3,), 7.0)}
    sent, _, _ = send(EMAFeedback(reset_every=4), Dense(), torch.ones(3), state, step=8)
    assert sent.tolist() == [1.0, 1.0, 1.0]
    sent, _, _ = send(EMAFeedback(reset_every=4), Dense(), torch.ones(3), state, step=9)
    assert sent.tolist() == [8.0, 8.0, 8.0]


@rules
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_state_becomes_non_finite(feedback: Feedback, bad: float) -> None:
    codec, place = KeepLargest(k=2), 3
    state = feedback.init(6, CPU)
    for step in range(4):
        x = torch.arange(1.0, 7.0) + step
        clean = x.clone()
        if step == 2:
            x[place] = bad
        before = state
        sent, state, flags = send(feedback, codec, x, state, step=step)
        assert flags == (0 if step != 2 else 1 if math.isnan(bad) else 2)
        assert (bool(torch.isfinite(sent).all()) and sent[place] == 0) or step != 2
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
        thrown = feedback.discard(x.clone(), before)
        assert all(bool(torch.isfinite(value).all()) for value in thrown.values())
        if step == 2:
            # the other elements go on as if nothing had happened (a clipped gradient excepted: its norm is not known)
            _, expected, _ = send(feedback, KeepLargest(k=6), clean, before, step=step)
            _, got, _ = send(feedback, KeepLargest(k=6), x, before, step=step)
            others = torch.arange(6) != place
            if getattr(feedback, "clip_norm", None) is None:
                assert all(torch.equal(got[name][others], expected[name][others]) for name in got)


@rules
def test_resume_is_bit_exact(feedback: Feedback, tmp_path: Path) -> None:
    torch.manual_seed(9)
    inputs = [torch.randn(50) for _ in range(12)]
    whole = run(feedback, KeepLargest(k=4), inputs)
    state = feedback.init(50, CPU)
    for step, x in enumerate(inputs):
        if step == 7:
            save_tensors(tmp_path / "state.safetensors", state)
            state, _ = load_tensors(tmp_path / "state.safetensors")
        sent, state, _ = send(feedback, KeepLargest(k=4), x, state, step=step)
        assert torch.equal(sent, whole[step]["sent"])
        assert torch.equal(feedback.aggregate(sent, state), whole[step]["result"])


def test_membership_changes_conserve_the_mean() -> None:
    torch.manual_seed(10)
    old = [{"residual": torch.randn(8), "velocity": torch.randn(8)} for _ in range(4)]
    sums = {name: torch.stack([state[name] for state in old]).mean(0) for name in old[0]}
    averages = iter(sorted(sums))
    averaged = average_state(old[0], lambda value: sums[next(averages)])
    assert all(torch.equal(averaged[name], sums[name]) for name in sums)

    survivors = [
        handover_state(old[0], old[3], 4, 2),
        handover_state(old[1], old[2], 4, 2),
    ]
    for name in sums:
        assert torch.allclose(torch.stack([state[name] for state in survivors]).mean(0), sums[name], atol=1e-6)
    assert all(not value.any() for value in reset_state(old[0]).values())
    assert old[0]["residual"].any()


def test_membership_change_with_estimates() -> None:
    state = {"estimate": torch.ones(3), "aggregate": torch.full((3,), 2.0), "momentum": torch.full((3,), 4.0)}
    averaged = average_state(state, lambda value: value / 2)
    assert averaged["estimate"].tolist() == averaged["aggregate"].tolist() == averaged["momentum"].tolist() == [2.0] * 3
    assert averaged["estimate"].data_ptr() != averaged["aggregate"].data_ptr()
    with pytest.raises(ValueError, match="average_state"):
        handover_state(state, None, 3, 2)
    with pytest.raises(ValueError, match="ranks that leave"):
        handover_state({"residual": torch.ones(3)}, None, 2, 3)


def test_reinject() -> None:
    p, d = torch.tensor([4.0, -3.0]), torch.tensor([4.0, 0.0])
    assert reinject(p - d, d, 0.25).tolist() == [3.0, -3.0]
    assert torch.equal(reinject(p - d, d, 1.0), p - d)


def test_econtrol_eta() -> None:
    assert [round(econtrol_eta(delta), 4) for delta in (1 / 64, 0.1, 0.5)] == [0.0026, 0.0180, 0.1381]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EFDecay(beta=1.5), r"beta must be in \[0, 1\] but is: 1.5"),
        (lambda: EMAFeedback(beta=-0.1), "beta must be"),
        (lambda: EMAFeedback(reset_every=-1), "reset_every must be"),
        (lambda: EF21(weight=0.0), "weight must be positive"),
        (lambda: EF21SGDM(eta=0.0), r"eta must be in \(0, 1\]"),
        (lambda: EControl(eta=math.nan), "eta must be >= 0"),
        (lambda: econtrol_eta(1.0), "delta must be"),
        (lambda: DGC(momentum=1.0), "momentum must be"),
        (lambda: DGC(clip_norm=0.0), "clip_norm must be"),
        (lambda: DGC(num_ranks=0), "num_ranks must be"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


SYNC_RULES = [EFDecay(0.9), EF21(), EF21SGDM(eta=0.5), EControl(eta=0.1), DGC(momentum=0.5)]


def _exchange_with_every_rule(rank: int, world_size: int) -> Any:
    from lowcomm.sync import AllReduce

    outcome = []
    for feedback in SYNC_RULES:
        allreduce, results = AllReduce(None, KeepLargest(k=3), feedback), []
        for step in range(4):
            x = torch.randn(10, generator=torch.Generator().manual_seed(100 * step + rank))
            weight = 0.0 if (step, rank) == (2, 1) else 1.0
            work = allreduce.reduce(x, round=step, weight=weight)
            work.wait()
            results.append(work.result.clone())
        outcome.append((results, allreduce.state(0)))
    return outcome


def test_every_rule_between_processes() -> None:
    """Three ranks, one of them absent in one round, against the same in one process; all ranks get the same bits."""
    outcomes = run_ranks(_exchange_with_every_rule, 3)
    for index, feedback in enumerate(SYNC_RULES):
        states = [feedback.init(10, CPU) for _ in range(3)]
        for step in range(4):
            mean, present = torch.zeros(10), [rank for rank in range(3) if (step, rank) != (2, 1)]
            candidates = [dict(state) for state in states]
            for rank in present:
                x = torch.randn(10, generator=torch.Generator().manual_seed(100 * step + rank))
                sent, candidates[rank], _ = send(feedback, KeepLargest(k=3), x, states[rank], step=step)
                mean += sent
            mean /= len(present)
            results = [feedback.aggregate(mean.clone(), candidate) for candidate in candidates]
            states = candidates
            for rank in range(3):
                assert torch.equal(outcomes[rank][index][0][step], results[rank]), (feedback, step, rank)
                assert torch.equal(results[rank], results[0])
        for rank in range(3):
            assert all(torch.equal(outcomes[rank][index][1][name], states[rank][name]) for name in states[rank])
