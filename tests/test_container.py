"""The safetensors container: byte for byte, against the safetensors package, and against damaged files."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import Encoded, load_bodies, load_tensors, pack_tensors, save_bodies, save_tensors, unpack_tensors
from reference_codecs import Dense, KeepLargest

VECTOR: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())[
    "safetensors_example"
]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def build(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = {str(dtype): torch.randint(0, 256, (3, 8), generator=generator, dtype=torch.uint8) for dtype in DTYPES}
    tensors = {name: raw.view(getattr(torch, name.removeprefix("torch."))) for name, raw in bits.items()}
    tensors["torch.bool"] = torch.tensor([[True, False], [False, True]])
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(1.5), "view": torch.arange(12.0).view(3, 4).t()}
    return tensors


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def test_published_bytes() -> None:
    body = torch.tensor(list(bytes.fromhex(VECTOR["tail"])), dtype=torch.uint8)
    data = pack_tensors({"w": body}, {"lowcomm": "1", "codec": "int4_sym:B=8", "n": "8"})
    assert len(data) == VECTOR["total"]
    assert data[:8] == struct.pack("<Q", VECTOR["header_len"])
    assert data[8 : 8 + VECTOR["header_len"]].decode() == VECTOR["header"]
    assert data.endswith(bytes.fromhex(VECTOR["tail"]))


def test_round_trip_of_every_dtype(tmp_path: Path) -> None:
    tensors = samples()
    save_tensors(tmp_path / "all.safetensors", tensors, {"round": "7", "Gr\u00f6\u00dfe": "\u00a7"})
    read, metadata = load_tensors(tmp_path / "all.safetensors")
    assert metadata == {"round": "7", "Gr\u00f6\u00dfe": "\u00a7"}
    assert set(read) == set(tensors)
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["all.safetensors"]


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: value.contiguous() for name, value in samples().items()}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    save_tensors(ours, tensors, {"lowcomm": "1"})
    read = safetensors.load_file(ours)
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    safetensors.save_file(tensors, theirs, {"lowcomm": "1"})
    back, metadata = load_tensors(theirs)
    assert metadata == {"lowcomm": "1"}
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    save_tensors(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cannot store"):
        save_tensors(path, {"a": torch.ones(2, dtype=torch.complex64)})
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        save_tensors(path, {"a": torch.zeros(2)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


def test_bodies(tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    path = tmp_path / "round.safetensors"
    bodies = {"w": Encoded.of(KeepLargest(k=2), x), "b": Encoded.of(Dense(), x[0]), "s": Encoded.of(Dense(), x[0, 0])}
    save_bodies(path, bodies, {"round": "12", "unknown": "ignored"})
    read, metadata = load_bodies(path)
    assert metadata["lowcomm"] == "1" and metadata["codec:w"] == "keeplargest:k=2" and metadata["round"] == "12"
    for name, codec in (("w", KeepLargest(k=2)), ("b", Dense()), ("s", Dense())):
        assert read[name].shape == bodies[name].shape
        assert torch.equal(read[name].decode(codec), bodies[name].decode(codec))
    assert torch.equal(read["b"].decode(Dense()), x[0])
    with pytest.raises(ValueError, match="written by keeplargest:k=2 but is to be read by keeplargest:k=3"):
        read["w"].decode(KeepLargest(k=3))
    with pytest.raises(ValueError, match="belongs to the layout"):
        save_bodies(path, bodies, {"codec:w": "x"})


def test_equal_descriptions_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_bodies(path, {"w": Encoded.of(Dense(), torch.ones(2, 3))})
    _, metadata = load_bodies(path)
    assert metadata == {"lowcomm": "1", "codec": "dense:", "n": "6", "shape": "2,3"}


@pytest.mark.parametrize("version", ["2", "2.1", "", "x"])
def test_other_versions_are_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "v.safetensors"
    save_tensors(path, {"w": torch.zeros(4, dtype=torch.uint8)}, {"lowcomm": version, "codec": "c", "n": "1"})
    with pytest.raises(ValueError, match="layout version"):
        load_bodies(path)
    save_tensors(
        path, {"w": torch.zeros(4, dtype=torch.uint8)}, {"lowcomm": "1.9", "codec": "c", "n": "1", "shape": "1"}
    )
    assert load_bodies(path)[0]["w"].codec == "c"


@pytest.mark.parametrize(
    "metadata",
    [
        {"lowcomm": "1", "n": "4", "shape": "4"},
        {"lowcomm": "1", "codec": "c", "n": "4", "shape": "5"},
        {"lowcomm": "1", "codec": "c", "n": "4", "shape": "-2,-2"},
        {"lowcomm": "1", "codec": "c", "n": "4", "shape": "a"},
    ],
)
def test_incomplete_descriptions_are_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    save_tensors(tmp_path / "v", {"w": torch.zeros(4, dtype=torch.uint8)}, metadata)
    with pytest.raises(ValueError, match=r"described body|but shape|invalid literal"):
        load_bodies(tmp_path / "v")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{}" + b" " * 100,
        build(b"[]"),
        build(b" {}"),
        build(b"{"),
        build(b"{}{}"),
        build(b"\xff\xfe"),
        build(b'{"a":' * 100_000),
        build({}, b"x"),
        build({"a": entry(0, 4)}, b"abc"),
        build({"a": entry(0, 4)}, b"abcde"),
        build({"a": entry(0, 2), "b": entry(3, 4)}, b"abcd"),
        build({"a": entry(0, 3), "b": entry(2, 4)}, b"abcd"),
        build({"a": entry(0, 4), "b": entry(0, 4)}, b"abcd"),
        build({"a": entry(1, 4)}, b"abcd"),
        build({"a": entry(4, 0, shape=[4])}, b""),
        build({"a": entry(0, 4, shape=[5])}, b"abcd"),
        build({"a": entry(0, 4, shape=[-4])}, b"abcd"),
        build({"a": entry(0, 4, shape=[-2, -2])}, b"abcd"),
        build({"a": entry(0, 4, shape=[4.0])}, b"abcd"),  # type: ignore[list-item]
        build({"a": entry(0, 4, shape=[True, 4])}, b"abcd"),
        build({"a": entry(0, 4, shape=[2**64, 0])}, b"abcd"),
        build({"a": entry(0, 0, shape=[2**40, 2**40, 0])}, b""),
        build({"a": entry(0, 4, dtype="Q9")}, b"abcd"),
        build({"a": entry(0, 4, dtype="F32", shape=[4])}, b"abcd"),
        build({"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, b"abcd"),
        build({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, b"abcd"),
        build({"a": {"dtype": "U8", "shape": [4], "data_offsets": "04"}}, b"abcd"),
        build({"a": {"dtype": "U8", "shape": [4]}}, b"abcd"),
        build({"a": {**entry(0, 4), "extra": 1}}, b"abcd"),
        build({"a": [1]}, b""),
        build({"__metadata__": {"a": 1}}),
        build({"__metadata__": []}),
        build(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            b"abcd",
        ),
        build(b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
    ],
)
def test_bad_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_tensors(data)


def test_flipped_and_cut_files_never_crash() -> None:
    data = pack_tensors({"a": torch.arange(5), "b": torch.arange(3, dtype=torch.uint8)}, {"k": "v"})
    chance, refused = random.Random(2), 0
    for _ in range(2000):
        broken = bytearray(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)
        for _ in range(chance.randrange(3)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            tensors, _ = unpack_tensors(bytes(broken))
        except ValueError:
            refused += 1
        else:
            assert sum(value.numel() * value.element_size() for value in tensors.values()) == 43
    assert refused > 1000
