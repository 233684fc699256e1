"""Compressed, ordered, agreed reductions on torch.distributed. Knows nothing of optimizers."""

from .allreduce import AllReduce
from .audit import Audit
from .ddp import DDPHook, ddp_hook
from .errors import Aborted, CorruptFrame, Disagreement, NonFinite, PeerFailure, PeerTimeout, SyncError
from .fingerprint import agree_on_tensors, fingerprint
from .fsdp import FSDPHook, fsdp_hook
from .groups import resolve_group
from .handover import gather_rows, send_to
from .islands import IslandAllReduce
from .loss_filter import LossFilter
from .plan import Plan
from .receipt import Receipt
from .reporters import to_csv, to_tensorboard, to_wandb
from .robust import (
    CenteredClipping,
    GeometricMedian,
    GradientAgreement,
    Krum,
    MajorityVote,
    Median,
    NormalizedMean,
    NormMedianClip,
    Rule,
    TrimmedMean,
)
from .shared import SharedTopK
from .work import Work

__all__ = [
    "Aborted",
    "AllReduce",
    "Audit",
    "CenteredClipping",
    "CorruptFrame",
    "DDPHook",
    "Disagreement",
    "FSDPHook",
    "GeometricMedian",
    "GradientAgreement",
    "IslandAllReduce",
    "Krum",
    "LossFilter",
    "MajorityVote",
    "Median",
    "NonFinite",
    "NormMedianClip",
    "NormalizedMean",
    "PeerFailure",
    "PeerTimeout",
    "Plan",
    "Receipt",
    "Rule",
    "SharedTopK",
    "SyncError",
    "TrimmedMean",
    "Work",
    "agree_on_tensors",
    "ddp_hook",
    "fingerprint",
    "fsdp_hook",
    "gather_rows",
    "resolve_group",
    "send_to",
    "to_csv",
    "to_tensorboard",
    "to_wandb",
]
