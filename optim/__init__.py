"""Low-communication optimizers: drop-in torch.optim classes that synchronise now and then."""

from .diloco import DiLoCo
from .eager import EagerDiLoCo
from .engine import LowCommOptimizer
from .local_sgd import LocalSGD
from .schedules import Every, Schedule
from .streaming import StreamingDiLoCo

__all__ = ["DiLoCo", "EagerDiLoCo", "Every", "LocalSGD", "LowCommOptimizer", "Schedule", "StreamingDiLoCo"]
