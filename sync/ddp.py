"""`ddp_hook`: compressed gradient averaging for `torch.nn.parallel.DistributedDataParallel`.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, ddp_hook(Int8()))

Buckets are exchanged while the backward pass goes on, in float32 whatever the dtype of the gradients. The residual of
error feedback belongs to the parameters: when DDP re-arranges its buckets, as it does after the first step, it moves
along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compress import Codec, Feedback
from .allreduce import AllReduce
from .robust import Rule
from .shared import SharedTopK
from .work import Work

__all__ = ["DDPHook", "ddp_hook"]

Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class DDPHook:
    """The state of one `ddp_hook`, reachable as `hook.state`.

    Attributes:
        reducer: the AllReduce behind the hook.
        receipts: receipt of the last finished exchange of each bucket, by bucket index.
    """

    def __init__(self, reducer: AllReduce) -> None:
        self.reducer = reducer
        self.receipts: dict[int, Any] = {}
        self._layouts: dict[int, list[Tensor]] = {}
        self._rounds: dict[int, int] = {}
        self._moved: dict[str, dict[Tensor, Tensor]] = {}
        self._pending: dict[int, Work] = {}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the exchange of a GradBucket."""
        index, buffer = bucket.index(), bucket.buffer()
        self._follow(index, list(bucket.parameters()))
        round_ = self._rounds.get(index, 0)
        self._rounds[index] = round_ + 1
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        # A copy: feedback keeps the memory of what it is given.
        flat = buffer.to(torch.float32, copy=True)
        work = self.reducer.start(flat, bucket=index, round=round_)
        self._pending[index] = work
        work.then(lambda: self._deliver(index, work, buffer, future))
        return future

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Residuals by name of parameter and round counters of this rank; save one for each rank.

        Args:
            module: the model, wrapped or not; the names are those of its `named_parameters`.
        """
        self._collect()
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        residuals = {kind: {names[p]: part.clone() for p, part in parts.items()} for kind, parts in self._moved.items()}
        return {"rounds": dict(self._rounds), "residuals": residuals}

    def load_state_dict(self, module: nn.Module, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`; residuals find their parameters by name, however DDP arranges its buckets."""
        parameters = dict(module.named_parameters())
        self._collect()
        self._rounds = dict(state_dict["rounds"])
        self._moved = {
            kind: {parameters[name]: part.to(parameters[name].device) for name, part in parts.items()}
            for kind, parts in state_dict["residuals"].items()
        }

    def _deliver(self, index: int, work: Work, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        try:
            self.receipts[index] = work.wait()
            future.set_result(buffer.copy_(work.result))
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates a result here

    def _follow(self, index: int, parameters: list[Tensor]) -> None:
        """Notice when DDP has re-arranged its buckets, and take the residuals along."""
        known = self._layouts.get(index)
        if known is not None:
            if [id(p) for p in known] == [id(p) for p in parameters]:
                return
            self._collect()
        self._layouts[index] = parameters
        if self._moved:
            self._assemble(index, parameters)

    def _collect(self) -> None:
        """Take all residuals apart by parameter; buckets of the old arrangement are forgotten."""
        for index, parameters in self._layouts.items():
            self._pending[index].wait()
            for name, flat in self.reducer.state(index).items():
                if not name.startswith("owner_"):  # an owner's slice starts afresh: it is another slice now
                    parts = flat.split([p.numel() for p in parameters])
                    self._moved.setdefault(name, {}).update(zip(parameters, parts, strict=True))
            self.reducer.load_state(index, {})
        self._layouts.clear()

    def _assemble(self, index: int, parameters: list[Tensor]) -> None:
        state = {}
        for name, parts in self._moved.items():
            blank = [torch.zeros(p.numel(), device=p.device) for p in parameters]
            state[name] = torch.cat([parts.pop(p, zero) for p, zero in zip(parameters, blank, strict=True)])
        self.reducer.load_state(index, state)


def ddp_hook(
    codec: Codec | SharedTopK | None = None,
    feedback: Feedback | str | None = "auto",
    process_group: Any = None,
    *,
    algorithm: str = "auto",
    reduce: str | Rule = "mean",
    nonfinite: str = "use",
    confirm: bool = False,
) -> Hook:
    """A communication hook that averages gradients with `codec`; for `register_comm_hook(None, hook)`.

    Args:
        codec: what compresses the gradients, or None.
        feedback: as in `AllReduce`. Default "auto".
        process_group: the group of the DDP model.
        algorithm, reduce, confirm: as in `AllReduce`; `confirm` is off, one round trip less for each bucket.
        nonfinite: "use" (default) hands NaN and infinity on where the codec can express them, so that a gradient
            scaler sees them; "raise" or "skip" (zero gradients) as in `AllReduce`.

    Returns:
        The hook. `hook.state` is its DDPHook, with the receipts.

    >>> hook = ddp_hook()
    >>> hook.state.reducer.world_size
    1
    """
    reducer = AllReduce(
        process_group, codec, feedback, algorithm=algorithm, reduce=reduce, nonfinite=nonfinite, confirm=confirm
    )
    state = DDPHook(reducer)

    def lowcomm_hook(_: Any, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and knows no strings
        return state.reduce(bucket)

    lowcomm_hook.state = state  # type: ignore[attr-defined]
    return lowcomm_hook
