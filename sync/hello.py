"""Agreement before every exchange: 64 bytes from each rank to each rank.

A hello says which exchange a rank is about to start: frame header (frames.py) up to the round, then

    offset  type  field
    12      u32   digest of a sample of the vector, in the first exchange of an AllReduce; otherwise 0
    16      u64   hash of the settings: codec, feedback, algorithm, reduction, dtype
    24      u64   the caller's check hash (hyper-parameters)
    32      u64   vector length
    40      f64   averaging weight
    48      u32   bucket
    52      u32   sequence number of the exchange
    56      u64   frame length

All ranks see the same N hellos, so all take the same decision, before anything large is sent.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
from torch import Tensor

from ..compress import HAS_INF, HAS_NAN
from .errors import Aborted, Disagreement, NonFinite, SyncError
from .frames import FAILED, MAGIC
from .peers import HELLO, VOTE, Peers

__all__ = ["HELLO_BYTES", "Hello"]

OPTIONAL = 0x1000  # this rank only answers the others: if all do, nothing is sent
SKIPPED = 0x2000  # this message builds on one that was skipped
UNABLE = FAILED  # this rank raised an error of its own while preparing
ABORTED = 0x8000  # this rank's earlier exchange of the bucket failed
_LAYOUT = struct.Struct("<IHHIIQQQdIIQ")
_ON_THE_WIRE = (
    *("magic", "codec", "flags", "round", "sample", "settings", "check", "elements"),
    *("weight", "bucket", "sequence", "frame_bytes"),
)
HELLO_BYTES = _LAYOUT.size
_SAMPLED = 4096  # elements that a digest looks at


@dataclass(frozen=True)
class Hello:
    """What one rank is about to exchange."""

    codec: int
    flags: int
    round: int
    settings: int
    check: int
    elements: int
    weight: float
    bucket: int
    sequence: int
    frame_bytes: int
    sample: int = 0
    magic: int = MAGIC

    def pack(self) -> bytes:
        """The 64 bytes."""
        values = {**vars(self), "round": self.round & 0xFFFFFFFF, "sequence": self.sequence & 0xFFFFFFFF}
        return _LAYOUT.pack(*(values[name] for name in _ON_THE_WIRE))

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Read 64 bytes."""
        values = dict(zip(_ON_THE_WIRE, _LAYOUT.unpack(data), strict=True))
        return cls(**values)


def hash64(text: str) -> int:
    """A 64-bit hash of a text, equal in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_digest(flat: Tensor) -> int:
    """32 bits about evenly spread elements of a vector: equal for equal vectors; 0 when all of them are zero."""
    sample = flat[:: flat.numel() // _SAMPLED + 1].cpu()
    return zlib.crc32(sample.numpy().tobytes()) or 1 if bool(sample.any()) else 0


def all_the_same(hellos: Sequence[Hello]) -> bool:
    """Whether all ranks, two or more, seem to offer the very same vector."""
    return len(hellos) > 1 and hellos[0].sample != 0 and len({hello.sample for hello in hellos}) == 1


def exchange_hellos(peers: Peers, mine: Hello) -> list[Hello]:
    """The hello of every rank.

    Raises:
        PeerFailure, PeerTimeout: naming the ranks whose hello did not come.
    """
    if peers.world_size == 1:
        return [mine]
    message = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8).to(peers.device)
    table = torch.empty(peers.world_size, HELLO_BYTES, dtype=torch.uint8, device=peers.device)
    messages = peers.all_gather(message, list(table), HELLO).finish()
    return [Hello.unpack(bytes(received.tolist())) for received in messages]


def exchange_votes(peers: Peers, succeeded: bool) -> list[bool]:
    """Whether each rank has come to the end of the exchange; 1 byte from each rank to each rank."""
    if peers.world_size == 1:
        return [succeeded]
    vote = torch.tensor([int(succeeded)], dtype=torch.uint8, device=peers.device)
    table = torch.empty(peers.world_size, 1, dtype=torch.uint8, device=peers.device)
    return [bool(slot.item()) for slot in peers.all_gather(vote, list(table), VOTE).finish()]


# What must agree, and what to call it in the message. `frame_bytes` and `weight` may differ.
_AGREED = {
    "magic": "protocol magic",
    "bucket": "bucket",
    "round": "round",
    "elements": "vector length",
    "codec": "codec id",
    "settings": "settings",
    "check": "check",
    "sequence": "number of exchanges so far",
}


def check_agreement(peers: Peers, hellos: Sequence[Hello], describe: Callable[[], dict[str, object]]) -> None:
    """Raise Disagreement on every rank when the hellos are not of one and the same exchange.

    Args:
        describe: names and values behind the hashes; called, and gathered from all ranks, only on a mismatch.
    """
    # A rank that only answers the others (it has finished) may have other hyper-parameters by now.
    voices = [hello for hello in hellos if not hello.flags & OPTIONAL]
    compared = {f.name: voices if f.name == "check" else hellos for f in fields(Hello) if f.name in _AGREED}
    differing = [name for name, ones in compared.items() if len({getattr(hello, name) for hello in ones}) > 1]
    if not differing:
        return
    if "magic" in differing:
        raise Disagreement(_AGREED["magic"], [hex(h.magic) for h in hellos])
    descriptions = peers.all_gather_object(describe())
    names = [name for description in descriptions for name in description]
    for name in dict.fromkeys(names):
        values = [description.get(name) for description in descriptions]
        if any(value != values[0] for value in values):
            raise Disagreement(name, values)
    name = min(differing, key=list(_AGREED).index)
    raise Disagreement(_AGREED[name], [getattr(h, name) for h in hellos])


def check_able(hellos: Sequence[Hello]) -> None:
    """Raise on every rank when some rank cannot take part, or when no rank contributes."""
    unable = [rank for rank, hello in enumerate(hellos) if hello.flags & UNABLE]
    if unable:
        raise Aborted(f"ranks {unable} raised an error while preparing their message; nothing was exchanged", unable)
    aborted = [rank for rank, hello in enumerate(hellos) if hello.flags & ABORTED]
    if aborted:
        raise Aborted(
            f"the message builds on an earlier exchange of this bucket that failed on ranks {aborted}; nothing was "
            f"exchanged",
            aborted,
        )
    if not any(hello.weight > 0 for hello in hellos) and not all(hello.flags & OPTIONAL for hello in hellos):
        raise SyncError("all ranks have weight 0, so there is nothing to average; give at least one a positive weight")


def combined_flags(hellos: Sequence[Hello]) -> int:
    """OR of the frame flags of all contributing ranks."""
    flags = 0
    for hello in hellos:
        if hello.weight > 0:
            flags |= hello.flags & 0xFF
    return flags


def nonfinite_error(hellos: Sequence[Hello]) -> NonFinite:
    """The error that names the ranks which offered NaN or infinity."""
    ranks = [rank for rank, h in enumerate(hellos) if h.weight > 0 and h.flags & (HAS_NAN | HAS_INF)]
    kinds = [name for bit, name in ((HAS_NAN, "NaN"), (HAS_INF, "infinity")) if combined_flags(hellos) & bit]
    return NonFinite(
        f"ranks {ranks} offered {' and '.join(kinds)}; nothing was committed. Look at the loss of those ranks, or drop "
        f'such rounds with nonfinite="skip"',
        ranks,
    )
