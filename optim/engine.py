"""The engine under every low-communication optimizer.

A low-communication optimizer is an inner optimizer, plus what is synchronised (fragments of parameters, optimizer-state
tensors, module buffers), when (a schedule), how it is reduced (lowcomm.sync), what the reduced value does (an outer
rule) and how late it may arrive (a delay). A method's file states its choice of these; the engine does the rest, and
keeps the contract of torch.optim: one `step()`, checkpoints that resume bit for bit, schedulers, GradScaler, hooks.

One call of `step()`, at completed step t:

    inner step  ->  t += 1  ->  send what is due at t  ->  apply what is due at t

Every rank makes the same decisions from the same counters; the values that decide are in the parameter groups.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..compress import Codec, Feedback
from ..sync import Receipt, SyncError, Work, agree_on_tensors, gather_rows, resolve_group, send_to
from .fragment import Fragment
from .options import Buffers, Failure, Weights, check_inner, check_options, floating_and_other
from .outer import OuterRule
from .schedules import Every, Schedule
from .state import Arrived, FlatState, InFlight

__all__ = ["LowCommOptimizer"]

logger = logging.getLogger(__name__)

Closure = Callable[[], float] | None

# Bucket numbers by purpose; part of the message header, so that messages of different purposes never meet.
_STATE_BUCKET, _BUFFER_BUCKET, _COUNTER_BUCKET, _GRADIENT_BUCKET = 1 << 16, 1 << 17, 1 << 18, 1 << 19

_ALL_THE_SAME = (
    "all workers bring exactly the same progress to their first sync, so there is nothing to gain from it: either the "
    "model is (also) wrapped in DistributedDataParallel, as some trainers do by themselves, or all workers read the "
    "same data. Train the bare model, and give each worker data of its own."
)

_F = TypeVar("_F", bound=Callable[..., Any])


def not_compiled(function: _F) -> _F:
    """Keep torch.compile out: counters would be compiled in and recompile at every step."""
    return cast(_F, torch.compiler.disable(function))


class LowCommOptimizer(FlatState):
    """Base class of the family: wraps an inner optimizer (or several) and synchronises now and then.

    Use the classes of `lowcomm.optim`; this one holds what they share.

    Args:
        inner: a torch.optim.Optimizer, or a sequence of them that together hold the model's parameters (for example
            Muon for the matrices and AdamW for the rest). Parameter groups are shared with it, so a scheduler or a
            user who changes a group of the wrapper changes the inner optimizer too.
        sync_every: inner steps between syncs, or a schedule object (`lowcomm.optim.Schedule`).
        process_group: ProcessGroup, one-dimensional DeviceMesh, or None for the default group. Without
            torch.distributed initialised the world is this process.
        weights: weight of this worker in every mean: "uniform", a number, or a callable that returns the number when a
            sync starts (samples or tokens since the last one). Only ratios between workers matter.
        average_state: names of inner-optimizer state tensors that are averaged, in float32, whenever parameters are.
        warmup_steps: average gradients before each of the first `warmup_steps` inner steps, as data parallel does, and
            count sync periods from there.
        phase: sync when (t - warmup_steps) mod sync_every == phase.
        compress: codec of `lowcomm.compress` for what is sent about parameters, or None for full precision.
        feedback: error feedback for `compress`: "auto" (EF14 when the codec is biased), None, or a Feedback object.
        sync_buffers: a module or tensors. Floating-point buffers (BatchNorm statistics) are averaged, others taken from
            rank 0, whenever all parameters are synchronised.
        on_failure: what a failed exchange does. "raise": the error leaves `step()`, with anchor, momentum, residual and
            parameters as they were after the inner step. "skip": train on; the progress is part of the next exchange.
            "local": take the outer step with this worker's own pseudo-gradient. The receipt says what happened.
        offload: "cpu" keeps anchor and outer buffers in (pinned) host memory.
        init: at construction parameters are compared across workers. "broadcast" gives everybody those of rank 0 where
            they differ; "check" raises and names the first one that differs.
        statistics: fill in norms, cosine, dispersion over workers and more in receipts, at the cost of some passes.
    """

    _loss: float | None = None
    _step_supports_amp_scaling: ClassVar[bool] = True  # GradScaler then always calls step(), so ranks never lose count

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule,
        rule: OuterRule | None,
        outer_defaults: dict[str, Any] | None = None,
        process_group: Any = None,
        weights: Weights = "uniform",
        average_state: Sequence[str] = (),
        warmup_steps: int = 0,
        phase: int = 0,
        compress: Codec | None = None,
        feedback: Feedback | Literal["auto"] | None = "auto",
        sync_buffers: Buffers = None,
        on_failure: Failure = "raise",
        offload: Literal["cpu"] | None = None,
        init: Literal["broadcast", "check"] = "broadcast",
        statistics: bool = False,
    ):
        self._inners = check_inner(inner)
        check_options(sync_every, weights, average_state, warmup_steps, phase, compress, on_failure, offload, init)
        self._schedule = None if isinstance(sync_every, int) else sync_every
        self._rule = rule
        self._weights = weights
        self._average_state = tuple(average_state)
        self._warmup_steps = warmup_steps
        self._phase = phase
        self._codec = compress
        self._feedback = feedback
        self._buffers = floating_and_other(sync_buffers)
        self._on_failure = on_failure
        self._offload = offload
        self._statistics = statistics
        self._connect(process_group)
        self._reset_layout()
        self.last_sync: Receipt | None = None
        """Receipt of the latest sync, or None."""
        self.bytes_sent = 0
        """Payload bytes this worker has sent since construction, warm-up included."""
        self.num_syncs = 0
        """Parameter syncs since construction."""
        ours = {
            "sync_every": sync_every if isinstance(sync_every, int) else None,
            "warmup_steps": warmup_steps,
            "compress": "none" if compress is None else compress.config,
            **(outer_defaults or {}),
            "local_step": 0,
            "round": 0,
            "next_sync": 0,
            "last_send": [],
            "in_flight": [],
        }
        self._ours = tuple(ours)
        groups = [group for optimizer in self._inners for group in optimizer.param_groups]
        super().__init__(groups, {**self._inners[0].defaults, **ours})
        agree_on_tensors(self._named_parameters(self.param_groups), process_group=self._group, init=init)
        self._init = init

    # ---- the step ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One inner step, then whatever synchronisation is due.

        Args:
            closure: evaluates the model and returns the loss, as in torch.optim.
        """
        loss: float | None
        run_inner, closure, loss = self._before_inner(closure)
        if run_inner:
            if closure is not None:
                loss = self._inners[0].step(closure)
            else:
                for optimizer in self._inners:
                    optimizer.step()
        if self._statistics and loss is not None:
            self.report_loss(loss)
        self._after_inner()
        return loss

    @not_compiled
    def _before_inner(
        self, closure: Callable[[], float] | None
    ) -> tuple[bool, Callable[[], float] | None, float | None]:
        """Prepare the inner step: (run it?, closure to pass on, loss if the closure has already been called)."""
        self._counting = not self._is_materialisation()
        if not self._ready:
            self._lay_out()
        elif self._steps == 0 and self._counting:
            self._take_anchors()  # weights loaded since a checkpoint template was made
        loss = None
        warming = self._counting and self._steps < self._warmup_steps
        if closure is not None and (warming or len(self._inners) > 1):
            with torch.enable_grad():
                loss = closure()
            closure = None
        skip = self._unscale()
        self._own_gradients: list[Tensor | None] | None = None
        if warming:
            skip = self._average_gradients(skip)
        if self._early_events and self._counting and 0 < self._steps == self._next_event:
            self._run_events()
        if self._counting and self._next_event <= self._steps:
            self._plan()
        return not skip, closure, loss

    @not_compiled
    def _after_inner(self) -> None:
        if self._own_gradients is not None:
            for p, grad in zip(self._trainable(), self._own_gradients, strict=True):
                p.grad = grad
            self._own_gradients = None
        if not self._counting:
            return
        self._set_steps(self._steps + 1)
        if self._steps >= self._next_event and not self._early_events:
            self._run_events()

    def _is_materialisation(self) -> bool:
        """Whether this call only creates state: checkpoint helpers step once with lr 0 and zero gradients.

        They do so when the state is empty. A first step of a warm-up schedule has lr 0 too, but gradients.
        """
        if self._ready or any(float(group["lr"]) != 0.0 for group in self.param_groups if "lr" in group):
            return False
        gradients = [p.grad for p in self._trainable()]
        return all(grad is not None and not bool(grad.any()) for grad in gradients)

    def _unscale(self) -> bool:
        """GradScaler's part: unscale gradients in place; True when this rank found infinities and must not step."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            for p in self._trainable():
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))
        return found_inf is not None and bool(found_inf)

    # ---- planning and events -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Fix the step of the next send; runs right before the first inner step of a round."""
        first = self.param_groups[0]
        due = self._next_send(self._steps, float(first.get("lr", 0.0)))
        if due <= self._steps:
            raise ValueError(f"the next sync must be after step {self._steps} but the schedule gave: {due}")
        self._set_all("next_sync", due)
        self._wake_at_next_event()

    def _next_send(self, step: int, lr: float) -> int:
        """The step (> `step`) at which something is sent next."""
        schedule = self._schedule or Every(self.param_groups[0]["sync_every"], self._phase, self._warmup_steps)
        return schedule.next_sync(step, lr)

    def _due_fragments(self, step: int) -> list[Fragment]:
        """What is sent at `step`, a value that `_next_send` gave."""
        return self._fragments

    def _delay(self, fragment: Fragment) -> int:
        """Inner steps between sending a fragment and applying the result."""
        return 0

    def _run_events(self) -> None:
        """Send, then apply, what is due at the current step."""
        t = self._steps
        if t < self._warmup_steps:
            return
        if t == self._warmup_steps and t > 0:
            self._end_warmup()
        if self.param_groups[0]["next_sync"] == t:
            self._refresh_layout()
            self._after_send(self._send(self._due_fragments(t), t), t)
        self._finish([exchange for exchange in self._in_flight if exchange.due <= t])
        self._wake_at_next_event()

    def _send(self, fragments: list[Fragment], step: int, optional: bool = False) -> list[InFlight]:
        """Start the exchange of `fragments`, to be applied after their delay."""
        sent = []
        for fragment in fragments:
            message, labels = self._message(fragment), self._labels(self._next_round())
            keep = self._keeps_own
            work = self._reducer.start(message, bucket=fragment.bucket, optional=optional, keep_own=keep, **labels)
            fragment.last_send = step
            own = work.own if keep else None
            sent.append(InFlight(fragment, step + self._delay(fragment), work, own=own))
        self._in_flight += sent
        self._set_all("last_send", [fragment.last_send for fragment in self._fragments])
        return sent

    def _after_send(self, sent: list[InFlight], step: int) -> None:
        """What a method does once its messages are on the way."""

    def _message(self, fragment: Fragment) -> Tensor:
        """What this worker says about a fragment: its pseudo-gradient, or its values where there is no anchor."""
        buffer = fragment.take_message()
        return fragment.pack_values(buffer) if fragment.anchor is None else fragment.pack_delta(buffer)

    def _labels(self, round_: int) -> dict[str, Any]:
        return {
            "round": round_,
            "weight": self._weight(),
            "check": self._agreement_hash(),
            "describe": self._agreement,
            "hold": True,
            "loss": self._loss,
        }

    def _finish(self, due: list[InFlight]) -> bool:
        """Wait for exchanges and for what travels with them, then apply all; on a failure apply none."""
        self._in_flight = [exchange for exchange in self._in_flight if exchange not in due]
        works: list[Work | Arrived] = [exchange.work for exchange in due]
        try:
            receipts = [work.wait() for work in works]
            if any(receipt.identical for receipt in receipts):
                warnings.warn(_ALL_THE_SAME, stacklevel=2)
            others = self._send_others(*self._others_due(due, receipts))
            receipts += [work.wait() for _, work in others]
        except SyncError as error:
            for work in works:
                work.discard()
            return self._failed(due, error)
        for work in works:
            work.commit()
        self._before_apply(due)
        for exchange in due:
            if exchange.work.wait().algorithm != "none":  # an outer step with nothing would move by momentum alone
                self._apply(exchange)
        for fragment, work in others:
            fragment.write(work.result)
        if receipts:
            self._record(receipts)
        if self._rejoining and due:
            self._hand_over(self._donor, self._rejoining)
            if self._reducer.rank in self._rejoining:
                for fragment in self._fragments:
                    fragment.write(cast(Tensor, fragment.anchor))
            self._rejoining = []
        return bool(receipts)

    def _before_apply(self, due: list[InFlight]) -> None:
        """What a rule has to know of all results before the first is applied."""

    def _others_due(self, due: list[InFlight], receipts: list[Receipt]) -> tuple[Sequence[str], bool]:
        """(names of optimizer state to average now, whether module buffers are averaged now).

        Here both when every fragment has been exchanged.
        """
        full = len({exchange.fragment.bucket for exchange in due}) == len(self._fragments)
        full = full and any(receipt.algorithm != "none" for receipt in receipts)
        return (self._average_state, True) if full else ((), False)

    def _apply(self, exchange: InFlight) -> None:
        """What the result of an exchange does; not called when nobody had anything to say."""
        fragment, mean = exchange.fragment, exchange.work.result
        if self._rule is None or fragment.anchor is None:
            fragment.write(mean)
        else:
            fragment.apply(self._rule, mean, self.param_groups, self._merge(fragment))
        fragment.give_message(mean)

    def _merge(self, fragment: Fragment) -> float:
        """alpha: how much of the live value survives when a result is applied."""
        return 0.0

    def _failed(self, due: list[InFlight], error: SyncError) -> bool:
        if self._on_failure == "raise":
            raise error
        logger.warning("lowcomm: exchange %d failed (%s); policy: %s", self._round, error, self._on_failure)
        for exchange in due if self._on_failure == "local" else []:
            fragment = exchange.fragment
            if fragment.anchor is not None and self._rule is not None:
                own = fragment.pack_delta(fragment.take_message())
                fragment.apply(self._rule, own, self.param_groups, self._merge(fragment))
                fragment.give_message(own)
        self.last_sync = Receipt(
            self._round,
            due[0].fragment.bucket,
            "none",
            due[0].fragment.numel,
            self._reducer.world_size,
            failure=f"{self._on_failure}: {error}",
        )
        self._publish(self.last_sync)
        return False

    def _record(self, receipts: list[Receipt]) -> None:
        self.last_sync = Receipt.combined(receipts)
        self.bytes_sent += self.last_sync.bytes_sent
        self.num_syncs += any(receipt.algorithm != "none" for receipt in receipts)
        logger.info("lowcomm: %s", self.last_sync)
        self._publish(self.last_sync)

    def register_sync_hook(self, hook: Callable[[Receipt], object]) -> RemovableHandle:
        """Call `hook` with the receipt after every sync; see `lowcomm.sync.to_csv` and others. Copies lose it.

        Returns:
            A handle; its `remove()` takes the hook away.
        """
        hooks = self.__dict__.setdefault("_optimizer_sync_hooks", OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _publish(self, receipt: Receipt) -> None:
        for hook in list(self.__dict__.get("_optimizer_sync_hooks", {}).values()):
            hook(receipt)

    def report_loss(self, loss: float | Tensor) -> None:
        """Tell this worker's loss, for its dispersion in receipts; calls of `step` with a closure do so themselves."""
        self._loss = float(loss)

    def _weight(self) -> float:
        if self._weights == "uniform":
            return 1.0
        weight = float(self._weights()) if callable(self._weights) else float(self._weights)
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"weights must be finite and not negative but is: {weight}")
        return weight

    # ---- warm-up: synchronous data parallel ----------------------------------------------------------------------

    def _average_gradients(self, skip: bool) -> bool:
        """Replace gradients by their weighted mean until the inner step is over; True when no rank may step."""
        scaled = getattr(self, "found_inf", None)  # under GradScaler infinities are ordinary; without it an error
        parameters = self._trainable()
        self._own_gradients = [p.grad for p in parameters]
        present = [torch.full((1,), float(p.grad is not None), dtype=p.dtype, device=p.device) for p in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        receipts = []
        for index, fragment in enumerate(self._fragments_of([*gradients, *present])):
            message = fragment.pack_values(fragment.take_message())
            if skip:
                message.fill_(math.nan)  # an infinity on one rank: everybody must see it and skip
            reduce = (self._dense if scaled is None else self._gradients).reduce
            work = reduce(message, bucket=_GRADIENT_BUCKET + index, round=self._steps, weight=self._weight())
            receipts.append(work.wait())
            skip = skip or not bool(torch.isfinite(work.result.sum()))
            fragment.write(work.result)
        for p, grad, somewhere in zip(parameters, gradients, present, strict=True):
            p.grad = grad if bool(somewhere) else None  # no worker uses it: weight decay must not touch it
        self.bytes_sent += sum(receipt.bytes_sent for receipt in receipts)
        return skip

    def _end_warmup(self) -> None:
        """Workers have stepped together: their parameters are the anchor of the first round."""
        self._take_anchors()
        for fragment in self._fragments:
            fragment.last_send = self._steps

    # ---- optimizer state and module buffers ----------------------------------------------------------------------

    def _send_others(self, names: Sequence[str], buffers: bool, optional: bool = False) -> list[tuple[Fragment, Work]]:
        """Start averaging what travels with the parameters: named optimizer state, module buffers."""
        floating, other = self._buffers if buffers else ([], [])
        weight = self._weight()
        parts = [(_BUFFER_BUCKET + i, part, weight) for i, part in enumerate(self._fragments_of(floating))]
        first_only = float(self._dense.rank == 0)  # counters cannot be averaged: everybody gets those of rank 0
        parts += [(_COUNTER_BUCKET + i, part, first_only) for i, part in enumerate(self._fragments_of(other))]
        for name in names:
            k = self._average_state.index(name)
            states = self._fragments_of(self._named_state(name))
            parts += [(_STATE_BUCKET + 256 * k + i, part, weight) for i, part in enumerate(states)]
        sent = []
        for bucket, part, share in parts:
            message = part.pack_values(part.take_message())
            work = self._dense.start(message, bucket=bucket, round=self._round, weight=share, optional=optional)
            sent.append((part, work))
        return sent

    def _named_state(self, name: str) -> list[Tensor]:
        """State tensor `name` of every parameter; where this worker has none yet, zeros that are thrown away later."""
        parameters = self._trainable()
        states = [self._inner_state(p).get(name) for p in parameters]
        known = sorted({key for p in parameters for key in self._inner_state(p)})
        if known and all(state is None for state in states):
            raise ValueError(f"average_state names {name!r}, but the inner optimizer keeps: {known}")
        return [torch.zeros_like(p) if s is None else s for p, s in zip(parameters, states, strict=True)]

    # ---- ending, evaluating --------------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """End a run or an epoch: every worker's outstanding progress is exchanged and all parameters agree.

        All workers call it. One that has run out of data earlier keeps answering the others' syncs, with no progress of
        its own, until all have called `flush`. A call with no inner step since the last sync changes nothing.
        """
        if not self._ready:
            self._lay_out()
        self._refresh_layout()
        while True:
            partial = self._partial_deltas()
            if self._roll_call():
                break
        self._settle_in_flight()
        self._exchange_partials(partial)

    def _settle_in_flight(self) -> None:
        """Apply everything in flight, in the order in which it was sent."""
        self._finish(self._in_flight)

    def _partial_deltas(self) -> dict[int, Tensor]:
        """By bucket, what this worker has to offer for every fragment that has made progress since it was last sent.

        Formed from the anchor the progress started from, so before any mean in flight is applied.
        """
        return {f.bucket: self._message(f) for f in self._fragments if self._has_progress(f)}

    def _has_progress(self, fragment: Fragment) -> bool:
        """Whether steps made since the fragment was last sent are still in its parameters once all has been applied."""
        if self._merge(fragment) > 0.0:
            since = fragment.last_send
        elif any(exchange.fragment is fragment for exchange in self._in_flight):
            return False
        else:
            since = fragment.last_send + self._delay(fragment)
        return self._steps > max(since, self._warmup_steps)

    def _roll_call(self) -> bool:
        """Take part in the next exchange without a further inner step; True once all workers have finished.

        A worker that has run out of data walks through the schedule without training, so it meets the others' messages
        in their order. When everybody has finished nothing is sent.
        """
        step = self.param_groups[0]["next_sync"]
        if step <= self._steps:
            step = self._next_send(self._steps, float(self.param_groups[0].get("lr", 0.0)))
        self._finish([exchange for exchange in self._in_flight if exchange.due < step])
        fragments = self._due_fragments(step)
        sends = {fragment.bucket: fragment.last_send for fragment in fragments}
        answers = self._send(fragments, step, optional=True)
        if answers[-1].work.wait().algorithm == "none":
            self._in_flight = [exchange for exchange in self._in_flight if exchange not in answers]
            for exchange in answers:
                exchange.work.discard()
                exchange.fragment.last_send = sends[exchange.fragment.bucket]
            return True
        self._set_steps(step)
        self._after_send(answers, step)
        self._finish([exchange for exchange in self._in_flight if exchange.due <= step])
        return False

    def _exchange_partials(self, partial: dict[int, Tensor]) -> None:
        """The last exchange: progress that some worker still has; then everybody holds the anchor."""
        sent = []
        for fragment in self._fragments:
            message = partial.get(fragment.bucket)
            if message is None:
                message = fragment.take_message().zero_() if fragment.anchor is not None else self._message(fragment)
            idle = fragment.bucket not in partial
            labels = self._labels(self._next_round())
            work = self._reducer.start(message, bucket=fragment.bucket, optional=idle, **labels)
            sent.append(InFlight(fragment, self._steps, work, partial=True))
        self._finish(sent)
        for fragment in self._fragments:
            fragment.last_send = self._steps
            if fragment.anchor is not None:
                fragment.write(fragment.anchor)
        self._set_all("last_send", [fragment.last_send for fragment in self._fragments])

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside the block the model has the anchor's weights, the ones all workers agree on; then its own again.

        Raises:
            RuntimeError: the method keeps no anchor and workers have stepped apart since the last sync.
        """
        apart = self._ready and self._steps > self._warmup_steps
        apart = apart and any(f.anchor is not None or self._steps > f.last_send for f in self._fragments)
        if apart and any(fragment.anchor is None for fragment in self._fragments):
            raise RuntimeError(
                f"{type(self).__name__} without compress keeps no anchor: between syncs there are no global weights; "
                "use it right after a sync, or call flush() first"
            )
        own = [p.detach().clone() for p in self._trainable()] if apart else []
        with torch.no_grad():
            for fragment in self._fragments if apart else []:
                assert fragment.anchor is not None
                fragment.write(fragment.anchor)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._trainable(), own, strict=False):
                    p.copy_(value)

    # ---- membership ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_process_group(self, process_group: Any, rejoin: Literal["contribute", "discard"] = "contribute") -> None:
        """Go on with another set of workers. All workers of the new group call it, between two steps.

        The workers that have seen the most rounds carry the group's anchor and outer state. One that has missed rounds
        and says "contribute" keeps training: its next message is all its progress since it last agreed with the group,
        and with that sync it takes over the group's anchor, outer state and counters. One that says "discard", or has
        missed more than one round, or is new, starts from the group's anchor at once. Feedback state starts afresh when
        the number of workers changes. Exchanges still in flight are dropped.

        Args:
            process_group: as at construction.
            rejoin: what this worker does with progress made while it was away.

        Raises:
            ValueError: an illegal argument, or this rank is not in the group.
            RuntimeError: the method has no common anchor to hand over.
        """
        if rejoin not in ("contribute", "discard"):
            raise ValueError(f"rejoin must be 'contribute' or 'discard' but is: {rejoin!r}")
        group = resolve_group(process_group)
        if not self._ready:
            self._lay_out()
        if any(fragment.anchor is None for fragment in self._fragments):
            raise RuntimeError(
                f"{type(self).__name__} without compress keeps no anchor to hand over; build a new optimizer on the "
                "group that is left: its workers then start from the weights of its rank 0"
            )
        feedback = {f.bucket: self._reducer.state(f.bucket) for f in self._fragments}
        before = self._reducer.world_size
        self._in_flight = []
        self._connect(group)
        if self._reducer.world_size == before:
            for bucket, state in feedback.items():
                self._reducer.load_state(bucket, state)
        self._meet(discard=rejoin == "discard")

    def _meet(self, discard: bool) -> None:
        """Find out who is behind; those who start afresh get the group's state now, the others at the next sync."""
        counters = torch.tensor([float(self._round), float(self._steps), float(discard)], dtype=torch.float64)
        table = gather_rows(counters, self._group)
        newest = max(row[0] for row in table)
        donor = next(rank for rank, row in enumerate(table) if row[0] == newest)
        behind = [rank for rank, row in enumerate(table) if row[0] < newest]
        rounds = len(self._fragments)
        fresh = [rank for rank in behind if table[rank][2] or table[rank][0] + rounds < newest]
        self._hand_over(donor, fresh)
        self._rejoining = [rank for rank in behind if rank not in fresh]
        self._donor = donor
        self._set_all("round", int(newest))
        if self._reducer.rank in fresh:
            for fragment in self._fragments:
                assert fragment.anchor is not None
                fragment.write(fragment.anchor)
        if self._reducer.rank in behind:
            self._set_steps(int(table[donor][1]))
        self._set_all("next_sync", 0)
        self._next_event = 0  # plan at the next step

    def _hand_over(self, donor: int, receivers: list[int]) -> None:
        """Copy anchor and outer buffers of rank `donor` to `receivers`."""
        for fragment in self._fragments if receivers else []:
            for flat in fragment.flats().values():
                self.bytes_sent += send_to(flat, donor, receivers, self._group)
