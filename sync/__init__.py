"""Compressed, ordered, agreed reductions on torch.distributed. Knows nothing of optimizers."""

from .allreduce import AllReduce, Work
from .errors import Aborted, CorruptFrame, Disagreement, NonFinite, PeerFailure, PeerTimeout, SyncError
from .fingerprint import agree_on_tensors, fingerprint
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
    "fingerprint",
    "resolve_group",
]
