"""Methods that must coincide: between 2 and 4 real processes, on random quadratics in float64, to 1e-12.

Methods that are combinations of parts (Lookahead, SNOO, MuLoCo, SparseLoCo) are compared with their own formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import EFDecay, TopK
from lowcomm.optim import (
    CO2,
    DESLOC,
    MTDAO,
    QSR,
    AutoLoCo,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    QuasiHyperbolic,
    SignMomentum,
    SlowMo,
    StreamingDiLoCo,
)
from ranks import run_ranks
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

LR, STEPS, H = 0.05, 12, 3
Build = Callable[[list[torch.nn.Parameter]], Any]
Path = list[Tensor]


def quadratic(worker: int) -> tuple[Tensor, Tensor]:
    """(A, b) of worker's loss (x - b)^T A (x - b) / 2 in five dimensions."""
    generator = torch.Generator().manual_seed(100 + worker)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    return root @ root.T / 5 + torch.eye(5, dtype=torch.float64), torch.randn(
        5, generator=generator, dtype=torch.float64
    )


def gradient(worker: int, x: Tensor) -> Tensor:
    a, b = quadratic(worker)
    return a @ (x - b)


def mean_gradient(workers: int, x: Tensor) -> Tensor:
    return torch.stack([gradient(worker, x) for worker in range(workers)]).mean(0)


def path(build: Build, grad: Callable[[Tensor], Tensor], watch: Callable[[Any, Tensor], Tensor] | None = None) -> Path:
    """The parameter after every step (or what `watch` makes of optimizer and parameter)."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
    optimizer = build([p])
    found = []
    for _ in range(STEPS):
        p.grad = grad(p.detach())
        optimizer.step()
        found.append(p.detach().clone() if watch is None else watch(optimizer, p))
    return found


def anchor(optimizer: Any, p: Tensor) -> Tensor:
    return torch.as_tensor(optimizer.state[p]["anchor"]).clone()


def sgd(ps: Any) -> SGD:
    return SGD([("x", ps[0])], lr=LR)


def sgdm(ps: Any) -> QuasiHyperbolic:
    return QuasiHyperbolic(ps, lr=LR, momenta=(0.9,), omegas=(1.0,), form="sgd")


def lion(ps: Any) -> Optimizer:
    class Lion(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (0.9 * m + 0.1 * p.grad).sign_()
                p.mul_(1 - LR * 0.1).sub_(LR * update)
                m.mul_(0.99).add_(p.grad, alpha=0.01)

    return Lion(ps, {"lr": LR})


def nesterov_on_progress(ps: Any, lr: float, momentum: float) -> Optimizer:
    """SNOO and, without momentum, Lookahead: torch's own SGD on anchor minus parameter, every H steps."""

    class Outer(Optimizer):
        count = 0
        slow = torch.nn.Parameter(ps[0].detach().clone())
        inner, outer = SGD(ps, lr=LR), SGD([slow], lr=lr, momentum=momentum, nesterov=momentum > 0)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.inner.step()
            self.count += 1
            if self.count % H == 0:
                self.slow.grad = self.slow - ps[0]
                self.outer.step()
                ps[0].copy_(self.slow)

    return Outer(ps, {})


def pairs(rank: int, world: int) -> dict[str, tuple[Path, Path]]:
    """The rows that hold between any number of workers: what each side does on this one."""

    def own(x: Tensor) -> Tensor:
        return gradient(rank, x)

    def shared(x: Tensor) -> Tensor:
        return mean_gradient(world, x)

    heavy: dict[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5, "nesterov": False}
    moments = {"params": H, "exp_avg": H, "exp_avg_sq": H}

    def adam(ps: Any) -> Adam:
        return Adam(ps, lr=LR)

    qh: dict[str, Any] = {"lr": LR, "momenta": (0.9,), "omegas": (1.0,), "beta2": 0.99, "form": "adam"}
    still: dict[str, Any] = {"loss_power": 0.5, "lr_power": 1.5, "noise_power": 0.0, "smoothing": 0.0}

    def auto(ps: Any) -> Any:
        optimizer = AutoLoCo(sgd(ps), sync_every=H, **still)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: opt.record(1.0))  # a constant loss
        return optimizer

    return {
        "DiLoCo nu=1 mu=0 is local SGD": (
            path(lambda ps: DiLoCo(sgd(ps), sync_every=H, outer_lr=1.0, outer_momentum=0.0), own),
            path(lambda ps: LocalSGD(sgd(ps), sync_every=H), own),
        ),
        "DiLoCo H=1 nu=1 mu=0 is synchronous SGD": (
            path(lambda ps: DiLoCo(sgd(ps), sync_every=1, outer_lr=1.0, outer_momentum=0.0), own),
            path(sgd, shared),
        ),
        "DiLoCo heavy ball is SlowMo": (
            path(lambda ps: DiLoCo(sgd(ps), sync_every=H, **heavy), own),
            path(lambda ps: SlowMo(sgd(ps), sync_every=H, alpha=0.8, beta=0.5), own),
        ),
        "Streaming with one fragment, no delay, alpha 0 is DiLoCo": (
            path(lambda ps: StreamingDiLoCo(sgd(ps), sync_every=H, fragments=[["x"]], delay=0, outer_lr=0.7), own),
            path(lambda ps: DiLoCo(sgd(ps), sync_every=H), own),
        ),
        "DES-LOC SGDM with all periods 1 is synchronous SGDM": (
            path(lambda ps: DESLOC(sgdm(ps), sync_every={"params": 1, "exp_avg": 1}), own),
            path(sgdm, shared),
        ),
        "DES-LOC with all periods K is Local Adam": (
            path(lambda ps: DESLOC(adam(ps), sync_every=moments), own),
            path(lambda ps: LocalSGD(adam(ps), sync_every=H, average_state=("exp_avg", "exp_avg_sq")), own),
        ),
        "MT-DAO with omega 1 is DES-LOC": (
            path(lambda ps: MTDAO(ps, sync_every=H, **qh), own),
            path(
                lambda ps: DESLOC(QuasiHyperbolic(ps, **qh), sync_every=moments),
                own,
            ),
        ),
        "AutoLoCo with constant H and lr is DiLoCo": (
            path(auto, own),
            path(lambda ps: DiLoCo(sgd(ps), sync_every=H), own),
        ),
        "QSR alpha=0 is a constant interval": (
            path(lambda ps: LocalSGD(sgd(ps), sync_every=QSR(alpha=0.0, base=H)), own),
            path(lambda ps: LocalSGD(sgd(ps), sync_every=H), own),
        ),
        "CO2 without gap and clip is delayed DiLoCo with a heavy ball": (
            path(lambda ps: CO2(sgd(ps), sync_every=H, alpha=0.8, beta=0.5, gap_penalty=False), own),
            path(lambda ps: EagerDiLoCo(sgd(ps), sync_every=H, delayed=True, **heavy), own),
        ),
    }


ALONE: dict[str, tuple[Build, Build]] = {
    "DiLoCo K=1 mu=0 is Lookahead": (
        lambda ps: DiLoCo(sgd(ps), sync_every=H, outer_lr=0.5, outer_momentum=0.0),
        lambda ps: nesterov_on_progress(ps, 0.5, 0.0),
    ),
    "DiLoCo K=1 is SNOO": (
        lambda ps: DiLoCo(sgd(ps), sync_every=H),
        lambda ps: nesterov_on_progress(ps, 0.7, 0.9),
    ),
    "Eager K=1 is DiLoCo": (
        lambda ps: EagerDiLoCo(sgd(ps), sync_every=H),
        lambda ps: DiLoCo(sgd(ps), sync_every=H),
    ),
    "sign momentum K=1 with one step a round is Lion": (
        lambda ps: SignMomentum(sgd(ps), sync_every=1, betas=(0.9, 0.99), weight_decay=0.1),
        lion,
    ),
    "DES-LOC K=1 is Adam": (
        lambda ps: DESLOC(Adam(ps, lr=LR), sync_every={"params": 2, "exp_avg": 3, "exp_avg_sq": 4}),
        lambda ps: Adam(ps, lr=LR),
    ),
}


@pytest.mark.parametrize("row", ALONE)
def test_one_worker(row: str) -> None:
    left, right = (path(build, lambda x: gradient(0, x)) for build in ALONE[row])
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def eager_shares(rank: int, world: int) -> dict[str, Any]:
    """Eager with a plain outer step: what was applied, and what the shares say should have been."""
    own, sent = [], []

    def build(ps: Any) -> EagerDiLoCo:
        return EagerDiLoCo(sgd(ps), sync_every=H, outer_lr=1.0, outer_momentum=0.0, weights=1.0 + rank)

    p = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
    start = p.detach().clone()
    optimizer = build([p])
    rows = []
    for step in range(1, STEPS + 1):
        before = start if step <= H else anchor(optimizer, p)
        p.grad = gradient(rank, p.detach())
        after = p.detach() - LR * p.grad
        optimizer.step()
        if step % H == 0:
            mine = before - after
            table = [torch.zeros(5, dtype=torch.float64) for _ in range(world)]
            dist.all_gather(table, mine)
            share = torch.tensor([1.0 + r for r in range(world)], dtype=torch.float64)
            share /= share.sum()
            own.append(float(share[rank]) * mine)
            sent.append(sum(w * d for w, d in zip(share, table, strict=True)))
            rows.append((start - anchor(optimizer, p), sum(sent[:-1], torch.zeros_like(mine)) + own[-1]))
    return {"rows": rows}


def adam_every_step(rank: int, world: int) -> tuple[Tensor, Tensor]:
    every = {"params": 1, "exp_avg": 1, "exp_avg_sq": 1}
    ours = path(lambda ps: DESLOC(Adam(ps, lr=LR), sync_every=every), lambda x: gradient(rank, x))
    return ours[-1], path(lambda ps: Adam(ps, lr=LR), lambda x: mean_gradient(world, x))[-1]


class Muon64(Optimizer):
    """Muon with Nesterov momentum and five Newton-Schulz steps in the parameter's dtype; torch's own works in bf16."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            m.mul_(0.95).add_(p.grad, alpha=0.05)
            update = newton_schulz(0.05 * p.grad + 0.95 * m) * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.sub_(update, alpha=self.param_groups[0]["lr"])


def newton_schulz(matrix: Tensor) -> Tensor:
    z = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = z @ z.T
        z = 3.4445 * z + (-4.7750 * a + 2.0315 * a @ a) @ z
    return z


TARGETS = ([[0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, -1.0]])


def muloco(rank: int, world: int) -> list[Any]:
    w = torch.nn.Parameter(torch.eye(2, dtype=torch.float64))
    optimizer = DiLoCo(Muon64([w], lr=0.1), sync_every=2, outer_lr=0.7, outer_momentum=0.6)
    found = []
    for step in range(4):
        w.grad = w.detach() - torch.tensor(TARGETS[rank % 2], dtype=torch.float64)
        optimizer.step()
        if step % 2:
            found.append(w.tolist())
    return found


def muloco_of_a_model(rank: int, world: int) -> Any:
    """Muon for the matrices, AdamW for the rest, 4-bit messages with decayed feedback: runs, agrees, learns."""
    if not hasattr(torch.optim, "Muon"):
        return None
    from lowcomm.compress import Int4

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    inners = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    options: dict[str, Any] = {"sync_every": 5, "outer_lr": 0.7, "outer_momentum": 0.6}
    optimizer = DiLoCo(inners, compress=Int4(), feedback=EFDecay(beta=0.9), **options)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 8, generator=generator)
    losses = []
    for _ in range(30):
        loss = (model(x) - x[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


SPARSE = TopK(k=4, chunk=16, value="f32")


def sparseloco(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(anchor before the sync, parameters before it, anchor after it) of every round, in float32."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    optimizer = DiLoCo(
        SGD([p], lr=0.1), sync_every=2, outer_lr=0.9, outer_momentum=0.0, compress=SPARSE, feedback=EFDecay(beta=0.95)
    )
    rows = []
    for step in range(12):
        before = optimizer.state[p]["anchor"].clone() if step else p.detach().clone()
        p.grad = (p.detach() - (rank + 1.0)) * torch.linspace(0.5, 2.0, 40)
        local = p.detach() - 0.1 * p.grad
        optimizer.step()
        if step % 2:
            rows.append((before, local, optimizer.state[p]["anchor"].clone()))
    return rows


def full_density(rank: int, world: int) -> tuple[Tensor, Tensor]:
    def run(**options: Any) -> Tensor:
        p = torch.nn.Parameter(torch.linspace(-1, 1, 40))
        optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=2, outer_lr=0.9, outer_momentum=0.0, **options)
        for _ in range(8):
            p.grad = p.detach() - (rank + 1.0)
            optimizer.step()
        return p.detach()

    return run(compress=TopK(density=1.0, value="f32"), feedback=EFDecay(beta=0.5)), run()


def everything_between(rank: int, world: int) -> dict[str, Any]:
    return {
        "pairs": pairs(rank, world),
        "eager": eager_shares(rank, world),
        "adam": adam_every_step(rank, world),
        "muloco": muloco(rank, world),
        "muloco of a model": muloco_of_a_model(rank, world),
        "sparseloco": sparseloco(rank, world),
        "full density": full_density(rank, world),
    }


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(everything_between, request.param)


ROWS = (
    "DiLoCo nu=1 mu=0 is local SGD",
    "DiLoCo H=1 nu=1 mu=0 is synchronous SGD",
    "DiLoCo heavy ball is SlowMo",
    "Streaming with one fragment, no delay, alpha 0 is DiLoCo",
    "DES-LOC SGDM with all periods 1 is synchronous SGDM",
    "DES-LOC with all periods K is Local Adam",
    "MT-DAO with omega 1 is DES-LOC",
    "AutoLoCo with constant H and lr is DiLoCo",
    "QSR alpha=0 is a constant interval",
    "CO2 without gap and clip is delayed DiLoCo with a heavy ball",
)


@pytest.mark.parametrize("row", ROWS)
def test_between_workers(found: list[dict[str, Any]], row: str) -> None:
    assert set(found[0]["pairs"]) == set(ROWS)
    for one in found:
        for ours, theirs in zip(*one["pairs"][row], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_eager_has_applied_the_old_means_and_its_own_new_share(found: list[dict[str, Any]]) -> None:
    for one in found:
        for applied, expected in one["eager"]["rows"]:
            torch.testing.assert_close(applied, expected, rtol=1e-12, atol=1e-14)


def test_desloc_adam_with_all_periods_1_is_not_synchronous_adam(found: list[dict[str, Any]]) -> None:
    for one in found:
        ours, synchronous = one["adam"]
        assert float((ours - synchronous).abs().max()) > 1e-4


def test_newton_schulz() -> None:
    diagonal = newton_schulz(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)))
    assert diagonal.flatten().tolist() == pytest.approx([0.75303345, 0.0, 0.0, 1.13370622], abs=1e-8)
    square = newton_schulz(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    expected = [[-0.68066099, 0.82553961], [0.74129542, 0.25944003]]
    for row, wanted in zip(square.tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-8)


def test_muloco_is_diloco_with_muon(found: list[dict[str, Any]]) -> None:
    rounds = [
        [[1.086861378135787, 0.0390004640496053], [0.0390004640496053, 0.884187737483082]],
        [[1.1862665608760161, 0.0796352963047], [0.0796352963047, 0.7394020655097608]],
    ]
    for one in found:
        for ours, wanted in zip(one["muloco"], rounds, strict=True):
            for row, values in zip(ours, wanted, strict=True):
                assert row == pytest.approx(values, rel=1e-11, abs=1e-14)
        if one["muloco of a model"] is not None:
            losses, parameters = one["muloco of a model"]
            assert losses[-1] < 0.7 * losses[0]
            assert parameters == found[0]["muloco of a model"][1]


def test_sparseloco_is_diloco_with_topk_and_decayed_feedback(found: list[dict[str, Any]]) -> None:
    """E_i = beta E_i + (X - x_i); c_i = C(E_i); E_i = E_i - c_i; X = X - nu mean c_i."""
    residuals = [torch.zeros(40) for _ in found]
    body, decoded = torch.empty(SPARSE.nbytes(40), dtype=torch.uint8), torch.empty(40)
    for r in range(len(found[0]["sparseloco"])):
        total = torch.zeros(40)
        for i, one in enumerate(found):
            before, local, _ = one["sparseloco"][r]
            wanted = 0.95 * residuals[i] + (before - local)
            SPARSE.encode(wanted, body)
            SPARSE.decode(body, decoded)
            residuals[i] = wanted - decoded
            total += decoded
        expected = found[0]["sparseloco"][r][0] - 0.9 * total / len(found)
        for one in found:
            torch.testing.assert_close(one["sparseloco"][r][2], expected, rtol=1e-5, atol=1e-6)
    assert residuals[0].abs().max() > 0.01


def test_sparseloco_at_full_density_is_diloco_without_momentum(found: list[dict[str, Any]]) -> None:
    for one in found:
        sparse, dense = one["full density"]
        torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)
