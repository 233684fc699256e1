"""Low-communication optimizers: drop-in torch.optim classes that synchronise now and then."""

from .autoloco import AutoLoCo
from .co2 import CO2
from .controller import RoundStatistics
from .desloc import DESLOC, half_life_periods
from .diloco import DiLoCo
from .eager import EagerDiLoCo
from .engine import LowCommOptimizer
from .fedavg import FedAvg
from .hierarchical import HierarchicalLocalSGD
from .local_sgd import LocalSGD
from .momenta import ADOPT, QuasiHyperbolic
from .mtdao import MTDAO
from .schedules import QSR, AtSteps, Every, Intervals, LateBudget, Schedule
from .sign_momentum import SignMomentum
from .slowmo import SlowMo
from .streaming import StreamingDiLoCo

__all__ = [
    "ADOPT",
    "CO2",
    "DESLOC",
    "MTDAO",
    "QSR",
    "AtSteps",
    "AutoLoCo",
    "DiLoCo",
    "EagerDiLoCo",
    "Every",
    "FedAvg",
    "HierarchicalLocalSGD",
    "Intervals",
    "LateBudget",
    "LocalSGD",
    "LowCommOptimizer",
    "QuasiHyperbolic",
    "RoundStatistics",
    "Schedule",
    "SignMomentum",
    "SlowMo",
    "StreamingDiLoCo",
    "half_life_periods",
]
