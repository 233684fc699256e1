"""`lowcomm plan`: what a network of a given bandwidth does to synchronous and to low-communication training.

    lowcomm plan --parameters 1e9 --step-time 0.5 --workers 8 --bandwidth 1e8 --sync-every 100 500 --codec Int4

Everything is computed from byte counts, nothing is run:

    bytes     what one worker sends in one sync: gradients or deltas as they are in a ring all-reduce,
              codec bodies in frames otherwise, as `lowcomm.sync.AllReduce` sends them
    exchange  8 bytes / bandwidth + messages in a row * latency
    round     sync_every * step time, plus the part of the exchange that is not overlapped
    busy      sync_every * step time / round, the share of time that is spent on computing
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lowcomm.compress import Codec
from lowcomm.recipes.expressions import parse_call
from lowcomm.recipes.report import align, bits
from lowcomm.sync.frames import frame_bytes
from lowcomm.sync.hello import HELLO_BYTES
from lowcomm.sync.plan import Traffic
from lowcomm.sync.slices import Partition

__all__ = ["Network", "Plan", "main", "plan", "traffic"]

BANDWIDTHS = (1e8, 1e9, 1e10)  # bits per second
VOTE_BYTES = 1  # after the exchange every rank says whether it succeeded
ASSUMED_LINK = (1e-3, 125e6)  # seconds per message, bytes per second: AllReduce chooses its algorithm for it
TARGET = 0.95  # share of time that computing should take


@dataclass(frozen=True)
class Network:
    """Every worker's connection.

    Attributes:
        bandwidth: bits per second, in each direction at once.
        latency: seconds until a message arrives, beside its bytes.
    """

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One method on one network; seconds and bytes of one worker.

    Attributes:
        method: what is sent, and how often.
        bandwidth: bits per second.
        bytes_per_round: sent in one round.
        bytes_per_step: the same, per inner step.
        exchange_seconds: for one round.
        round_seconds: computing, and what is left of the exchange after overlapping.
        busy: share of the round that is computing.
        speedup: steps per second, relative to synchronous data parallel on the same network.
        bandwidth_needed: bits per second at which `busy` reaches the target; infinite where latency alone forbids it.
    """

    method: str
    bandwidth: float
    bytes_per_round: int
    bytes_per_step: float
    exchange_seconds: float
    round_seconds: float
    busy: float
    speedup: float
    bandwidth_needed: float


def traffic(parameters: int, workers: int, codec: Codec | None, element_bytes: int = 4) -> tuple[int, int]:
    """(bytes one worker sends in one exchange, messages that follow one another).

    Args:
        parameters: elements of the vector.
        workers: ranks that take part.
        codec: None for the elements as they are.
        element_bytes: of an element that is sent as it is.

    >>> traffic(1000, 2, None)
    (4000, 2)
    """
    others = workers - 1
    if codec is None:
        return 2 * others * parameters * element_bytes // workers, 2 * others
    gather = (others * frame_bytes(codec.nbytes(parameters)), 1)
    if workers <= 2 or not (codec.fixed_size and codec.requantizable):
        return gather
    two_phase = (2 * others * Partition(parameters, workers, codec.block).slot_bytes(codec), 2)
    return min(two_phase, gather, key=lambda sent: Traffic(*sent).seconds(*ASSUMED_LINK))


def plan(
    method: str,
    network: Network,
    sent: tuple[int, int],
    *,
    step_seconds: float,
    sync_every: int = 1,
    overlap: int = 0,
    target: float = TARGET,
    synchronous_step: float | None = None,
) -> Plan:
    """Time and bytes of one method.

    Args:
        method: its name.
        network: the connection of every worker.
        sent: what `traffic` returned.
        step_seconds: computing time of one inner step.
        sync_every: inner steps between two exchanges.
        overlap: inner steps during which an exchange may go on in the background.
        target: share of computing for `bandwidth_needed`.
        synchronous_step: seconds of one synchronous step on this network; None: this is the synchronous method.
    """
    num_bytes, messages = sent
    compute, hidden = sync_every * step_seconds, min(overlap, sync_every) * step_seconds
    exchange = 8 * num_bytes / network.bandwidth + messages * network.latency
    duration = compute + max(0.0, exchange - hidden)
    # exchange <= hidden + compute * (1 / target - 1) makes busy >= target
    allowed = hidden + compute * (1 / target - 1) - messages * network.latency
    return Plan(
        method=method,
        bandwidth=network.bandwidth,
        bytes_per_round=num_bytes,
        bytes_per_step=num_bytes / sync_every,
        exchange_seconds=exchange,
        round_seconds=duration,
        busy=compute / duration,
        speedup=1.0 if synchronous_step is None else synchronous_step * sync_every / duration,
        bandwidth_needed=8 * num_bytes / allowed if allowed > 0 else math.inf,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    check(options)
    codecs = [(name, parse_call(name, importlib.import_module("lowcomm.compress"))()) for name in options.codec]
    plans = [
        row for bandwidth in options.bandwidth for row in plans_at(Network(bandwidth, options.latency), options, codecs)
    ]
    print(table(plans, options.target))
    command = shlex.join(["lowcomm", "plan", *(argv or [])])
    print(
        json.dumps({"tool": "plan", "command": command, "settings": vars(options), "plans": [finite(p) for p in plans]})
    )
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="lowcomm plan",
        description="Compute bytes, time per round and utilisation for given parameters, network and methods.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--parameters", type=lambda text: int(float(text)), default=int(1e9), help="of the model: 1e9")
    add("--workers", type=int, default=2, help="data-parallel replicas")
    add("--step-time", type=float, default=1.0, help="computing time of one inner step, seconds")
    add("--bandwidth", type=float, nargs="+", default=list(BANDWIDTHS), help="of each worker, bits per second")
    add("--latency", type=float, default=0.0, help="of one message, seconds")
    add("--sync-every", type=int, nargs="+", default=[30, 100, 500], help="inner steps between syncs")
    add("--codec", action="append", default=[], help='of lowcomm.compress, beside float32 deltas: "Int4"')
    add("--overlap", type=int, default=0, help="inner steps that an exchange may overlap with")
    add("--gradient-bytes", type=int, default=4, help="of one gradient element in synchronous training")
    add("--target", type=float, default=TARGET, help="wanted share of computing time")
    return result


def check(options: argparse.Namespace) -> None:
    if min(options.parameters, options.workers, *options.sync_every, options.gradient_bytes) < 1:
        raise ValueError("--parameters, --workers, --sync-every and --gradient-bytes must be at least 1")
    if min(options.step_time, *options.bandwidth) <= 0 or min(options.latency, options.overlap) < 0:
        raise ValueError("--step-time and --bandwidth must be above 0, --latency and --overlap at least 0")
    if not 0 < options.target < 1:
        raise ValueError(f"--target must lie between 0 and 1 but is {options.target}")


def plans_at(network: Network, options: argparse.Namespace, codecs: Sequence[tuple[str, Codec]]) -> list[Plan]:
    """Synchronous data parallel, then every combination of codec and interval."""
    n, workers = options.parameters, options.workers
    common = {"step_seconds": options.step_time, "target": options.target}
    gradients = traffic(n, workers, None, options.gradient_bytes)
    rows = [plan("synchronous", network, gradients, **common)]
    agreement = (HELLO_BYTES + VOTE_BYTES) * (workers - 1)
    for name, codec in [("float32", None), *codecs]:
        num_bytes, messages = traffic(n, workers, codec)
        rows += [
            plan(
                f"every {steps}, {name}",
                network,
                (num_bytes + agreement, messages + 2),
                sync_every=steps,
                overlap=options.overlap,
                synchronous_step=rows[0].round_seconds,
                **common,
            )
            for steps in options.sync_every
        ]
    return rows


def finite(row: Plan) -> dict[str, object]:
    """As a dictionary for JSON, which has no infinity."""
    return {key: None if value == math.inf else value for key, value in asdict(row).items()}


def table(plans: Sequence[Plan], target: float) -> str:
    head = ["bandwidth", "method", "MB/round", "MB/step", "exchange", "round", "busy", "speed-up", f"for {target:.0%}"]
    rows = [
        [
            bits(row.bandwidth),
            row.method,
            f"{row.bytes_per_round / 1e6:,.2f}",
            f"{row.bytes_per_step / 1e6:,.3f}",
            f"{row.exchange_seconds:,.2f} s",
            f"{row.round_seconds:,.2f} s",
            f"{row.busy:.1%}",
            f"{row.speedup:,.1f}x",
            bits(row.bandwidth_needed),
        ]
        for row in plans
    ]
    return align([head, *rows], left=2)
