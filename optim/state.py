"""Parameters, flat buffers and checkpoints of a low-communication optimizer.

The optimizer shares its parameter groups with the inner optimizer; each parameter's state nests the inner state beside
views of the flat buffers. Counters live in the groups. What is here keeps these in step with each other, when groups
are added or parameters frozen, and when state is saved, loaded, pickled or copied.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compress import Codec, Feedback
from ..sync import AllReduce, Receipt, Work, agree_on_tensors, resolve_group
from .fragment import Fragment, MessagePool, like_placement, local_tensor
from .outer import OuterRule

__all__ = ["Arrived", "FlatState", "InFlight"]

# Counters and settings kept in every parameter group, so that checkpoints carry them.
COUNTERS = ("local_step", "round", "next_sync", "last_send", "in_flight")
_NOT_COMPARED = ("params", "param_names", *COUNTERS)
_UNFROZEN_BUCKET = 1 << 22  # of messages about parameters that were frozen before


@dataclass
class InFlight:
    """An exchange that has been sent and not yet applied."""

    fragment: Fragment
    due: int  # step at which it is applied
    work: Work | Arrived
    partial: bool = False  # the last exchange of a flush
    own: Tensor | None = None  # this worker's message as others decode it, for methods that need it


@dataclass
class Arrived:
    """What is left of an exchange in a checkpoint: its result."""

    result: Tensor
    receipt: Receipt

    def wait(self) -> Receipt:
        return self.receipt

    def commit(self) -> None: ...

    def discard(self) -> None: ...


class FlatState(Optimizer):
    """The part of `LowCommOptimizer` that keeps groups, flat buffers and state; made by its constructor."""

    _reducer: AllReduce  # of what is said about parameters
    _dense: AllReduce  # of everything else, uncompressed
    _rejoining: list[int]  # ranks that get the group's state at the next sync
    _of_this_process: ClassVar[tuple[str, ...]] = ("_group",)  # deep copies share them, pickles go without
    _fragments: list[Fragment]
    _in_flight: list[InFlight]
    _ready: bool  # flat buffers exist and `self.state` shows them
    _counting: bool  # the present step() is a real one
    _steps: int  # completed inner steps; equals "local_step" of every group
    _early_events: bool = False  # what is due after step t happens at the beginning of the next call of step()
    _keeps_own: bool = False  # InFlight.own is wanted, and kept in checkpoints
    _next_event: int  # step at which something is to be sent or applied
    _inners: list[Optimizer]
    _rule: OuterRule | None
    _codec: Codec | None
    _feedback: Feedback | Literal["auto"] | None
    _statistics: bool
    _offload: Literal["cpu"] | None
    _init: Literal["broadcast", "check"]
    _ours: tuple[str, ...]  # group keys of this optimizer
    _group: Any  # ProcessGroup, or None for a world of one
    _gradients: AllReduce  # of gradients in the warm-up, where infinities are ordinary
    _donor: int  # rank that hands its state to those rejoining
    bytes_sent: int

    # ---- groups, layout ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, to the (last) inner optimizer as well; counters continue, new parameters get anchors.

        Raises:
            ValueError, TypeError: torch refuses the group, or workers differ in it and init="check".
            RuntimeError: an exchange is in flight that the new parameters would cut in two. Call flush() first.
        """
        known = any(param_group is group for optimizer in self._inners for group in optimizer.param_groups)
        if not known:
            self._inners[-1].add_param_group(param_group)
        running = bool(getattr(self, "param_groups", None))
        if running:
            for key in self._ours:
                param_group.setdefault(key, copy.copy(self.param_groups[0][key]))
        super().add_param_group(param_group)
        if known:
            self._check_codec_takes(param_group["params"])
            return
        try:
            self._check_codec_takes(param_group["params"])
            agree_on_tensors(self._named_parameters([param_group]), process_group=self._group, init=self._init)
            if self._ready:
                self._lay_out()
        except Exception:
            self.param_groups.pop()
            self._inners[-1].param_groups.pop()
            self._partition()
            raise

    def _check_codec_takes(self, parameters: Sequence[Tensor]) -> None:
        if self._codec is not None and any(p.dtype == torch.float64 for p in parameters):
            raise ValueError("compress takes parameters of float32 and narrower but one is float64; use compress=None")

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _named_parameters(self, groups: Iterable[dict[str, Any]]) -> list[tuple[str, Tensor]]:
        named = []
        for i, group in enumerate(groups):
            names = group.get("param_names") or [f"group {i} parameter {k}" for k in range(len(group["params"]))]
            named += [(str(name), p) for name, p in zip(names, group["params"], strict=True)]
        return named

    def _partition(self) -> list[list[tuple[Tensor, int]]]:
        """Parameters with their group index, split into fragments: here one for each device and dtype."""
        members: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, int]]] = defaultdict(list)
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.requires_grad:
                    members[p.device, p.dtype].append((p, index))
        return list(members.values())

    def _needs_anchor(self) -> bool:
        return self._rule is not None

    def _reset_layout(self) -> None:
        self._fragments = []
        self._in_flight = []
        self._ready = False
        self._counting = True
        self._steps = 0
        self._next_event = 0

    def _lay_out(self) -> None:
        """Build fragments for the present parameters; fill them from `self.state`, or from the parameters."""
        home = torch.device("cpu") if self._offload == "cpu" else None
        saved, partition = self._settled_state(), self._partition()
        if self._fragments:
            self._renumber([[p for p, _ in members] for members in partition])
        sends = self.param_groups[0]["last_send"]
        self._fragments, self._in_flight = [], []
        pool: MessagePool = {}
        for bucket, members in enumerate(partition):
            fragment = Fragment(bucket, [p for p, _ in members], [g for _, g in members], home, pool)
            fragment.last_send = sends[bucket] if bucket < len(sends) else self._steps
            if self._needs_anchor():
                fragment.take_anchor()
                fragment.buffers = {name: fragment.new_buffer() for name in self._buffer_names()}
            self._fragments.append(fragment)
            self._restore(fragment, saved)
        self._restore_in_flight(saved)
        self._ready = True
        self._show_counters()
        for fragment in self._fragments:
            self._bind(fragment)

    def _renumber(self, partition: list[list[Tensor]]) -> None:
        """Let what is kept by bucket number follow the parameters to the buckets of a new partition.

        Raises:
            RuntimeError: an exchange is in flight whose parameters would not be a fragment of their own any more.
        """
        bucket_of = {id(p): bucket for bucket, members in enumerate(partition) for p in members}
        places = [{bucket_of[id(p)] for p in f.tensors if id(p) in bucket_of} for f in self._fragments]
        for exchange in self._in_flight:
            mine = places[exchange.fragment.bucket]
            if len(mine) > 1 or sum(bool(mine & place) for place in places) > 1:
                raise RuntimeError(
                    "parameters that were added, frozen or unfrozen move others to another fragment while an exchange "
                    "is in flight; call flush() on all workers before the change"
                )
        flying = [(min(places[x.fragment.bucket]), x.due) for x in self._in_flight if places[x.fragment.bucket]]
        self._set_all("in_flight", [n for pair in flying for n in pair])
        sends = [self._steps] * len(partition)
        for fragment, place in zip(self._fragments, places, strict=True):
            for bucket in place:
                sends[bucket] = min(sends[bucket], fragment.last_send)
        self._set_all("last_send", sends)

    def _buffer_names(self) -> tuple[str, ...]:
        """Names of the flat float buffers of a fragment besides the anchor; kept in checkpoints."""
        return () if self._rule is None else self._rule.buffers

    def _slots(self) -> int:
        """Exchanges of one fragment that may be in flight when `step()` returns; each has its place in checkpoints."""
        return 0

    def _bind(self, fragment: Fragment) -> None:
        """Make `self.state` show the flat buffers by parameter.

        Residuals and results in flight change buffers at every exchange: what stands here for them are names, with
        values put in by `state_dict`.
        """
        blank = torch.zeros((), dtype=fragment.dtype, device=fragment.device)
        names = self._transient_names()
        for index, p in enumerate(fragment.tensors):
            entry: dict[str, Any] = {"inner": self._inner_state(p)}
            entry.update({name: fragment.view(flat, index) for name, flat in fragment.flats().items()})
            entry.update({name: blank.expand(local_tensor(p).shape) for name in names})
            self.state[p] = entry

    def _settled_state(self) -> dict[Tensor, dict[str, Any]]:
        """`self.state` with everything filled in: residuals, and results in flight once they have arrived."""
        filled = {p: dict(entry) for p, entry in self.state.items()}
        for fragment in self._fragments:
            arriving = [exchange for exchange in self._in_flight if exchange.fragment is fragment]
            for exchange in arriving:
                exchange.work.wait()
                exchange.work.commit()
            transient = self._reducer.state(fragment.bucket)  # with what the messages in flight have left out
            for k, exchange in enumerate(arriving):
                transient[f"in_flight_{k}"] = exchange.work.result
                if exchange.own is not None:
                    transient[f"own_{k}"] = exchange.own
            for name in self._transient_names():
                if name not in transient:  # nothing there yet: zeros of its own, into which a checkpoint can be read
                    transient[name] = self._zeros(fragment, name)
            for index, p in enumerate(fragment.tensors):
                filled[p]["inner"] = self._inner_state(p)
                for name, flat in transient.items():
                    filled[p][name] = self._part(fragment, index, name, flat)
        if self._fragments:  # otherwise this is a load, and the groups tell what was in flight
            self._show_counters()
        return filled

    def _transient_names(self) -> list[str]:
        """Names of state that changes buffers at every exchange."""
        names = [f"in_flight_{k}" for k in range(self._slots())]
        names += [f"own_{k}" for k in range(self._slots()) if self._keeps_own]
        return names + list(self._reducer.state_names())

    def _zeros(self, fragment: Fragment, name: str) -> Tensor:
        start, stop = self._reducer.owner_slice(fragment.numel) if name.startswith("owner_") else (0, fragment.numel)
        return torch.zeros(stop - start, dtype=fragment.dtype, device=fragment.device)

    def _part(self, fragment: Fragment, index: int, name: str, flat: Tensor) -> Tensor:
        """The part of a flat buffer that belongs to parameter `index`.

        An owner's residual covers a slice of the fragment: a parameter has the piece inside it, flat and maybe empty;
        a sharded parameter has it in its own shape, zero outside, so that it can be a DTensor.
        """
        if not name.startswith("owner_"):
            return fragment.view(flat, index)
        begin, end = fragment.offsets[index], fragment.offsets[index + 1]
        start, stop = self._reducer.owner_slice(fragment.numel)
        a, b = min(max(begin, start), end), max(min(end, stop), begin)
        piece = flat[a - start : max(a, b) - start]
        p = fragment.tensors[index]
        if not hasattr(p, "to_local"):
            return piece
        full = torch.zeros(end - begin, dtype=flat.dtype, device=flat.device)
        full[a - begin : max(a, b) - begin] = piece
        return like_placement(full.view(local_tensor(p).shape), p)

    def _restore(self, fragment: Fragment, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Copy per-parameter state into the flat buffers of a new fragment, and feedback state into the reducer."""
        for name, flat in fragment.flats().items():
            self._gather(fragment, saved, name, flat)
        feedback = {}
        for name in self._reducer.state_names():
            parts = [saved.get(p, {}).get(name) for p in fragment.tensors]
            if any(part is not None for part in parts):
                feedback[name] = self._joined(fragment, name, parts)
        if feedback:
            self._reducer.load_state(fragment.bucket, feedback)

    def _gather(self, fragment: Fragment, saved: dict[Tensor, dict[str, Any]], name: str, flat: Tensor) -> None:
        for index, p in enumerate(fragment.tensors):
            if name in saved.get(p, {}):
                part = flat[fragment.offsets[index] : fragment.offsets[index + 1]]
                part.copy_(local_tensor(saved[p][name]).reshape(-1))

    def _joined(self, fragment: Fragment, name: str, parts: Sequence[Tensor | None]) -> Tensor:
        """A flat feedback tensor put together from its parameters' parts; zeros for new parameters."""
        flats = []
        for index, part in enumerate(parts):
            length = fragment.offsets[index + 1] - fragment.offsets[index]
            absent = torch.zeros(0 if name.startswith("owner_") else length, device=fragment.device)
            flats.append(absent if part is None else local_tensor(part).reshape(-1).to(fragment.device))
        flat = torch.cat(flats)
        if name.startswith("owner_") and flat.numel() == fragment.numel:  # sharded parameters carry it in full
            start, stop = self._reducer.owner_slice(fragment.numel)
            flat = flat[start:stop]
        return flat

    def _restore_in_flight(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        pairs = [number for number in self.param_groups[0].get("in_flight", []) if number >= 0]
        slots: dict[int, int] = defaultdict(int)
        for bucket, due in zip(pairs[::2], pairs[1::2], strict=True):
            fragment = self._fragments[bucket]
            result = fragment.take_message().zero_()
            self._gather(fragment, saved, f"in_flight_{slots[bucket]}", result)
            own = torch.zeros_like(result) if self._keeps_own else None
            if own is not None:
                self._gather(fragment, saved, f"own_{slots[bucket]}", own)
            slots[bucket] += 1
            receipt = Receipt(self._round, bucket, "restored", fragment.numel, self._reducer.world_size)
            self._in_flight.append(InFlight(fragment, due, Arrived(result, receipt), own=own))

    def _refresh_layout(self) -> None:
        """Lay out again if parameters were frozen or unfrozen since.

        Unfrozen ones have been trained apart without an anchor: they start from their mean.
        """
        if sum(len(optimizer.param_groups) for optimizer in self._inners) != len(self.param_groups):
            raise RuntimeError("a group was added to the inner optimizer; add it to the wrapper: add_param_group")
        laid_out = {id(p) for fragment in self._fragments for p in fragment.tensors}
        present = self._trainable()
        if laid_out == {id(p) for p in present}:
            return
        new = [p for p in present if id(p) not in laid_out]
        for index, part in enumerate(self._fragments_of(new) if self._needs_anchor() else []):
            message = part.pack_values(part.take_message())
            work = self._dense.reduce(message, bucket=_UNFROZEN_BUCKET + index, round=self._round)
            self.bytes_sent += work.wait().bytes_sent
            part.write(work.result)
        self._lay_out()

    def _take_anchors(self) -> None:
        for fragment in self._fragments:
            if fragment.anchor is not None:
                fragment.take_anchor()

    def _inner_state(self, p: Tensor) -> dict[str, Any]:
        for optimizer in self._inners:
            if any(p is q for group in optimizer.param_groups for q in group["params"]):
                state: dict[str, Any] = optimizer.state[p]
                return state
        raise RuntimeError("a parameter belongs to no inner optimizer")

    # ---- counters, agreement -------------------------------------------------------------------------------------

    @property
    def _round(self) -> int:
        return int(self.param_groups[0]["round"])

    def _next_round(self) -> int:
        self._set_all("round", self._round + 1)
        return self._round

    def _set_steps(self, step: int) -> None:
        self._steps = step
        self._set_all("local_step", step)

    def _set_all(self, key: str, value: float | list[int] | list[float]) -> None:
        for group in self.param_groups:
            group[key] = list(value) if isinstance(value, list) else value

    def _show_counters(self) -> None:
        """Put what fragments know into the groups, in lists of constant length that are never empty.

        Checkpoint helpers take lists apart, expect as many elements as a fresh optimizer has, and lose empty ones.
        """
        flying = [number for x in self._in_flight for number in (x.fragment.bucket, x.due)]
        length = 2 * max(1, self._slots() * len(self._fragments))
        self._set_all("in_flight", flying + [-1] * (length - len(flying)))
        self._set_all("last_send", [fragment.last_send for fragment in self._fragments])

    def _agreement(self) -> dict[str, object]:
        """The settings that all workers must share, by name."""
        settings: dict[str, object] = {"method": type(self).__name__, "feedback": str(self._feedback)}
        for i, group in enumerate(self.param_groups):
            for key, value in group.items():
                if key in _NOT_COMPARED or not isinstance(value, (int, float, str, tuple, Tensor, type(None))):
                    continue
                settings[f"param_groups[{i}][{key!r}]"] = float(value) if isinstance(value, Tensor) else value
        return settings

    def _agreement_hash(self) -> int:
        text = repr(sorted(self._agreement().items(), key=lambda item: item[0]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _connect(self, process_group: Any) -> None:
        self._group = resolve_group(process_group)
        self._rejoining = []
        self._donor = 0
        self._reducer = AllReduce(self._group, self._codec, self._feedback, statistics=self._statistics)
        self._dense = AllReduce(self._group)
        self._gradients = AllReduce(self._group, nonfinite="use")

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim; never communicates. What it holds is this worker's own: save one file for each worker.

        Exchanges in flight are waited for, and their results saved together with the step at which they are due.
        """
        names, self.state = self.state, defaultdict(dict, self._settled_state())
        try:
            return super().state_dict()
        finally:
            self.state = names

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim, with every tensor's dtype and value kept as saved.

        Raises:
            ValueError: the state is of another model, method or codec. Nothing has been loaded then.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._check_loadable(state_dict)
        with _hooks_set_aside(self):
            super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, parameters, strict=True):
            if i in state_dict["state"]:
                # torch has cast every tensor to the parameter's dtype
                self.state[p] = _exact(state_dict["state"][i], self.state[p])
        self._relink()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        saved, groups = state_dict["state"], state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"loaded state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}")
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            if len(ours["params"]) != len(theirs["params"]):
                raise ValueError(
                    f"loaded group has {len(theirs['params'])} parameters, the optimizer's {len(ours['params'])}"
                )
            missing = [key for key in COUNTERS if key not in theirs]
            if missing:
                raise ValueError(f"loaded state is not of a {type(self).__name__}: its groups lack {missing}")
            if theirs.get("compress") != ours["compress"]:
                raise ValueError(
                    f"loaded state was made with compress={theirs.get('compress')!r}, the optimizer has "
                    f"{ours['compress']!r}; construct it with the same codec"
                )
            for i, p in zip(theirs["params"], ours["params"], strict=True):
                self._check_entry(saved.get(i, {}), p)

    def _check_entry(self, entry: dict[str, Any], p: Tensor) -> None:
        expected = set() if self._rule is None else {"anchor", *self._rule.buffers}
        allowed = {*self._transient_names(), *self._buffer_names()}
        if not entry:
            return
        if "inner" not in entry or not expected <= set(entry) or set(entry) - expected - {"inner"} - allowed:
            raise ValueError(
                f"loaded state is not of a {type(self).__name__}: an entry has {sorted(entry)}, "
                f"expected {sorted({'inner', *expected})}"
            )
        for name in expected:
            if entry[name].shape != p.shape:
                raise ValueError(
                    f"loaded {name} has shape {tuple(entry[name].shape)}, its parameter {tuple(p.shape)}: "
                    "the state is of another model or another parameter order"
                )

    def _relink(self) -> None:
        """Point inner optimizers at the loaded groups and state, and rebuild the flat buffers."""
        position = 0
        for optimizer in self._inners:
            count = len(optimizer.param_groups)
            optimizer.param_groups = self.param_groups[position : position + count]
            position += count
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.state = defaultdict(dict, {p: self.state[p]["inner"] for p in mine if p in self.state})
        self._reset_layout()
        first = self.param_groups[0]
        self._steps = first["local_step"]
        if self.state:
            self._lay_out()
        self._wake_at_next_event()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: everything but the process group, which cannot be pickled, and, as torch does, hooks.

        A scheduler hooks into `step` by an attribute of the instance: copied, it would step the original.
        """
        dropped = ("_reducer", "_dense", "_gradients", "_fragments", "_in_flight", "step", "_opt_called")
        kept = {k: v for k, v in self.__dict__.items() if k not in dropped and not k.startswith("_optimizer_")}
        for name in self._of_this_process:
            del kept[name]
        return {**kept, "state": self._settled_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state.pop("_group", None)
        super().__setstate__(state)
        if "_reducer" not in self.__dict__:  # unpickled or copied, not a load_state_dict
            self._connect(group)
            self._relink()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatState:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = copy.deepcopy(self.__getstate__(), memo)
        twin.__setstate__({**state, **{name: getattr(self, name) for name in self._of_this_process}})
        return twin

    def _wake_at_next_event(self) -> None:
        self._next_event = min([self.param_groups[0]["next_sync"], *(exchange.due for exchange in self._in_flight)])

    def _fragments_of(self, tensors: Sequence[Tensor], first_bucket: int = 0) -> list[Fragment]:
        """One fragment for each device and dtype, in the order of first appearance."""
        members: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            members[local_tensor(tensor).device, tensor.dtype].append(tensor)
        return [Fragment(first_bucket + i, part, [0] * len(part)) for i, part in enumerate(members.values())]


@contextmanager
def _hooks_set_aside(optimizer: Optimizer) -> Iterator[None]:
    """Without load_state_dict hooks: the caller runs them, around more than torch's own part of the load."""
    tables = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    hooks = {table: getattr(optimizer, table) for table in tables}
    optimizer.__dict__.update({table: OrderedDict() for table in tables})
    try:
        yield
    finally:
        optimizer.__dict__.update(hooks)


def _exact(source: Any, loaded: Any) -> Any:
    """`loaded` (where torch has placed it) with dtype and value of `source`, cloned."""
    if isinstance(source, dict):
        return {key: _exact(value, loaded[key]) for key, value in source.items()}
    if isinstance(source, Tensor) and isinstance(loaded, Tensor):
        return source.detach().to(loaded.device, copy=True)
    return copy.deepcopy(source)
