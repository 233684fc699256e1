"""Faults that other systems of this field have shipped, by their number in our list: each is a test, here or elsewhere.

B: bytes that are not what is claimed. A: arithmetic. C: control flow. S: state. Some are tested beside the code they
guard; `ELSEWHERE` says where, and is checked.
"""

from __future__ import annotations

import ast
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_checks import gaussian, round_trip
from lowcomm.compress import Cast, Int4, Int8, PowerSGD, RandomK, Sign, TopK
from lowcomm.optim import DiLoCo, LocalSGD, StreamingDiLoCo
from lowcomm.sync import AllReduce, SyncError
from ranks import run_ranks
from sync_codecs import SignCodec
from test_sync_failures import _corrupting
from torch import Tensor, nn
from torch.optim import SGD, AdamW

ELSEWHERE = {
    "B2 reported bits are those of the buffer": ("test_wire_format.py", "test_reader_agrees"),
    "B3 ratios count headers, scales and padding": ("test_sync_sums.py", "test_plans_come_true"),
    "B4 receipts count what is handed to the collective": (
        "test_sync_receipts.py",
        "test_bytes_by_phase_are_those_handed_to_the_group",
    ),
    "A3 sum, mean and mean over contributors": ("test_sync.py", "test_mean_of_contributors_and_sum"),
    "A4 a ring requantizes at every hop": (
        "test_sync_sums.py",
        "test_ring_error_grows_with_the_ranks_and_that_of_two_phases_does_not",
    ),
    "A5 conversions that truncate": ("test_quantize.py", "test_worked_examples"),
    "A6 hostile values": ("test_quantize.py", "test_guarantees_hold_on_adversarial_vectors"),
    "A7 one clip range for every width": ("test_quantize.py", "test_error_is_as_documented"),
    "A9 replicas that drift": ("test_conformance_ranks.py", "test_workers_agree_after_every_sync"),
    "A10 Nesterov that is heavy ball": ("test_oracles_local.py", "test_outer_step_is_torch_sgd"),
    "A13 decisions that ranks take alone": ("test_sync_agreement.py", "test_nonfinite_policies"),
    "C1 asynchronous exchanges nobody waits for": (
        "test_sync_traffic.py",
        "test_many_exchanges_in_flight_beside_the_users_own",
    ),
    "C5 parameter iterators used twice": ("test_bad_input.py", "test_parameter_iterators_used_up_and_shared"),
    "C6 options swallowed or never read": ("test_bad_input.py", "test_constructors_refuse"),
    "C8 messages in different order": ("test_sync_agreement.py", "test_every_rank_gets_the_same_error"),
    "C9 different start weights": ("test_bad_input.py", "test_workers_that_start_apart_are_refused_or_aligned"),
    "C11 outer steps through gradients": ("test_conformance.py", "test_gradients_and_storage_stay"),
    "C12 traffic between syncs": ("test_conformance_ranks.py", "test_no_communication_between_syncs"),
    "C13 uneven batches": ("test_conformance_ranks.py", "test_uneven_batches_end_with_flush"),
    "S1 state missing from checkpoints": ("test_composition.py", "test_resume_at_every_step"),
    "S2 state of another layout": ("test_bad_input.py", "test_checkpoints_of_something_else_are_refused"),
    "S4 parameters rebound": ("test_conformance.py", "test_gradients_and_storage_stay"),
    "S6 hyper-parameters that differ": ("test_bad_input.py", "test_ranks_that_disagree_are_named_with_their_values"),
    "S8 module buffers never averaged": ("test_conformance_ranks.py", "test_module_buffers_are_averaged"),
    "S9 short and damaged messages": ("test_hostile.py", "test_flipped_bits"),
}
ROWS = {"B": 7, "A": 13, "C": 13, "S": 9}


def test_every_row_is_a_test() -> None:
    here = Path(__file__)
    own = {name.split("_")[1].upper() for name in globals() if name.startswith("test_") and name[5].isalpha()}
    rows = {f"{letter}{i}" for letter, count in ROWS.items() for i in range(1, count + 1)}
    elsewhere = {title.split()[0] for title in ELSEWHERE}
    assert rows <= own | elsewhere and elsewhere <= rows, sorted(rows - own - elsewhere)
    for title, (file, name) in ELSEWHERE.items():
        tree = ast.parse((here.parent / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, title


def model_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    values = torch.Generator().manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=values).to(dtype)) for shape in shapes)


def _two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    parts = (_bytes_by_shape, _narrow_traffic, _messages, _sign_of_progress, _half_sums, _policies, _mistake)
    return {part.__name__: part(rank, world_size) for part in parts}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_two_ranks, 2)


def push(model: nn.ParameterList, optimizer: Any, gradient: float) -> None:
    """One step on the same gradient everywhere."""
    for p in model:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


# ---- bytes


def test_b1_a_shared_choice_sends_no_positions() -> None:
    """The rest is the same seed on all ranks: 5 of 1000 values are 20 bytes, padding included."""
    codec = RandomK(density=0.005)
    assert codec.nbytes(1000) == 4 * codec.kept(1000) == 20


SHAPES = [((),), ((1,),) * 3, ((7,),), ((3, 5),), ((2, 3, 4),), ((2, 1, 3, 2),), ((2, 2, 2, 2, 3),)]


def _bytes_by_shape(rank: int, world_size: int) -> list[tuple[int, int]]:
    found = []
    for shapes in SHAPES:
        model = model_of(*shapes)
        optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, compress=Int4())
        push(model, optimizer, 1.0 + rank)
        found.append((sum(p.numel() for p in model), optimizer.last_sync.payload_bytes))
    return found


def test_b5_shapes_do_not_change_the_bits(two: list[dict[str, Any]]) -> None:
    for found in [rank["_bytes_by_shape"] for rank in two]:
        for elements, sent in found:
            assert sent == 16 * math.ceil((16 + Int4().nbytes(elements)) / 16), elements


def _narrow_traffic(rank: int, world_size: int) -> tuple[int, int]:
    model = model_of((64, 64), (64,), dtype=torch.bfloat16)
    optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, compress=Cast("bf16"))
    push(model, optimizer, 1.0 + rank)
    return sum(p.numel() for p in model), optimizer.last_sync.payload_bytes


def test_b6_narrow_parameters_travel_narrow(two: list[dict[str, Any]]) -> None:
    for elements, sent in [rank["_narrow_traffic"] for rank in two]:
        assert 2 * elements <= sent < 2 * elements + 64


def _messages(rank: int, world_size: int) -> list[int]:
    counts = []
    for shapes in (((64, 64),), ((8, 8),) * 64):
        model = model_of(*shapes)
        optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, compress=Int8())
        push(model, optimizer, 1.0 + rank)
        counts.append(optimizer.last_sync.bytes_sent)
    return counts


def test_b7_many_tensors_are_one_message(two: list[dict[str, Any]]) -> None:
    for one, many in [rank["_messages"] for rank in two]:
        assert one == many


# ---- arithmetic


def _sign_of_progress(rank: int, world_size: int) -> Tensor:
    """Workers with gradients 1 and 3 and one SGD step of 0.1: the mean progress is -0.2."""
    model = model_of((3,))
    start = model[0].detach().clone()
    where = model[0].data_ptr()
    optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, outer_lr=0.5, outer_momentum=0.0)
    push(model, optimizer, (1.0, 3.0)[rank])
    assert model[0].data_ptr() == where
    return model[0].detach() - start


def test_a1_the_outer_step_goes_the_way_of_the_workers(two: list[dict[str, Any]]) -> None:
    for moved in [rank["_sign_of_progress"] for rank in two]:
        torch.testing.assert_close(moved, torch.full((3,), -0.1))


def test_a2_small_outer_steps_add_up_below_the_resolution_of_the_parameter() -> None:
    """bfloat16 1.0 and 40 rounds of 2^-7 at outer learning rate 0.1: 1 - 40 * 0.1 / 128, not 1."""
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = DiLoCo(SGD([p], lr=1.0), sync_every=1, outer_lr=0.1, outer_momentum=0.0)
    for _ in range(40):
        p.grad = torch.full_like(p, 2**-7)
        optimizer.step()
    assert optimizer.state[p]["anchor"].item() == pytest.approx(0.96875, abs=0.002)
    assert p.item() == pytest.approx(0.96875, abs=0.004)


@pytest.mark.parametrize("n", [1, 63, 65, 4097, 4100])
def test_a8_k_may_exceed_the_last_chunk(n: int) -> None:
    x = gaussian(n)
    decoded = round_trip(TopK(k=63, chunk=4096, value="f32"), x)
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])
    assert int((decoded != 0).sum()) >= min(n, 63)


def _half_sums(rank: int, world_size: int) -> list[Tensor]:
    """60000 + 60000 is beyond fp16 (65504); their mean is not."""
    ends = []
    for codec in (None, Cast("fp16"), Int8()):
        p = nn.Parameter(torch.full((5,), 60000.0, dtype=torch.float16))
        optimizer = LocalSGD(SGD([p], lr=0.0), sync_every=1, compress=codec)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        ends.append(p.detach().clone())
    return ends


def test_a11_half_precision_sums_do_not_overflow(two: list[dict[str, Any]]) -> None:
    for ends in [rank["_half_sums"] for rank in two]:
        for end in ends:
            assert torch.equal(end, torch.full_like(end, 60000.0))


def _means(rank: int, world_size: int) -> bool:
    values = torch.Generator().manual_seed(0)
    rows = torch.randint(-99, 99, (world_size, 257), generator=values).double()
    work = AllReduce().reduce(rows[rank].clone())
    work.wait()
    return torch.equal(work.result, rows.sum(0) / world_size)


def test_a12_the_mean_is_a_sum_with_our_own_scale() -> None:
    assert all(run_ranks(_means, 3))


# ---- control flow


def _random_sizes(rank: int, world_size: int) -> bool:
    """Sizes that do not fit a fragment's cap: every element is the exact mean all the same."""
    exact = True
    draws = torch.Generator().manual_seed(5)
    for fragments in range(1, 5):
        shapes = [(int(size),) for size in torch.randint(1, 40, (7,), generator=draws)]
        model = model_of(*shapes, dtype=torch.float64)
        inner = SGD(model.parameters(), lr=1.0)
        optimizer = StreamingDiLoCo(
            inner, sync_every=4, fragments="bytes", num_fragments=fragments, delay=0, alpha=0.0, outer_lr=1.0,
            outer_momentum=0.0,
        )  # fmt: skip
        starts = [p.detach().clone() for p in model]
        push(model, optimizer, 1.0 + 2.0 * rank)
        optimizer.flush()
        exact = exact and all(torch.equal(p.detach(), s - world_size) for p, s in zip(model, starts, strict=True))
    return exact


@pytest.mark.parametrize("world_size", [2, 3])
def test_c2_every_element_is_sent(world_size: int) -> None:
    assert all(run_ranks(_random_sizes, world_size))


def _policies(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Round 2 of 3 arrives damaged."""
    found = {}
    for policy in ("raise", "skip", "local"):
        model = model_of((30,))
        optimizer = DiLoCo(
            SGD(model.parameters(), lr=0.1), sync_every=1, outer_lr=1.0, outer_momentum=0.0,
            compress=SignCodec(), on_failure=policy,
        )  # fmt: skip
        push(model, optimizer, 1.0 + rank)
        anchor = optimizer.state[model[0]]["anchor"].clone()
        _corrupting(optimizer._reducer, 4, rank, world_size)
        error = ""
        try:
            push(model, optimizer, 1.0 + rank)
        except SyncError as caught:
            error = type(caught).__name__
        after_inner = anchor - 0.1 * (1.0 + rank)
        kept = torch.equal(optimizer.state[model[0]]["anchor"], anchor) and torch.equal(model[0].detach(), after_inner)
        failure = optimizer.last_sync.failure
        push(model, optimizer, 1.0 + rank)
        found[policy] = {"error": error, "kept": kept, "failure": failure, "end": model[0].detach().clone()}
    return found


def test_c3_failures_raise_unless_a_policy_was_chosen(two: list[dict[str, Any]]) -> None:
    first, second = [rank["_policies"] for rank in two]
    for one in (first, second):
        assert one["raise"]["error"] and one["raise"]["kept"] and not one["raise"]["failure"]
        assert not one["skip"]["error"] and one["skip"]["kept"] and one["skip"]["failure"].startswith("skip: ")
        assert not one["local"]["error"] and not one["local"]["kept"]
        assert one["local"]["failure"].startswith("local: ")
    for policy in ("raise", "skip"):  # the next sync took the progress of both rounds, and workers agree
        assert torch.equal(first[policy]["end"], second[policy]["end"])


def _absent(rank: int, world_size: int) -> float:
    p = nn.Parameter(torch.zeros(1))
    optimizer = LocalSGD(SGD([p], lr=1.0), sync_every=1, weights=float(rank != 2))
    p.grad = torch.full_like(p, -3.0 * (rank + 1))
    optimizer.step()
    return p.item()


def test_c4_the_divisor_is_what_was_summed() -> None:
    assert run_ranks(_absent, 3) == [4.5] * 3


@pytest.mark.parametrize("phase", [0, 2])
def test_c7_syncs_come_exactly_when_they_are_due(phase: int) -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=3, phase=phase)
    came = []
    for step in range(1, 13):
        before = optimizer.num_syncs
        p.grad = torch.ones(1)
        if step == 5:
            state = optimizer.state_dict()
            optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=3, phase=phase)
            optimizer.load_state_dict(state)
            before = 0
        optimizer.step()
        if optimizer.num_syncs > before:
            came.append(step)
    assert came == [step for step in range(1, 13) if step % 3 == phase]


class Broken(SignCodec):
    """A codec with a mistake in it."""

    def encode(self, *_: Any, **__: Any) -> int:
        raise AssertionError("a mistake in the codec")


def _mistake(rank: int, world_size: int) -> str:
    model = model_of((2, 3, 4))
    optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, compress=Broken(), on_failure="skip")
    with pytest.raises(AssertionError, match="a mistake in the codec"):
        push(model, optimizer, 1.0)
    return "raised"


def test_c10_our_own_errors_are_no_network_failures(two: list[dict[str, Any]]) -> None:
    assert [rank["_mistake"] for rank in two] == ["raised"] * 2


# ---- state


def test_s3_load_state_dict_by_keyword() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer, other = DiLoCo(AdamW([p]), sync_every=1), DiLoCo(AdamW([q]), sync_every=1)
    p.grad = torch.ones(2)
    optimizer.step()
    other.load_state_dict(state_dict=optimizer.state_dict())
    assert torch.equal(other.state[q]["anchor"], optimizer.state[p]["anchor"])
    assert bool(other.state[q]["anchor"].any())


@pytest.mark.parametrize("build", [DiLoCo, LocalSGD, functools.partial(StreamingDiLoCo, fragments="bytes")])
def test_s5_loading_what_was_just_saved_changes_nothing(build: Any) -> None:
    ends = []
    for reload in (False, True):
        model = model_of((3,), (2, 2))
        optimizer = build(AdamW(model.parameters(), lr=0.1), sync_every=2)
        if reload:
            optimizer.load_state_dict(optimizer.state_dict())
            assert all(torch.equal(p, q) for p, q in zip(model, model_of((3,), (2, 2)), strict=True))
        for step in range(5):
            push(model, optimizer, 1.0 + step)
        ends.append([p.detach().clone() for p in model])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "codec", [PowerSGD(rank=2), Sign(), TopK(k=4, chunk=16), Int4()], ids=lambda c: type(c).__name__
)
def test_s7_every_codec_takes_parameters_of_every_dtype(codec: Any, dtype: torch.dtype) -> None:
    model = model_of((8, 6), (6,), dtype=dtype)
    optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=1, compress=codec)
    for _ in range(3):
        push(model, optimizer, 0.5)
    assert all(p.dtype == dtype and bool(torch.isfinite(p).all()) for p in model)
    assert all(optimizer.state[p]["anchor"].dtype == torch.float32 for p in model)
