"""The frame header and its checks."""

import pytest
import torch
from lowcomm.sync.errors import CorruptFrame
from lowcomm.sync.frames import FrameHeader, frame_bytes, parse_frame, write_header
from lowcomm.sync.hello import HELLO_BYTES, Hello


def _frame(body: bytes, **changes: object) -> torch.Tensor:
    frame = torch.zeros(frame_bytes(len(body)), dtype=torch.uint8)
    write_header(frame, FrameHeader(**{"codec": 0x31, "flags": 2, "round": 7, "weight": 1.0, **changes}))
    frame[16 : 16 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return frame


def test_header_bytes() -> None:
    assert FrameHeader(49, 0, 7, 1.0).pack().hex() == "4c43503131000000070000000000803f"
    assert FrameHeader.parse(FrameHeader(65535, 65535, 2**32 + 5, 0.5).pack()) == FrameHeader(65535, 65535, 5, 0.5)


def test_frame_length_is_a_multiple_of_16_and_holds_the_body() -> None:
    for n in range(100):
        assert frame_bytes(n) % 16 == 0 and 0 <= frame_bytes(n) - 16 - n < 16


def test_a_good_frame_is_accepted() -> None:
    header, body = parse_frame(_frame(b"hello"), 5, codec=0x31, round=7, sender=3)
    assert header.flags == 2 and bytes(body.tolist()) == b"hello"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f[0].add_(1), "rank 3 is not one"),
        (lambda f: f[4].add_(1), "codec id 0x0032"),
        (lambda f: f[8].add_(1), "round 8"),
    ],
)
def test_wrong_magic_codec_or_round_is_rejected(change: object, message: str) -> None:
    frame = _frame(b"hello")
    change(frame)
    with pytest.raises(CorruptFrame, match=message) as caught:
        parse_frame(frame, 5, codec=0x31, round=7, sender=3)
    assert caught.value.rank == 3


@pytest.mark.parametrize("length", range(0, 21))
def test_a_truncated_frame_is_rejected(length: int) -> None:
    with pytest.raises(CorruptFrame, match=f"has {length} bytes but 21"):
        parse_frame(_frame(b"hello")[:length].clone(), 5, codec=0x31, round=7, sender=3)


def test_hello_is_64_bytes_and_survives_the_trip() -> None:
    hello = Hello(0x31, 18, 7, 2**63 + 1, 2**64 - 1, 10**12, 0.1, 5, 9, 10**10)
    assert HELLO_BYTES == 64 and len(hello.pack()) == 64
    assert Hello.unpack(hello.pack()) == hello
    assert hello.pack()[:4] == b"LCP1"
