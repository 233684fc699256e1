"""`AllReduce`: average a flat vector over a process group, compressed, agreed upon and overlapped.

What ranks say to one another is in conversation.py, how vectors travel in one file for each algorithm. All ranks end
with the same bits; a failed exchange changes no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compress import EF14, Codec, Feedback
from .choice import choose
from .conversation import Conversation
from .dense import Dense
from .dispersion import STATISTICS_BYTES, add_statistics, norm
from .errors import SyncError
from .exchange import Algorithm, Buffers, Exchange, Stopwatch
from .groups import private_group, resolve_group
from .hello import HELLO_BYTES, Hello, exchange_votes, sample_digest
from .lane import lane_of
from .peers import Peers, network_error
from .plan import Plan, ring_bytes
from .receipt import Receipt
from .robust import Rule
from .shared import Shared, SharedTopK
from .states import States
from .streams import hand_over, side_stream
from .two_phase import TwoPhase
from .work import Work

__all__ = ["AllReduce", "Work"]

State = dict[str, Tensor]
_ALGORITHMS = ("auto", "all_gather", "two_phase", "linear", "union", "ring")
_REDUCTIONS = ("mean", "sum", "mean_contributors")
_POLICIES = ("raise", "skip", "use")
_CONNECTIONS = ("_lane", "_peers", "_algorithm", "_alternative", "_carriers", "_sequence", "rank", "world_size")
_NOT_PICKLED = ("_buffers", "_states", "_group", "_on_receipt", *_CONNECTIONS)


class AllReduce:
    """Reduce flat vectors over a process group.

    The result of round t is `mean_r C(x_r)` (or the sum), with C the codec and error feedback per bucket. With
    `codec=None` the vectors travel as they are, by the backend's own all-reduce.

    Args:
        process_group: a ProcessGroup, a 1-D DeviceMesh, or None: the default group where one is initialised, else this
            process alone.
        codec: what compresses the vectors, a `SharedTopK`, or None.
        feedback: None, "auto" (EF14 unless the codec is unbiased or None), or a Feedback.
        algorithm: "all_gather" (each rank sends its message to all; one lossy encoding), "two_phase" (each rank sums
            and re-encodes one slice; 2 / N of the bytes), "linear" (sums the bodies of linear codecs as floats),
            "union" (sums sparse vectors on the union of their supports), "ring" (encodes running sums: its error grows
            with the number of ranks), or "auto": linear for linear codecs; two phases for those that can be
            applied again, unless gathering takes less time; all-gather for all others.
        reduce: "mean", "sum", or "mean_contributors": every coordinate is divided by the number (or weight) of the
            ranks that sent a value other than zero there; or a robust rule, such as `Median()`.
        second_codec: codec of the second phase; None: the same.
        nonfinite: what all ranks do when any rank offers NaN or infinity. "raise": NonFinite everywhere; "skip": the
            round is dropped, the result is zero and the receipt says `skipped`; "use": go on (a codec encodes such
            elements as 0).
        confirm: end every exchange with one byte from each rank to each rank, so that an exchange that failed on any
            rank fails on all. Costs one round trip.
        statistics: fill in density, norms, cosine and dispersion of receipts. Costs a copy of each vector, some passes
            and 24 bytes from each rank to each rank.
        on_receipt: called with every receipt, once, by the first `wait` of its exchange; see `lowcomm.sync.to_csv` and
            others. Not part of pickles.
        latency, bandwidth: of the network, in seconds per message and bytes per second and rank (default 1 ms,
            1 Gbit/s): "auto" gathers vectors that are so small that a second step would cost more than its bytes save.

    Raises:
        ValueError: an unknown option, or one that does not fit the others.

    >>> allreduce = AllReduce()
    >>> work = allreduce.reduce(torch.tensor([1.0, 2.0]))
    >>> work.wait().world_size, work.result
    (1, tensor([1., 2.]))
    """

    def __init__(
        self,
        process_group: Any = None,
        codec: Codec | SharedTopK | None = None,
        feedback: Feedback | str | None = None,
        *,
        algorithm: str = "auto",
        reduce: str | Rule = "mean",
        second_codec: Codec | None = None,
        nonfinite: str = "raise",
        confirm: bool = True,
        statistics: bool = False,
        on_receipt: Callable[[Receipt], object] | None = None,
        latency: float = 1e-3,
        bandwidth: float = 125e6,
    ) -> None:
        _check_option("algorithm", algorithm, _ALGORITHMS)
        if not isinstance(reduce, Rule):
            _check_option("reduce", reduce, _REDUCTIONS)
        _check_option("nonfinite", nonfinite, _POLICIES)
        self._group: Any | None = resolve_group(process_group)
        self._codec, self._feedback = codec, _resolve_feedback(feedback, codec)
        self._second_codec = second_codec
        self._algorithm_option, self._reduce, self._nonfinite, self._confirm = algorithm, reduce, nonfinite, confirm
        self._statistics, self._on_receipt, self._link = statistics, on_receipt, (latency, bandwidth)
        self._conversation = Conversation(reduce, nonfinite, confirm, statistics)
        self._buffers = Buffers()
        self._states = States(self._feedback, self._buffers, self._chained())
        self._join(self._group)

    def connect(self, process_group: Any = None) -> None:
        """Give an unpickled object its process group: pickles carry settings and feedback states, no connections.

        Args:
            process_group: as in the constructor.
        """
        self._join(resolve_group(process_group))

    def _join(self, group: Any | None) -> None:
        self._group, self._sequence = group, 0
        self._lane = None if self._group is None else lane_of(self._group)
        self._peers = Peers(self._group)
        self.rank, self.world_size = self._peers.rank, self._peers.world_size
        options = (self._codec, self._second_codec, self._feedback, self._algorithm_option, self._reduce)
        self._algorithm, self._alternative = choose(*options, self._buffers, self.world_size)
        self._carriers: dict[int, Algorithm] = {}

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}
        return {**settings, "snapshot": self._states.snapshot()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        snapshot = state.pop("snapshot")
        self.__dict__.update(state)
        self._buffers, self._on_receipt = Buffers(), None
        self._states = States(self._feedback, self._buffers, self._chained())
        self._states.restore(snapshot)

    def __deepcopy__(self, memo: dict[int, Any]) -> AllReduce:
        """A copy on the same process group, with copies of the committed states; nothing of it is in flight."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(self.__getstate__())
        twin._on_receipt = self._on_receipt
        twin._join(self._group)
        return twin

    def _carrier(self, elements: int) -> Algorithm:
        """The algorithm for vectors of this length."""
        if self._alternative is None:
            return self._algorithm
        if elements not in self._carriers:
            self._carriers[elements] = min(
                (self._algorithm, self._alternative),
                key=lambda algorithm: algorithm.traffic(elements, self.world_size).seconds(*self._link),
            )
        return self._carriers[elements]

    def hello(self, exchange: Exchange) -> Hello:
        """For IslandAllReduce: what this rank says before the exchange."""
        return self._conversation.hello(exchange, self._carrier(exchange.elements))

    def description(self, exchange: Exchange) -> dict[str, object]:
        """For IslandAllReduce: names and values of everything that ranks must agree on."""
        return self._conversation.description(exchange, self._carrier(exchange.elements))

    def _chained(self) -> bool:
        """Whether exchanges of a bucket depend on one another."""
        remembers = isinstance(self._reduce, Rule) and self._reduce.stateful
        return self._feedback is not None or remembers or isinstance(self._codec, SharedTopK)

    def plan(self, elements: int) -> Plan:
        """What an exchange of `elements` numbers will send, and by which algorithm.

        >>> AllReduce().plan(1000).bytes_sent
        0
        """
        algorithm, others = self._carrier(elements), self.world_size - 1
        traffic = algorithm.traffic(elements, self.world_size)
        agreement = others * (HELLO_BYTES + int(self._confirm) + STATISTICS_BYTES * int(self._statistics))
        steps = traffic.steps + 1 + int(self._confirm) + int(self._statistics) if others else 0
        dense = ring_bytes(4 * elements, self.world_size)
        payload = traffic.payload_bytes if others else 0
        return Plan(algorithm.name, elements, self.world_size, payload + agreement, steps, dense)

    def start(
        self,
        flat: Tensor,
        *,
        bucket: int = 0,
        round: int = 0,
        weight: float = 1.0,
        check: int = 0,
        describe: Callable[[], dict[str, object]] | None = None,
        optional: bool = False,
        hold: bool = False,
        keep_own: bool = False,
        loss: float | None = None,
    ) -> Work:
        """Begin to reduce `flat` and return at once. All ranks start the same exchanges in the same order.

        The first call makes a private process group, which waits for all ranks once.

        Args:
            flat: (n,) float32, or float64 when there is no codec. Consumed: its memory now belongs to the exchange, and
                `Work.result` may live in it or elsewhere.
            bucket: which vector this is; the feedback state belongs to it. 0 <= bucket < 2^32.
            round: counter that all ranks agree on; also the codec's random step.
            weight: how much this rank counts, >= 0. A rank with weight 0 takes part, adds nothing and keeps its state.
            check: a 64-bit hash of whatever must be equal on all ranks.
            describe: the names and values behind `check`, called only when some rank's `check` differs.
            optional: this rank only answers the others. Its `check` is not compared; when all ranks are optional
                nothing is sent, the receipt's algorithm is "none" and there is no result.
            hold: leave the committed feedback state as it is until `Work.commit`, so that several exchanges can succeed
                or fail together.
            keep_own: keep this rank's own message as the others decode it, in `Work.own`.
            loss: of this rank, for the dispersion in receipts; used with statistics=True.

        Raises:
            ValueError: an argument that no rank could use.
        """
        exchange = self._exchange(flat, bucket, round, weight, optional, hold)
        exchange.check, exchange.describe, exchange.loss = check & (2**64 - 1), describe, loss
        self._prepare(exchange, keep_own)
        if self._lane is None:
            exchange.run()
            exchange.publish()
        elif self._use_group(exchange):
            self._lane.submit(exchange)
        return Work(exchange, self._states, self._on_receipt)

    def reduce(
        self,
        flat: Tensor,
        *,
        bucket: int = 0,
        round: int = 0,
        weight: float = 1.0,
        check: int = 0,
        describe: Callable[[], dict[str, object]] | None = None,
        optional: bool = False,
        hold: bool = False,
        loss: float | None = None,
    ) -> Work:
        """As `start` and `wait` in one, without the helper thread. Arguments and errors as there."""
        exchange = self._exchange(flat, bucket, round, weight, optional, hold)
        exchange.check, exchange.describe, exchange.loss = check & (2**64 - 1), describe, loss
        self._prepare(exchange)
        return self._run_here(exchange)

    def _run_here(self, exchange: Exchange) -> Work:
        work = Work(exchange, self._states, self._on_receipt)
        if self._lane is None:
            exchange.run()
            exchange.publish()
        elif not self._lane.run(exchange):
            self._lane.submit(exchange)
        work.wait()
        return work

    def exchange_slice(self, part: Tensor, whole: Exchange, weight: float, flags: int, error: Exception | None) -> Work:
        """For IslandAllReduce: reduce and hold a slice, on behalf of ranks that have agreed among themselves.

        Args:
            part: (m,) float32. Consumed.
            whole: the exchange it is a slice of.
            weight: of the island.
            flags: found in the whole vector.
            error: what keeps this rank from taking part; the others are told.
        """
        exchange = self._exchange(part, whole.bucket, whole.round, weight, optional=False, hold=True)
        exchange.check, exchange.describe = whole.check, whole.describe
        if error is None:
            self._prepare(exchange)
        else:
            exchange.error = error
        exchange.flags |= flags
        return self._run_here(exchange)

    def prepare_overlap(self, device: str) -> None:
        """Let the lane have its own group for tensors on `device`. All ranks of the group call it.

        Raises:
            SyncError, RuntimeError: some rank did not.
        """
        if self._lane is not None and device not in self._lane.groups:
            exchange_votes(self._peers, True)  # so that an absent rank is named
            self._lane.groups[device] = private_group(self._group, device)

    def _use_group(self, exchange: Exchange) -> bool:
        """Before an overlapped exchange. False: the lane got no group, and so the exchange failed."""
        try:
            self.prepare_overlap(exchange.flat.device.type)
        except RuntimeError as error:
            exchange.error = error if isinstance(error, SyncError) else network_error(error, ())
            self._states.drop(exchange)
            exchange.publish()
            return False
        return True

    def _current_peers(self, device: str) -> Peers:
        """In the lane: the peers to exchange with, on the private group where there is one."""
        group = None if self._lane is None else self._lane.groups.get(device)
        if group is not None and self._peers.group is not group:
            self._peers = Peers(group)
        return self._peers

    def _exchange(self, flat: Tensor, bucket: int, round: int, weight: float, optional: bool, hold: bool) -> Exchange:
        if "_peers" not in self.__dict__:
            raise RuntimeError("this object was unpickled and has no process group; call connect(process_group) first")
        self.check_arguments(flat, bucket, round, weight)
        receipt = Receipt(round, bucket, self._carrier(flat.numel()).name, flat.numel(), self.world_size)
        exchange = Exchange(flat, bucket, round, float(weight), self.rank, self._sequence, receipt)
        exchange.optional, exchange.hold, exchange.drive = optional, hold, self._drive
        exchange.sample = sample_digest(flat) if self._sequence == 0 and self.world_size > 1 else 0
        self._states.open(exchange)
        self._sequence += 1
        return exchange

    def _prepare(self, exchange: Exchange, keep_own: bool = False) -> None:
        with Stopwatch() as watch:
            try:
                algorithm = self._carrier(exchange.elements)
                exchange.original = exchange.flat.clone() if self._statistics else None
                algorithm.prepare(exchange)
                exchange.own = algorithm.own(exchange) if keep_own else None
                if self._statistics and not isinstance(algorithm, Shared):
                    exchange.message_norm = norm(algorithm.own(exchange))
                hand_over(exchange.flat)
            except Exception as error:
                # The other ranks wait for our hello: they get it, with the news that this rank is unable.
                exchange.error = error
        exchange.receipt.encode_ms = watch.ms

    def check_arguments(self, flat: Tensor, bucket: int, round: int, weight: float) -> None:
        """Raise ValueError for what no rank could use."""
        allowed = (torch.float32, torch.float64) if isinstance(self._algorithm, Dense) else (torch.float32,)
        if flat.dim() != 1 or flat.dtype not in allowed or not flat.is_contiguous():
            raise ValueError(
                f"flat must be a contiguous 1-D tensor of {' or '.join(map(str, allowed))} but is {flat.dtype} of "
                f"shape {tuple(flat.shape)}"
            )
        if not 0 <= bucket < 2**32 or round < 0:
            raise ValueError(f"need 0 <= bucket < 2**32 and round >= 0 but got bucket={bucket}, round={round}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight must be finite and >= 0 but is: {weight}")

    def _drive(self, exchange: Exchange) -> None:
        """Everything between `start` and the waiters, in the lane."""
        try:
            with side_stream(exchange.flat):
                self._states.relink(exchange)
                peers = self._current_peers(exchange.flat.device.type)
                self._conversation.hold(exchange, self._carrier(exchange.elements), peers)
                residual = (exchange.candidate or {}).get("residual")
                self._states.conclude(exchange)
                add_statistics(exchange, residual)
        except BaseException:
            self._states.drop(exchange)
            raise

    def owner_slice(self, elements: int) -> tuple[int, int]:
        """[start, stop) of the slice of a vector that this rank sums; (0, 0) unless the exchange has two phases."""
        algorithm = self._carrier(elements)
        return algorithm.partition(elements).bounds[self.rank] if isinstance(algorithm, TwoPhase) else (0, 0)

    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors that `state` has after the first exchange."""
        two_phase = isinstance(self._algorithm, TwoPhase)
        gathers = not two_phase or self._alternative is not None
        names = [] if self._feedback is None else list(self._feedback.init(0, torch.device("cpu")))
        if self._feedback is not None and two_phase:
            names.append("owner_residual")
        history = isinstance(self._codec, SharedTopK) and self._codec.support == "history"
        if history or (isinstance(self._reduce, Rule) and self._reduce.stateful):
            names += ["owner_previous"] * two_phase + ["previous"] * gathers
        return tuple(names)

    def state(self, bucket: int = 0) -> State:
        """A copy of the newest feedback state of a bucket: named flat tensors. Empty before the first exchange.

        That is the committed state or, where held exchanges have ended well, the one they will commit. "residual" and
        others of the feedback rule have the length of the vector; "owner_residual" and "owner_previous" (two-phase)
        have the length of `owner_slice`.
        """
        return self._states.copy(bucket)

    def load_state(self, bucket: int, state: State) -> None:
        """Replace the feedback state of a bucket by a copy of `state`, as `state()` returned it. {} starts afresh.

        Raises:
            RuntimeError: an exchange of the bucket is in flight.
        """
        self._states.load(bucket, state)


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed} but is: {value!r}")


def _resolve_feedback(feedback: Feedback | str | None, codec: Codec | SharedTopK | None) -> Feedback | None:
    if feedback == "auto":
        return None if codec is None or codec.unbiased else EF14()
    if isinstance(feedback, Feedback) and codec is None:
        raise ValueError(f"feedback corrects what a codec loses, but codec is None; remove {feedback!r}")
    if feedback is not None and not isinstance(feedback, Feedback):
        raise ValueError(f'feedback must be None, "auto" or a Feedback but is: {feedback!r}')
    return feedback
