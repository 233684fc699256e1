"""Encoded tensors in files: a strict reader and writer of the safetensors format, and bodies with their codec's name.

    u64 length of the header | header, JSON, padded with spaces to a multiple of 8 bytes | data

The header maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the start
of the data, without gaps; "__metadata__" maps strings to strings. All numbers are little-endian. Nothing is pickled.

Bodies add metadata: "lowcomm" is the version of this layout ("1"); "codec:NAME" the `config` of the codec, "n:NAME"
the number of elements and "shape:NAME" the shape of the tensor whose body is the U8 tensor NAME. A file whose bodies
agree on one of them has it once, without ":NAME". Readers ignore metadata they do not know.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .codec import Codec

__all__ = ["Encoded", "load_bodies", "load_tensors", "pack_tensors", "save_bodies", "save_tensors", "unpack_tensors"]

VERSION = "1"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package, against hostile lengths
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Encoded:
    """A body and what is needed to decode it.

    Args:
        body: (codec.nbytes(n),) uint8.
        codec: the codec's `config` text.
        shape: shape of the tensor that was encoded.

    >>> from lowcomm.compress import Int8
    >>> Encoded.of(Int8(), torch.linspace(-1, 1, 6).reshape(2, 3)).decode(Int8()).shape
    torch.Size([2, 3])
    """

    body: Tensor
    codec: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, codec: Codec, tensor: Tensor) -> Encoded:
        """Encode `tensor` (float32, bfloat16 or float16, any shape)."""
        flat = tensor.detach().reshape(-1).contiguous()
        body = torch.empty(codec.nbytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        codec.encode(flat, body)
        return cls(body, codec.config, tuple(tensor.shape))

    def decode(self, codec: Codec) -> Tensor:
        """The decoded tensor, float32.

        Raises:
            ValueError: `codec` is not the one that wrote the body.
        """
        if codec.config != self.codec:
            raise ValueError(f"this body was written by {self.codec} but is to be read by {codec.config}")
        out = torch.empty(math.prod(self.shape), device=self.body.device)
        codec.decode(self.body, out)
        return out.reshape(self.shape)


def save_bodies(
    path: str | os.PathLike[str], bodies: Mapping[str, Encoded], metadata: Mapping[str, str] | None = None
) -> None:
    """Write bodies, with `metadata` of your own beside them ("round", "base_crc32", ...).

    Raises:
        ValueError: `metadata` has a key of the layout.
    """
    own = {"lowcomm": VERSION}
    for key, texts in _descriptions(bodies).items():
        if len(set(texts.values())) == 1:
            own[key] = next(iter(texts.values()))
        else:
            own.update({f"{key}:{name}": text for name, text in texts.items()})
    for key in metadata or {}:
        if key.split(":")[0] in ("lowcomm", "codec", "n", "shape"):
            raise ValueError(f"the metadata key {key!r} belongs to the layout; choose another")
    save_tensors(path, {name: encoded.body for name, encoded in bodies.items()}, {**own, **(metadata or {})})


def load_bodies(path: str | os.PathLike[str]) -> tuple[dict[str, Encoded], dict[str, str]]:
    """Read what `save_bodies` wrote: (bodies, all metadata).

    Raises:
        ValueError: the file is damaged, of another version, or a body lacks its description.
    """
    tensors, metadata = load_tensors(path)
    version = metadata.get("lowcomm", "")
    if version.split(".")[0] != VERSION:
        raise ValueError(f"{path} has layout version {version!r} but this reader knows version {VERSION!r} only")
    return {name: _described(name, body, metadata) for name, body in tensors.items()}, metadata


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file. An existing file is replaced at once or not at all."""
    data = pack_tensors(tensors, metadata)
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: (tensors, metadata). Raises ValueError as `unpack_tensors`."""
    return unpack_tensors(Path(path).read_bytes())


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file.

    Args:
        tensors: name -> tensor of any shape and device. Wide dtypes are stored first, so that all are aligned.
        metadata: strings by string.

    Raises:
        ValueError: a dtype has no name in the format, or a name or metadata is not a string.

    >>> len(pack_tensors({"w": torch.zeros(8, dtype=torch.uint8)}))
    72
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = _check_metadata(dict(metadata))
    chunks, begin = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if not isinstance(name, str) or name == "__metadata__" or tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"cannot store the tensor named {name!r} of dtype {tensor.dtype}")
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        end = begin + raw.numel()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        chunks.append(raw.numpy().tobytes())
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def unpack_tensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of the bytes of a safetensors file. Every number in the header is checked first.

    Raises:
        ValueError: truncated or trailing bytes, a header that is not as specified, an unknown dtype, sizes that do not
            match, gaps or overlaps.
    """
    header, start = _header(data)
    metadata = _check_metadata(header.pop("__metadata__", {}))
    entries = sorted((_entry(name, fields) for name, fields in header.items()), key=lambda entry: entry[3:])
    position = 0
    for name, _, _, begin, end in entries:
        if begin != position:
            raise ValueError(f"tensor {name!r} begins at byte {begin} but the one before it ends at {position}")
        position = end
    if start + position != len(data):
        raise ValueError(f"the header describes {position} bytes of data but the file has {len(data) - start}")
    return {entry[0]: _tensor(data, start, entry) for entry in entries}, metadata


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """(parsed header, position of the data)."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER):
        raise ValueError(f"a header of {length} bytes was announced but the file has {len(data)} bytes")
    if data[8:9] != b"{":
        raise ValueError("the header must begin with '{'; this is not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError(f"the header has a name twice: {[name for name, _ in pairs]}")
    return mapping


def _entry(name: str, fields: Any) -> tuple[str, torch.dtype, list[int], int, int]:
    """(name, dtype, shape, begin, end), checked against each other."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs exactly dtype, shape and data_offsets but has: {fields!r}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has the shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    if math.prod(size for size in shape if size) >= 2**63:
        raise ValueError(f"tensor {name!r} has the impossible shape {shape}")
    if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"tensor {name!r}, {dtype} of shape {shape}, does not fill bytes {begin} to {end}")
    return name, _DTYPES[dtype], shape, begin, end


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tensor(data: bytes, start: int, entry: tuple[str, torch.dtype, list[int], int, int]) -> Tensor:
    _, dtype, shape, begin, end = entry
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    ):
        raise ValueError(f"metadata must map strings to strings but is: {metadata!r}")
    return metadata


def _descriptions(bodies: Mapping[str, Encoded]) -> dict[str, dict[str, str]]:
    return {
        "codec": {name: encoded.codec for name, encoded in bodies.items()},
        "n": {name: str(math.prod(encoded.shape)) for name, encoded in bodies.items()},
        "shape": {name: ",".join(map(str, encoded.shape)) for name, encoded in bodies.items()},
    }


def _described(name: str, body: Tensor, metadata: dict[str, str]) -> Encoded:
    codec, n, shape = (metadata.get(f"{key}:{name}", metadata.get(key)) for key in ("codec", "n", "shape"))
    if codec is None or n is None or shape is None or body.dtype != torch.uint8:
        raise ValueError(f"tensor {name!r} is not a described body: codec {codec!r}, n {n!r}, shape {shape!r}")
    sizes = tuple(int(size) for size in shape.split(",") if size)
    if min(sizes, default=0) < 0 or str(math.prod(sizes)) != n:
        raise ValueError(f"tensor {name!r} has n {n} but shape {shape}")
    return Encoded(body, codec, sizes)
