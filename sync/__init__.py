"""Compressed, ordered, agreed reductions on torch.distributed. Knows nothing of optimizers."""

from .allreduce import AllReduce, Work
from .errors import Aborted, CorruptFrame, Disagreement, NonFinite, PeerFailure, PeerTimeout, SyncError
from .fingerprint import agree_on_tensors, fingerprint
from .groups import resolve_group
from .handover import gather_rows, send_to
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
    "gather_rows",
    "resolve_group",
    "send_to",
]
