"""Compressed, ordered, agreed reductions on torch.distributed. Knows nothing of optimizers."""

from .agreement import agree_on_tensors
from .allreduce import AllReduce, Work
from .errors import Aborted, CorruptFrame, Disagreement, NonFinite, PeerFailure, PeerTimeout, SyncError
from .groups import resolve_group
from .receipt import Receipt

__all__ = [
    "Aborted",
    "AllReduce",
    "CorruptFrame",
    "Disagreement",
    "NonFinite",
    "PeerFailure",
    "PeerTimeout",
    "Receipt",
    "SyncError",
    "Work",
    "agree_on_tensors",
    "resolve_group",
]
