"""A codec together with what comes before or after it, in one pass over memory where a CUDA kernel does that.

    decode_sum          out = (w_0 d_0 + w_1 d_1 + ...) / divisor, the messages d_r of all ranks in rank order
    decode_outer_step   an outer SGD step with that sum as pseudo-gradient
    encode_delta        d = anchor - live; encode decay * residual + d; keep what was not sent

Elsewhere the same steps run one after another, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from . import launches
from .codec import Codec, check_decode, check_encode, check_feedback
from .kernels import DTYPE_CODES

__all__ = ["decode_outer_step", "decode_sum", "encode_delta", "fuses"]


def fuses(codec: Codec, bodies: Sequence[Tensor], out: Tensor) -> bool:
    """Whether one kernel decodes and adds up these bodies: CUDA, at equal distances in memory."""
    if codec._seeded_decode or not launches.runs(codec, out, *bodies):
        return False
    addresses = [body.data_ptr() for body in bodies]
    return len({after - before for before, after in pairwise(addresses)}) <= 1


def decode_sum(
    codec: Codec, bodies: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None = None, divisor: float = 1.0
) -> None:
    """out = (w_0 d_0 + w_1 d_1 + ...) / divisor with d_r the decoded bodies; every operation rounded, in this order.

    Args:
        codec: one that needs neither step nor rank nor bucket to decode.
        bodies: one for each rank, (nbytes(n),) uint8 each.
        out: (n,) float32, overwritten.
        weights: w_r, one for each body. None: 1 for all.
        divisor: what the sum is divided by; 1.0 skips the division.

    Raises:
        ValueError: there is no body, or another number of weights, or a body is not one that the codec wrote.

    >>> from lowcomm.compress import Cast
    >>> codec, out = Cast("f32"), torch.empty(2)
    >>> bodies = [torch.tensor([1.0, 2.0]).view(torch.uint8), torch.tensor([3.0, 4.0]).view(torch.uint8)]
    >>> decode_sum(codec, bodies, out, divisor=2.0)
    >>> out
    tensor([2., 3.])
    """
    _check_messages(codec, bodies, out, weights)
    if fuses(codec, bodies, out):
        _launch(codec, bodies, weights, divisor, out, launches.Sink(out=out.data_ptr()))
        return
    for rank, body in enumerate(bodies):
        weight = 1.0 if weights is None else weights[rank]
        if rank:
            codec.decode_add(body, out, weight)
            continue
        codec.decode(body, out)
        if weight != 1.0:
            out.mul_(weight)
    if divisor != 1.0:
        out.div_(torch.full((), divisor, device=out.device))  # a number would become a rounded reciprocal on CUDA


def decode_outer_step(
    codec: Codec,
    bodies: Sequence[Tensor],
    anchor: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    momentum_factor: float = 0.0,
    nesterov: bool = False,
    weights: Sequence[float] | None = None,
    divisor: float = 1.0,
) -> None:
    """An outer SGD step on `anchor` with the sum of the messages, see `decode_sum`, as pseudo-gradient d.

        b = mu b + d        step = d + mu b (Nesterov) or b        x = x - lr step

    Args:
        codec, bodies, weights, divisor: as for `decode_sum`.
        anchor: x, (n,) float32, updated.
        momentum: b, (n,) float32, updated.
        lr: outer learning rate.
        momentum_factor: mu.
        nesterov: whether the step looks ahead.

    Raises:
        ValueError: as `decode_sum`.

    >>> from lowcomm.compress import Cast
    >>> x, b = torch.tensor([1.0]), torch.tensor([0.5])
    >>> body = torch.tensor([2.0]).view(torch.uint8)
    >>> decode_outer_step(Cast("f32"), [body], x, b, lr=0.1, momentum_factor=1.0)
    >>> x, b
    (tensor([0.7500]), tensor([2.5000]))
    """
    _check_messages(codec, bodies, anchor, weights)
    check_decode(codec, bodies[0], momentum)
    if fuses(codec, bodies, anchor) and launches.runs(codec, anchor, momentum):
        sink = launches.Sink(
            anchor=anchor.data_ptr(),
            momentum=momentum.data_ptr(),
            outer_lr=lr,
            outer_momentum=momentum_factor,
            nesterov=nesterov,
        )
        _launch(codec, bodies, weights, divisor, anchor, sink)
        return
    delta = torch.empty_like(anchor)
    decode_sum(codec, bodies, delta, weights, divisor)
    momentum.mul_(momentum_factor).add_(delta)
    step = delta + momentum_factor * momentum if nesterov else momentum
    anchor.sub_(lr * step)


def encode_delta(
    codec: Codec,
    anchor: Tensor,
    live: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    candidate: Tensor | None = None,
    *,
    decay: float = 1.0,
    step: int = 0,
    rank: int = 0,
    bucket: int = 0,
) -> int:
    """Encode the pseudo-gradient anchor - live, with error feedback where there is a residual.

    Args:
        anchor: (n,) float32.
        live: (n,) float32, bfloat16 or float16.
        out: (nbytes(n),) uint8, receives the body.
        residual, candidate, decay: as for `Codec.encode_feedback`. Both None: no feedback.
        step, rank, bucket: as for `Codec.encode`.

    Returns:
        Flags as `Codec.encode`.

    Raises:
        ValueError: tensors that do not fit, or a residual without a candidate.

    >>> from lowcomm.compress import Cast
    >>> body = torch.empty(8, dtype=torch.uint8)
    >>> encode_delta(Cast("f32"), torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), body)
    0
    >>> body.view(torch.float32)
    tensor([2., 0.])
    """
    check_encode(codec, live, out)
    if (residual is None) != (candidate is None) or anchor.dtype != torch.float32 or anchor.shape != live.shape:
        raise ValueError(
            f"the anchor must be float32 like the live values, {tuple(live.shape)}, but is {anchor.dtype} "
            f"{tuple(anchor.shape)}; residual and candidate go together"
        )
    state = [] if residual is None or candidate is None else [residual, candidate]
    if state:
        check_feedback(codec, anchor, state[0], state[1], out)
    if launches.runs(codec, live, anchor, out, *state):
        old, new = (tensor.data_ptr() for tensor in state) if state else (None, None)
        source = launches.Source(live.data_ptr(), DTYPE_CODES[live.dtype], anchor.data_ptr(), old, decay, new)
        return codec._launch_encode(launches.launcher(live), source, out, live.numel(), (step, rank, bucket))
    delta = anchor - live
    if not state:
        return codec.encode(delta, out, step=step, rank=rank, bucket=bucket)
    return codec.encode_feedback(delta, state[0], state[1], out, decay=decay, step=step, rank=rank, bucket=bucket)


def _check_messages(codec: Codec, bodies: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None) -> None:
    if not bodies or (weights is not None and len(weights) != len(bodies)):
        raise ValueError(
            f"there must be a body, and a weight for each of them, but there are {len(bodies)} bodies and "
            f"{None if weights is None else len(weights)} weights"
        )
    for body in bodies:
        check_decode(codec, body, out)


def _launch(
    codec: Codec,
    bodies: Sequence[Tensor],
    weights: Sequence[float] | None,
    divisor: float,
    out: Tensor,
    sink: launches.Sink,
) -> None:
    stride = bodies[1].data_ptr() - bodies[0].data_ptr() if len(bodies) > 1 else 0
    same = weights is None or len(set(weights)) == 1
    factor = 1.0 if weights is None or not same else weights[0]
    table = None if same or weights is None else torch.tensor(weights, dtype=torch.float32, device=out.device)
    address = None if table is None else table.data_ptr()
    sink = sink._replace(stride=stride, ranks=len(bodies), weights=address, weight=factor, divisor=divisor)
    codec._launch_decode(launches.launcher(out), bodies[0], sink, out.numel())
