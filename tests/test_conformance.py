"""What every optimizer of the family owes to code that was written for torch.optim: one process, no process group."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from lowcomm.optim import DiLoCo, HierarchicalLocalSGD
from optimizers_under_test import (
    COMMON,
    ENTRIES,
    INNERS,
    Entry,
    backward,
    build,
    differences,
    everything,
    model_for,
    syncs_by_step,
    tensors_of,
    through_file,
    train,
)
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
each_pair = pytest.mark.parametrize(("entry", "inner"), [(e, i) for e in ENTRIES for i in e.inners or COMMON], ids=str)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads do not pay on matrices of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


HOOK_TABLES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def apart(entry: Entry) -> Callable[[Any], Any]:
    """The class of an entry as it is while no sync is due."""
    return lambda inner: entry.cls(inner, **entry.apart)


# ---- being an Optimizer ------------------------------------------------------------------------------------------


@each
def test_is_an_optimizer(entry: Entry) -> None:
    model = model_for()
    inner = INNERS[entry.inner](model.named_parameters(), lr=0.02)
    optimizer = entry(inner)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.defaults["lr"] == 0.02
    assert all(hasattr(optimizer, table) for table in HOOK_TABLES)
    assert repr(optimizer).startswith(entry.cls.__name__) and "lr: 0.02" in repr(optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval"), "there is no mode to forget"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = StepLR(optimizer, step_size=1)
        backward(model, 0)
        optimizer.step()
        scheduler.step()


@each
def test_takes_what_torch_takes(entry: Entry) -> None:
    """Lists, generators, dicts and (name, parameter) pairs reach the inner optimizer; all of them are trained."""
    forms = (
        lambda model: list(model.parameters()),
        lambda model: (p for p in model.parameters()),
        lambda model: [{"params": model[0].parameters(), "lr": 0.01}, {"params": list(model[2].parameters())}],
        lambda model: model.named_parameters(),
    )
    results = []
    for form in forms:
        model = model_for()
        optimizer = entry.wrap(form(model))
        train(model, optimizer, range(entry.twice))
        results.append(dict(model.state_dict()))
    assert all(not differences(result, results[0]) for result in results)
    with pytest.raises(ValueError, match="empty parameter list"):
        entry.wrap([])
    for bad, error, message in (
        (set(nn.Linear(2, 2).named_parameters()), TypeError, "ordered collections"),
        (list(model.named_parameters()), ValueError, "more than one parameter group"),
        ([("y", torch.ones(2, requires_grad=True) * 2)], ValueError, "non-leaf"),
    ):
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": bad})
        assert len(optimizer.param_groups) == 1


@each
def test_closure(entry: Entry) -> None:
    """`step(closure)` evaluates it once, with gradients enabled, and returns its value; same run as without."""
    model, optimizer = build(entry)
    twin, plain = build(entry)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return float(backward(model, len(calls) - 1))

    for step in range(entry.twice):
        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert loss == float(backward(twin, step))
        assert plain.step() is None
    assert calls == [True] * entry.twice
    assert not differences(everything(model, optimizer), everything(twin, plain))


@each
def test_step_hooks(entry: Entry) -> None:
    """Hooks fire once a step and see its arguments; hooks of the inner optimizer fire as well."""
    model, optimizer = build(entry)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt is optimizer, args, kwargs)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt is optimizer, args, kwargs)))

    def closure() -> float:
        return float(backward(model, 0))

    optimizer.step(closure)
    assert seen == [("pre", True, (optimizer, closure), {}), ("post", True, (optimizer, closure), {})]
    seen.clear()
    optimizer.step(closure=closure)
    assert [(when, kwargs) for when, _, _, kwargs in seen] == [
        ("pre", {"closure": closure}),
        ("post", {"closure": closure}),
    ]


@each
def test_state_dict_hooks(entry: Entry) -> None:
    """All four kinds fire once; what a hook returns is used, and a post hook sees the state as it was saved."""
    model, optimizer = build(entry)
    train(model, optimizer, range(entry.first + 1))
    fired: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda opt: fired.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "note": fired.append("save post")})
    saved = optimizer.state_dict()
    assert fired == ["save pre", "save post"] and "note" in saved

    other_model, other = build(entry, seed=1)
    found: list[dict[str, Any]] = []
    other.register_load_state_dict_pre_hook(lambda opt, state: state["wrapped"])
    other.register_load_state_dict_post_hook(lambda opt: found.append(everything(other_model, opt)))
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict({"wrapped": saved})
    assert len(found) == 1
    assert not differences(found[0], everything(model, optimizer))


@each
def test_gradients_and_storage_stay(entry: Entry) -> None:
    """`step` neither alters nor replaces `.grad`, and never rebinds a parameter's storage (CUDA graphs, FSDP, ties)."""
    model, optimizer = build(entry)
    addresses = [p.data_ptr() for p in model.parameters()]
    for step in range(entry.twice + 1):
        backward(model, step)
        gradients = [p.grad for p in model.parameters()]
        copies = [grad.clone() for grad in gradients]  # type: ignore[union-attr]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), copies, strict=True))  # type: ignore[arg-type]
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(entry.first))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


# ---- inner optimizers --------------------------------------------------------------------------------------------


@each_pair
def test_between_syncs_the_inner_optimizer_is_itself(entry: Entry, inner: str) -> None:
    """Bit for bit the bare inner optimizer while no sync is due, lazily created state included."""
    model, twin = model_for(inner), model_for(inner)
    bare = INNERS[inner](twin.parameters())
    optimizer = apart(entry)(INNERS[inner](model.parameters()))
    train(model, optimizer, range(5))
    train(twin, bare, range(5))
    assert not differences(dict(model.state_dict()), dict(twin.state_dict()))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert not differences(tensors_of(optimizer.state[p]["inner"]), tensors_of(bare.state[q]))


@each_pair
def test_learns_with_every_inner_optimizer(entry: Entry, inner: str) -> None:
    model, optimizer = build(entry, inner)
    first = sum(float(backward(model, step)) for step in range(4))
    for _ in range(6):
        train(model, optimizer, range(4))
    assert sum(float(backward(model, step)) for step in range(4)) < first
    assert optimizer.num_syncs == syncs_by_step(entry, 24)[-1] >= 3


several = pytest.mark.parametrize("entry", [e for e in ENTRIES if e.inners != ("quasi",)], ids=str)


@several
def test_two_inner_optimizers(entry: Entry) -> None:
    """One wrapper around two inner optimizers, where the method allows it, and one around each make the same run."""
    matrices = entry.inners[-1] if entry.inners else "muon" if "muon" in INNERS else "momentum"

    def split(model: nn.Module) -> tuple[Optimizer, Optimizer]:
        two_d = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return INNERS[matrices](two_d), INNERS[entry.inner](rest)

    model, twin = model_for(), model_for()
    both = entry(split(model))
    each_one = [entry(inner) for inner in split(twin)]
    for step in range(entry.twice + 1):
        backward(model, step)
        both.step()
        backward(twin, step)
        for optimizer in each_one:
            optimizer.step()
    if entry.elementwise:
        assert not differences(dict(model.state_dict()), dict(twin.state_dict()))
    assert both.num_syncs == syncs_by_step(entry, entry.twice + 1)[-1] >= 2
    other = model_for(seed=1)
    resumed = entry(split(other))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(both.state_dict()))
    train(other, resumed, range(7, 7 + entry.period))
    train(model, both, range(7, 7 + entry.period))
    assert not differences(everything(other, resumed), everything(model, both))


@several
def test_closure_with_two_inner_optimizers(entry: Entry) -> None:
    model = model_for()
    optimizer = entry([INNERS[entry.inner](model[k].parameters()) for k in (0, 2)])
    twin, plain = build(entry)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return float(backward(model, 0))

    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss == float(backward(twin, 0))
    plain.step()
    assert not differences(dict(model.state_dict()), dict(twin.state_dict()))


# ---- schedulers --------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_reach_the_inner_optimizer(entry: Entry, scheduler_first: bool) -> None:
    """The learning rate in use is the scheduler's, before and after a load, whichever is built or loaded first."""

    if entry.inners == ("quasi",):
        pytest.skip("takes one inner optimizer only, whose step does not tell its learning rate")

    def learning_rate(model: nn.Module, optimizer: Optimizer) -> float:
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, 0)
        optimizer.step()
        steps = [((b - p.detach()) / p.grad).flatten() for b, p in zip(before, model.parameters(), strict=True)]
        return float(torch.cat(steps).median())

    def fresh() -> tuple[nn.Module, Any, StepLR]:
        model = model_for(dtype=torch.float64)
        optimizer = apart(entry)(SGD(model.parameters(), lr=0.8))
        return model, optimizer, StepLR(optimizer, step_size=1, gamma=0.5)

    model, optimizer, scheduler = fresh()
    for expected in (0.8, 0.4, 0.2):
        assert learning_rate(model, optimizer) == pytest.approx(expected, rel=1e-6)
        scheduler.step()
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other_model, other, other_scheduler = fresh()
    if scheduler_first:
        other_scheduler.load_state_dict(states[1])
    other.load_state_dict(states[0])
    if not scheduler_first:
        other_scheduler.load_state_dict(states[1])
    for expected in (0.1, 0.05):
        assert learning_rate(other_model, other) == pytest.approx(expected, rel=1e-6)
        other_scheduler.step()


@each
def test_scheduler_around_the_inner_optimizer(entry: Entry) -> None:
    """A scheduler that was built with the inner optimizer acts on the same groups; it never warns about step order."""
    model = model_for()
    inner = INNERS[entry.inner](model.parameters(), lr=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = StepLR(inner, step_size=1, gamma=0.5)
        optimizer = apart(entry)(inner)
        for step in range(entry.first):
            backward(model, step)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.8 * 0.5**entry.first


@each
def test_a_learning_rate_of_zero_counts_as_a_step(entry: Entry) -> None:
    """A warm-up that starts at 0 must not shift the sync phase, not even on the first step of all."""
    model, optimizer = build(entry)
    scheduler = LambdaLR(optimizer, lambda step: float(step > 0))
    counts = []
    for step in range(entry.twice):
        backward(model, step)
        optimizer.step()
        scheduler.step()
        counts.append(optimizer.num_syncs)
    assert counts == syncs_by_step(entry, entry.twice)


@each
def test_sync_every_can_be_changed_while_training(entry: Entry) -> None:
    model, optimizer = build(entry)
    if optimizer.param_groups[0]["sync_every"] is None or "periods" in optimizer.param_groups[0]:
        pytest.skip("has a schedule or several periods, given at construction")
    train(model, optimizer, range(entry.first))
    before = optimizer.num_syncs
    for group in optimizer.param_groups:
        group["sync_every"] = 2
    train(model, optimizer, range(8))
    assert optimizer.num_syncs - before > syncs_by_step(entry, entry.first + 8)[-1] - before


# ---- parameters coming and going ---------------------------------------------------------------------------------


@each
def test_groups_added_while_training(entry: Entry) -> None:
    """A new group is trained, synchronised and saved; it inherits the counters."""
    model = model_for()
    optimizer = entry.wrap(model[0].parameters())
    train(model, optimizer, range(entry.first + 1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(entry.first))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert optimizer.param_groups[1]["local_step"] == optimizer.param_groups[0]["local_step"]

    other = model_for(seed=1)
    groups = [{"params": other[0].parameters()}, {"params": other[2].parameters(), "lr": 0.02}]
    resumed = entry.wrap(groups)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    train(model, optimizer, range(entry.period))
    train(other, resumed, range(entry.period))
    assert not differences(everything(model, optimizer), everything(other, resumed))


@each
def test_frozen_tied_and_unused_parameters(entry: Entry) -> None:
    """Frozen ones never move, a tied one is handled once, one without gradient is no obstacle, unfreezing works."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.frozen, self.unused = (nn.Linear(5, 5, bias=False) for _ in range(4))
            self.out = nn.Linear(5, 3)
            self.second.weight = self.first.weight
            self.frozen.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Tied()
    frozen, unused = model.frozen.weight.detach().clone(), model.unused.weight.detach().clone()
    optimizer = entry.wrap([{"params": model.parameters(), "weight_decay": 0.0}])
    train(model, optimizer, range(entry.twice))
    assert model.second.weight is model.first.weight
    assert torch.equal(model.frozen.weight, frozen)
    if "compress" not in entry.options:  # a codec may give a zero another value for a while
        assert torch.equal(model.unused.weight, unused)
    assert optimizer.num_syncs == syncs_by_step(entry, entry.twice)[-1]
    model.frozen.weight.requires_grad_(True)
    train(model, optimizer, range(entry.twice))
    assert not torch.equal(model.frozen.weight, frozen)
    saved = through_file(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert not differences(tensors_of(through_file(optimizer.state_dict())["state"]), tensors_of(saved["state"]))


@each
def test_no_gradients_at_all(entry: Entry) -> None:
    """Steps without any gradient count, synchronise and change nothing."""
    model, optimizer = build(entry)
    before = dict(copy.deepcopy(model.state_dict()))
    for _ in range(entry.first):
        optimizer.step()
    assert optimizer.num_syncs == syncs_by_step(entry, entry.first)[-1]
    assert not differences(dict(model.state_dict()), before)


# ---- mixed precision ---------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler(entry: Entry, clip: bool) -> None:
    """Scaled by a power of two, with or without unscale_ and clipping: bit for bit the run without a scaler."""
    model, optimizer = build(entry)
    twin, plain = build(entry)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(entry.twice):
        backward(model, step)
        for p in model.parameters():
            p.grad = scaler.scale(p.grad)  # type: ignore[arg-type]
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        backward(twin, step)
        if clip:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
    assert not differences(everything(model, optimizer), everything(twin, plain))


@each
def test_grad_scaler_skips_an_overflow_but_counts_it(entry: Entry) -> None:
    model, optimizer = build(entry)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = syncs_by_step(entry, entry.first)
    for step in range(entry.first):
        backward(model, step)
        if step == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        before = dict(copy.deepcopy(model.state_dict()))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        if step == 1 and counts[1] == 0:
            assert not differences(dict(model.state_dict()), before)
    assert optimizer.num_syncs == counts[-1]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert not hasattr(optimizer, "found_inf")


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(entry: Entry, dtype: torch.dtype) -> None:
    """Outer state is float32 (float64 for float64 parameters), parameters keep their dtype."""
    if dtype == torch.float64 and "compress" in entry.options:
        with pytest.raises(ValueError, match=r"float64.*compress|compress.*float64"):
            build(entry, dtype=dtype)
        return
    model, optimizer = build(entry, dtype=dtype)
    train(model, optimizer, range(entry.first))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for p in model.parameters():
        assert p.dtype == dtype
        outer = {k: v for k, v in optimizer.state[p].items() if k != "inner"}
        assert all(value.dtype == expected for value in tensors_of(outer).values())
        if "anchor" in outer and entry.agrees == "all":
            assert torch.equal(p.detach(), outer["anchor"].to(dtype))


# ---- copies ------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent_and_equal(entry: Entry, how: str) -> None:
    """(model, optimizer) copied in mid-round, scheduler and hooks attached: both go on alike, and apart."""
    model, optimizer = build(entry)
    StepLR(optimizer, step_size=100)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: None)
    train(model, optimizer, range(entry.first + 1))
    if how == "deepcopy":
        twin_model, twin = copy.deepcopy((model, optimizer))
    elif entry.cls is HierarchicalLocalSGD:
        with pytest.raises(RuntimeError, match="process groups cannot be pickled"):
            pickle.loads(pickle.dumps((model, optimizer)))
        return
    else:
        twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    start = everything(model, optimizer)
    assert not differences(everything(twin_model, twin), start)
    train(twin_model, twin, range(5, 5 + entry.period))
    assert not differences(everything(model, optimizer), start)
    train(model, optimizer, range(5, 5 + entry.period))
    assert not differences(everything(twin_model, twin), everything(model, optimizer))
    assert differences(everything(model, optimizer), start)
    twin.step()  # the twin's hooks and tables work
    repr(twin)


# ---- compilers ---------------------------------------------------------------------------------------------------


# The engine's `step` is what is traced: one class stands for all that inherit it.
TRACED = [e for e in ENTRIES if e.id == "DiLoCo" or e.cls.step is not DiLoCo.step]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("entry", TRACED, ids=lambda entry: entry.id)
def test_compiled_step(entry: Entry, backend: str) -> None:
    """torch.compile(optimizer.step) makes the same run, and compiles nothing more after the first rounds."""
    dynamo.reset()
    model, optimizer = build(entry, "momentum")
    twin, plain = build(entry, "momentum")
    compiled = torch.compile(optimizer.step, backend=backend)
    for step in range(6 * entry.period):
        backward(model, step)
        if step == 4 * entry.period:
            compilations = dynamo.utils.counters["stats"]["unique_graphs"]
        compiled()
        backward(twin, step)
        plain.step()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == compilations > 0
    assert optimizer.num_syncs == plain.num_syncs >= 6
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    dynamo.reset()
