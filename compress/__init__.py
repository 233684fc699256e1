"""Gradient and delta compression: codecs, error feedback, CPU kernels. Knows nothing of process groups."""

from .codec import HAS_INF, HAS_NAN, SATURATED, Codec
from .feedback import EF14, Feedback
from .kernels import available_levels, kernel_level, set_kernel_level, use_kernel_level

__all__ = [
    "EF14",
    "HAS_INF",
    "HAS_NAN",
    "SATURATED",
    "Codec",
    "Feedback",
    "available_levels",
    "kernel_level",
    "set_kernel_level",
    "use_kernel_level",
]
