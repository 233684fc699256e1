"""`fsdp_hook`: compressed gradient averaging between replicas of a model that FSDP2 shards inside each of them.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    fsdp_hook(model, Int8(), process_group=mesh["replicate"])

FSDP2 reduces gradients inside a replica as always; its all-reduce hook, which torch provides for this, then averages
every rank's shard with the same shard of the other replicas. The residual of error feedback has the length of the
shards. Needs a torch with `FSDPModule.set_all_reduce_hook` (2.7).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compress import Codec, Feedback
from .allreduce import AllReduce
from .receipt import Receipt
from .robust import Rule
from .shared import SharedTopK

__all__ = ["FSDPHook", "fsdp_hook"]


class FSDPHook:
    """The state of one `fsdp_hook`.

    Attributes:
        reducer: the AllReduce behind the hook.
        receipts: receipt of the last exchange of each sharded module, by its place in `model.modules()`.
    """

    def __init__(self, reducer: AllReduce) -> None:
        self.reducer = reducer
        self.receipts: dict[int, Receipt] = {}
        self._rounds: dict[int, int] = {}

    def reduce(self, index: int, gradient: Tensor) -> None:
        """Average a flat gradient shard in place."""
        round_ = self._rounds.get(index, 0)
        self._rounds[index] = round_ + 1
        flat = gradient.reshape(-1).to(torch.float32, copy=True)  # a copy: feedback keeps the memory it is given
        work = self.reducer.reduce(flat, bucket=index, round=round_)
        self.receipts[index] = work.wait()
        gradient.copy_(work.result.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        """Residuals and round counters of this rank; save one for each rank."""
        return {"rounds": dict(self._rounds), "states": {i: self.reducer.state(i) for i in self._rounds}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, on the same sharding."""
        self._rounds = dict(state_dict["rounds"])
        for index, state in state_dict["states"].items():
            self.reducer.load_state(index, state)


def fsdp_hook(
    model: nn.Module,
    codec: Codec | SharedTopK | None = None,
    feedback: Feedback | str | None = "auto",
    process_group: Any = None,
    *,
    algorithm: str = "auto",
    reduce: str | Rule = "mean",
    nonfinite: str = "use",
    confirm: bool = False,
) -> FSDPHook:
    """Average the gradients of all `fully_shard`-ed modules of `model` over `process_group`, with `codec`.

    Args:
        model: holds modules sharded on a one-dimensional mesh.
        codec: what compresses the gradients, or None.
        feedback: as in `AllReduce`. Default "auto".
        process_group: the group (or 1-D mesh) of this rank's replicas.
        algorithm, reduce, confirm: as in `AllReduce`; `confirm` is off, one round trip less for each module.
        nonfinite: "use" (default) hands NaN and infinity on where the codec can express them, so that a gradient
            scaler sees them; "raise" or "skip" (zero gradients) as in `AllReduce`.

    Returns:
        The state of the hook, with receipts, `state_dict` and `load_state_dict`.

    Raises:
        ValueError: the model has no sharded module.
        RuntimeError: this torch has no place for the hook.
    """
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    if not sharded:
        raise ValueError("model has no module that fully_shard was applied to; shard it first")
    if not all(hasattr(module, "set_all_reduce_hook") for module in sharded):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook; 2.7 or later has it")
    reducer = AllReduce(
        process_group, codec, feedback, algorithm=algorithm, reduce=reduce, nonfinite=nonfinite, confirm=confirm
    )
    state = FSDPHook(reducer)
    for index, module in enumerate(sharded):
        module.set_all_reduce_hook(partial(state.reduce, index))
    return state
