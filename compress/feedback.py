"""Error feedback: what compression left out of one message is added to the next.

A feedback object is immutable settings; its state is a dict of flat float32 tensors, held by whoever sends messages
(`lowcomm.sync.AllReduce`, one state per bucket). `encode` never changes the committed state: it returns a candidate,
which replaces the state only when the exchange succeeded and this rank was counted. Dropping the candidate undoes
everything, bit for bit. What a failed round does to the state depends on what happens to the local displacement x:

    counted                                       the candidate is committed
    not counted, x stays in the parameters        the candidate is dropped (x comes again with the next message)
    not counted, parameters go back to the anchor `discard`: x joins the state, so nothing is lost

In the formulas g is what the algorithm wants to send (a gradient, lr * gradient or a pseudo-gradient), C(.) what the
receivers decode, d the decoded message, e the residual, h the estimate of g that receivers hold, H the mean of all h.
A dense round is a round with a lossless codec (`Cast("f32")`): every rule then leaves e = 0 and h = g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .codec import HAS_INF, HAS_NAN, Codec

__all__ = [
    "EF14",
    "EF21",
    "EF21SGDM",
    "EControl",
    "EFDecay",
    "EMAFeedback",
    "Feedback",
    "average_state",
    "econtrol_eta",
    "handover_state",
    "reinject",
    "reset_state",
]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Feedback:
    """Base class of all error-feedback rules."""

    def init(self, n: int, device: torch.device) -> State:
        """The state before the first message: named (n,) float32 tensors."""
        raise NotImplementedError

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        """Encode `x` corrected by `state` into `out`; return (flags, candidate state).

        Args:
            x: (n,) float32. It is consumed: the candidate may live in its memory.
            state: the committed state. Not modified.
            out: (codec.nbytes(n),) uint8, receives the body.
            step: number of the round; the same on all ranks.
            rank: the sender.
            bucket: which flat vector this is.
        """
        raise NotImplementedError

    def aggregate(self, mean: Tensor, candidate: State) -> Tensor:
        """What the caller gets for the mean of the decoded messages. Runs once, when the exchange has succeeded.

        Args:
            mean: (n,) float32, the same on all ranks. May be overwritten.
            candidate: what `encode` returned, completed here before it is committed. A rank whose message was not
                counted passes a shallow copy of its committed state, and commits that.

        The tensors of the candidate may be changed in place, also those it shares with the committed state.
        """
        return mean

    def discard(self, x: Tensor, state: State) -> State:
        """The state after a round that failed while the displacement `x` was taken out of the parameters.

        Args:
            x: (n,) float32, what would have been encoded. Consumed.
            state: the committed state. Not modified.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _Residual(Feedback):
    """p = decay * e + x, send d = C(p), keep e = p - d."""

    @property
    def decay(self) -> float:
        return 1.0

    def init(self, n: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n, device=device)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        e = state["residual"]
        flags = codec.encode_feedback(x, e, x, out, decay=self.decay, step=step, rank=rank, bucket=bucket)
        return flags, {"residual": x}

    def discard(self, x: Tensor, state: State) -> State:
        e = state["residual"]
        x.add_(e if self.decay == 1.0 else e * self.decay)
        return {"residual": _finite_(x)}


@dataclass(frozen=True)
class EF14(_Residual):
    """Classic error feedback: p = e + g, send d = C(p), keep e = p - d.

    What was sent and what is still kept add up to what was put in: sum(d) + e = sum(g). For a codec with contraction
    delta and ||g|| <= G the residual is bounded, ||e|| <= G sqrt(1 - delta) / (1 - sqrt(1 - delta)).

    Do not combine it with an unbiased codec of large variance (omega > 1): it can diverge.

    Source: Seide et al. 2014; arXiv 1809.07599, 1901.09847.

    >>> from lowcomm.compress import TopK
    >>> codec, feedback = TopK(k=1, chunk=4, value="f32"), EF14()
    >>> state = feedback.init(4, torch.device("cpu"))
    >>> body = torch.empty(codec.nbytes(4), dtype=torch.uint8)
    >>> flags, state = feedback.encode(codec, torch.tensor([4.0, 2.0, -1.0, -1.0]), state, body)
    >>> state["residual"].tolist()
    [0.0, 2.0, -1.0, -1.0]
    """


@dataclass(frozen=True)
class EFDecay(_Residual):
    """Decayed error feedback (SparseLoCo): p = beta e + g, send d = C(p), keep e = p - d.

    The buffer acts as a local momentum for what is rarely sent:
    e_t + sum_s beta^(t-s) d_s = sum_s beta^(t-s) g_s. With beta = 1 it is EF14.

    Args:
        beta: decay in [0, 1]. Default 0.95 (SparseLoCo); DeMo and CCLoco use 0.999 on lr * gradient.

    Source: arXiv 2508.15706, 2603.08163; arXiv 2411.19870 for DeMo.
    """

    beta: float = 0.95

    def __post_init__(self) -> None:
        _check_unit("beta", self.beta)

    @property
    def decay(self) -> float:
        return self.beta


@dataclass(frozen=True)
class EMAFeedback(Feedback):
    """Moving-average error feedback (LoCo): p = g + e, send d = C(p), keep e = beta e + (1 - beta)(p - d).

    It forgets error on purpose, so sum(d) + e is not sum(g). The residual enters as zero in every round whose number
    is a multiple of `reset_every`.

    Args:
        beta: weight of the old residual in [0, 1]. Default 0.8.
        reset_every: rounds between resets. Default 1024; 0 never resets.

    Source: arXiv 2407.04480. Its code keeps the residual in 8 bits; here it is float32.
    """

    beta: float = 0.8
    reset_every: int = 1024

    def __post_init__(self) -> None:
        _check_unit("beta", self.beta)
        if self.reset_every < 0:
            raise ValueError(f"reset_every must be >= 0 rounds (0: never) but is: {self.reset_every}")

    def init(self, n: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n, device=device)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        e = state["residual"]
        if self.reset_every and step % self.reset_every == 0:
            e = torch.zeros_like(e)
        flags = codec.encode_feedback(x, e, x, out, step=step, rank=rank, bucket=bucket)
        return flags, {"residual": x.lerp_(e, self.beta)}

    def discard(self, x: Tensor, state: State) -> State:
        return {"residual": _finite_(x.add_(state["residual"]))}


@dataclass(frozen=True)
class EF21(Feedback):
    """EF21: every rank sends the compressed change of an estimate, d = C(g - h), h = h + d, and all add H = H + mean d.

    The caller gets H, the mean of all estimates, instead of the mean of the messages. It stands on exact (or very
    large batch) gradients; for noisy ones use `EF21SGDM`. Nothing moves in a round that fails: h must stay equal to
    what the receivers hold.

    Starts from h = H = 0. The dense start (h = g, H = mean g) is a first round with a lossless codec, or
    `start(g, mean)` when g was exchanged by other means.

    Args:
        weight: EF21-W: N times this rank's weight, N L_i / sum(L) with L_i its smoothness constant; the rank sends
            C(g / weight - h). Give the same number as `weight` to the exchange, so that messages are averaged with it.
            For codecs with C(a x) = a C(x) (top-k, sign, ternary) H is the same as without weights. Default 1.

    Source: arXiv 2106.05203; weights: arXiv 2402.10774.
    """

    weight: float = field(default=1.0, repr=False)  # not in the text by which ranks compare their settings

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    def init(self, n: int, device: torch.device) -> State:
        return {"estimate": torch.zeros(n, device=device), "aggregate": torch.zeros(n, device=device)}

    def start(self, g: Tensor, mean: Tensor) -> State:
        """The state after `g`, (n,) float32, was exchanged exactly and `mean` is its (weighted) mean over the ranks."""
        return {"estimate": g / self.weight, "aggregate": mean.clone()}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        change = _scaled_(x, self.weight).sub_(state["estimate"])
        flags = codec.encode(change, out, step=step, rank=rank, bucket=bucket)
        estimate = _advance(codec, state["estimate"], out, change, step, rank, bucket)
        return flags, {"estimate": estimate, "aggregate": state["aggregate"]}

    def aggregate(self, mean: Tensor, candidate: State) -> Tensor:
        return _add_aggregate(mean, candidate)

    def discard(self, x: Tensor, state: State) -> State:
        return dict(state)


@dataclass(frozen=True)
class EF21SGDM(Feedback):
    """EF21 on a momentum estimate: v = (1 - eta) v + eta g, d = C(v - h), h = h + d, H = H + mean d.

    The momentum removes EF21's need for exact gradients. The first message starts the momentum at v = g. With eta = 1
    it is EF21.

    Args:
        eta: momentum step in (0, 1]. Default 0.1.
        weight: as in `EF21`.

    Source: arXiv 2305.15155.
    """

    eta: float = 0.1
    weight: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        _check_weight(self.weight)
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta must be in (0, 1] but is: {self.eta}")

    def init(self, n: int, device: torch.device) -> State:
        zeros = EF21().init(n, device)
        return {"momentum": torch.zeros(n, device=device), **zeros}

    def start(self, g: Tensor, mean: Tensor) -> State:
        """The state after `g`, (n,) float32, was exchanged exactly and `mean` is its (weighted) mean over the ranks."""
        return {"momentum": g / self.weight, **EF21(self.weight).start(g, mean)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        momentum = self._momentum(_scaled_(x, self.weight), state["momentum"])
        change = momentum - state["estimate"]
        flags = codec.encode(change, out, step=step, rank=rank, bucket=bucket)
        if flags & (HAS_NAN | HAS_INF):
            momentum = torch.where(torch.isfinite(momentum), momentum, state["momentum"])
        estimate = _advance(codec, state["estimate"], out, change, step, rank, bucket)
        return flags, {"momentum": momentum, "estimate": estimate, "aggregate": state["aggregate"]}

    def _momentum(self, g: Tensor, v: Tensor) -> Tensor:
        # An all-zero v has seen no gradient yet: there v = g. Decided on the device, without waiting for it.
        return torch.lerp(v, g, torch.where(v.any(), self.eta, 1.0), out=g)

    def aggregate(self, mean: Tensor, candidate: State) -> Tensor:
        return _add_aggregate(mean, candidate)

    def discard(self, x: Tensor, state: State) -> State:
        return dict(state)


@dataclass(frozen=True)
class EControl(Feedback):
    """EControl: d = C(eta e + g - h), e = e + g - h - d, h = h + d, H = H + mean d.

    The residual e is the sum of g - h over all rounds, and comes back at the rate eta: eta = 0 is EF21. Needs neither
    large batches nor momentum. Starts from h = H = e = 0; dense start as in `EF21`.

    Args:
        eta: rate of the residual, >= 0. Default 0.001, of a public implementation. `econtrol_eta` gives the value of
            the theory, which is small for sparse codecs; try 0.001, 0.01, 0.1 and 1.

    Source: arXiv 2311.05645.
    """

    eta: float = 0.001

    def __post_init__(self) -> None:
        if not (self.eta >= 0 and math.isfinite(self.eta)):
            raise ValueError(f"eta must be >= 0 and finite but is: {self.eta}")

    def init(self, n: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n, device=device), **EF21().init(n, device)}

    def start(self, g: Tensor, mean: Tensor) -> State:
        """The state after `g`, (n,) float32, was exchanged exactly and `mean` is its mean over the ranks."""
        return {"residual": torch.zeros_like(g), **EF21().start(g, mean)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        e, h = state["residual"], state["estimate"]
        message = (e * self.eta).add_(x).sub_(h)
        flags = codec.encode(message, out, step=step, rank=rank, bucket=bucket)
        d = message
        codec.decode(out, d, step=step, rank=rank, bucket=bucket)
        residual = x.add_(e).sub_(h).sub_(d)
        if flags & (HAS_NAN | HAS_INF):
            _finite_(residual)
        return flags, {"residual": residual, "estimate": d.add_(h), "aggregate": state["aggregate"]}

    def aggregate(self, mean: Tensor, candidate: State) -> Tensor:
        return _add_aggregate(mean, candidate)

    def discard(self, x: Tensor, state: State) -> State:
        return dict(state)


def econtrol_eta(delta: float) -> float:
    """EControl's eta of the theory for a codec with contraction delta: delta / (3 sqrt(1-delta) (1 + sqrt(1-delta))).

    >>> round(econtrol_eta(1 / 64), 4)
    0.0026
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1) but is: {delta}")
    root = math.sqrt(1 - delta)
    return delta / (3 * root * (1 + root))


def reset_state(state: State) -> State:
    """Policy for a changed number of ranks or another partition: forget everything.

    After it, the rules with estimates (EF21, EF21SGDM, EControl) send their first message as from the beginning.
    """
    return {name: torch.zeros_like(value) for name, value in state.items()}


def average_state(state: State, average: Callable[[Tensor], Tensor]) -> State:
    """Policy for a changed number of ranks: every rank takes the mean of the old states.

    The mean of all residuals, which is the part of the signal not yet applied, is the same under any new number of
    ranks. Estimates become the aggregate, their mean, which every rank holds already.

    Args:
        state: committed state of this rank. Not modified.
        average: returns the mean of a tensor over the old ranks, bit-identical on all of them; it is called once for
            each residual or momentum, in sorted order of the names.
    """
    averaged = dict(state)
    for name in sorted(state):
        if name == "estimate":
            averaged[name] = state["aggregate"].clone()
        elif name != "aggregate":
            averaged[name] = average(state[name])
    return averaged


def handover_state(state: State, received: State | None, old_size: int, new_size: int) -> State:
    """Policy for ranks that leave gracefully: a survivor takes over the residual of a rank that goes.

    e = (e + e_received) * new_size / old_size on the survivor that received it, e * new_size / old_size on the
    others: the mean over the ranks stays what it was.

    Args:
        state: committed state of this rank. Not modified.
        received: state sent by the leaving rank, or None.
        old_size, new_size: ranks before and after.

    Raises:
        ValueError: the state has estimates. Their receivers hold their sum; use `average_state`.
    """
    if "estimate" in state:
        raise ValueError(
            "a state with estimates (EF21, EF21SGDM, EControl) cannot be handed over; use average_state or reset_state"
        )
    if not 0 < new_size <= old_size:
        raise ValueError(f"handover is for ranks that leave: 0 < new_size <= old_size, but {new_size} > {old_size}")
    scale = new_size / old_size
    total = state if received is None else {name: value + received[name] for name, value in state.items()}
    return {name: value * scale for name, value in total.items()}


def reinject(residual: Tensor, decoded: Tensor, factor: float) -> Tensor:
    """The residual after the receivers scaled this rank's message by `factor` in [0, 1]: e = p - factor * d.

    By default what a robust rule clips away is dropped (e = p - d), so that an outlier does not come back for ever.

    Args:
        residual: (n,) float32, candidate p - d.
        decoded: (n,) float32, d.
    """
    return residual + decoded * (1 - factor)


def _advance(
    codec: Codec, estimate: Tensor, body: Tensor, scratch: Tensor, step: int, rank: int, bucket: int
) -> Tensor:
    """h + decode(body), in the memory of `scratch`: what every receiver adds to its copy of h."""
    scratch.copy_(estimate)
    codec.decode_add(body, scratch, step=step, rank=rank, bucket=bucket)
    return scratch


def _add_aggregate(mean: Tensor, candidate: State) -> Tensor:
    # In place: a later message of the same vector, encoded before this exchange ended, shares this tensor.
    return mean.copy_(candidate["aggregate"].add_(mean))


def _scaled_(x: Tensor, weight: float) -> Tensor:
    return x if weight == 1.0 else x.div_(weight)


def _finite_(x: Tensor) -> Tensor:
    return x.masked_fill_(~torch.isfinite(x), 0.0)


def _check_unit(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1] but is: {value}")


def _check_weight(weight: float) -> None:
    if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight must be positive and finite but is: {weight}; it is N times this rank's share")
