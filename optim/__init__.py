"""Low-communication optimizers: drop-in torch.optim classes that synchronise now and then."""

from .co2 import CO2
from .diloco import DiLoCo
from .eager import EagerDiLoCo
from .engine import LowCommOptimizer
from .local_sgd import LocalSGD
from .schedules import Every, Schedule
from .sign_momentum import SignMomentum
from .slowmo import SlowMo
from .streaming import StreamingDiLoCo

__all__ = [
    "CO2",
    "DiLoCo",
    "EagerDiLoCo",
    "Every",
    "LocalSGD",
    "LowCommOptimizer",
    "Schedule",
    "SignMomentum",
    "SlowMo",
    "StreamingDiLoCo",
]
