"""Gradient and delta compression: codecs, error feedback, CPU kernels. Knows nothing of process groups."""

from .cast import Cast
from .codebook import Codebook
from .codec import HAS_INF, HAS_NAN, SATURATED, Codec
from .container import Encoded, load_bodies, load_tensors, pack_tensors, save_bodies, save_tensors, unpack_tensors
from .dct import DCTTopK
from .delta import Delta, apply_delta, make_delta
from .dgc import DGC, warmup_density
from .e3m0 import E3M0
from .eden import Eden
from .feedback import (
    EF14,
    EF21,
    EF21SGDM,
    EControl,
    EFDecay,
    EMAFeedback,
    Feedback,
    average_state,
    econtrol_eta,
    handover_state,
    reinject,
    reset_state,
)
from .float8 import Float8
from .fused import decode_outer_step, decode_sum, encode_delta
from .gpu import late_flags
from .kernels import available_levels, kernel_level, set_kernel_level, use_kernel_level
from .policy import Mixed
from .powersgd import PowerIteration, PowerSGD, effective_rank, orthonormalize
from .qsgd import QSGD, NaturalCompression, NuQSGD
from .quantize import Int, Int2, Int4, Int8
from .randomk import RandomK
from .sign import Sign, StoSign, majority_vote
from .sketch import SRHT, CountSketch, fetchsgd_step
from .support import (
    decode_support,
    encode_support,
    energy_support,
    group_energy,
    history_support,
    leader_support,
)
from .ternary import Ternary
from .threshold import SampledTopK, Threshold
from .topk import TopK
from .zeropp import ZeroPlusPlus

__all__ = [
    "DGC",
    "E3M0",
    "EF14",
    "EF21",
    "EF21SGDM",
    "HAS_INF",
    "HAS_NAN",
    "QSGD",
    "SATURATED",
    "SRHT",
    "Cast",
    "Codebook",
    "Codec",
    "CountSketch",
    "DCTTopK",
    "Delta",
    "EControl",
    "EFDecay",
    "EMAFeedback",
    "Eden",
    "Encoded",
    "Feedback",
    "Float8",
    "Int",
    "Int2",
    "Int4",
    "Int8",
    "Mixed",
    "NaturalCompression",
    "NuQSGD",
    "PowerIteration",
    "PowerSGD",
    "RandomK",
    "SampledTopK",
    "Sign",
    "StoSign",
    "Ternary",
    "Threshold",
    "TopK",
    "ZeroPlusPlus",
    "apply_delta",
    "available_levels",
    "average_state",
    "decode_outer_step",
    "decode_sum",
    "decode_support",
    "econtrol_eta",
    "effective_rank",
    "encode_delta",
    "encode_support",
    "energy_support",
    "fetchsgd_step",
    "group_energy",
    "handover_state",
    "history_support",
    "kernel_level",
    "late_flags",
    "leader_support",
    "load_bodies",
    "load_tensors",
    "majority_vote",
    "make_delta",
    "orthonormalize",
    "pack_tensors",
    "reinject",
    "reset_state",
    "save_bodies",
    "save_tensors",
    "set_kernel_level",
    "unpack_tensors",
    "use_kernel_level",
    "warmup_density",
]
