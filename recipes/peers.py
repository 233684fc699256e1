"""What other libraries do to a gradient before they send it: the other side of `lowcomm bench --peers`.

Each is called as its users call it, with its own defaults, and allocates its own results. Only what would travel is
counted as the message. A library that is not installed is named, never imitated.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["PEERS", "Message", "Peer", "missing"]

BLOCK8, BLOCK4, DENSITY = 256, 128, 1 / 64


@dataclass(frozen=True)
class Message:
    """What one encode produced.

    Attributes:
        parts: what travels: tensors, arrays, bytes; Python numbers count as four bytes.
        context: what the receiver knows without being sent it (tables, shapes).
    """

    parts: tuple[Any, ...]
    context: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that travel.

        >>> Message((torch.zeros(8, dtype=torch.uint8), 0.5)).nbytes
        12
        """
        return sum(_nbytes(part) for part in self.parts)


def _nbytes(part: Any) -> int:
    if isinstance(part, (bytes, bytearray)):
        return len(part)
    if isinstance(part, Tensor):
        # quantized dtypes narrower than a byte say that an element takes one
        return part.untyped_storage().nbytes() if part.is_quantized else part.numel() * part.element_size()
    return int(part.nbytes) if isinstance(part, np.ndarray) else 4


@dataclass(frozen=True)
class Peer:
    """One way of another library to compress a vector.

    Attributes:
        name: library and method.
        package: the name to install it by.
        module: what must be importable.
        encode: (n,) float32 -> message.
        decode: message, (n,) float32 -> (n,) float32. The vector gives shape and dtype; its values are not used.
    """

    name: str
    package: str
    module: str
    encode: Callable[[Tensor], Message]
    decode: Callable[[Message, Tensor], Tensor]


def missing(peer: Peer) -> str | None:
    """None where `peer` runs here, otherwise a line that says why it is not measured."""
    if importlib.util.find_spec(peer.module) is None:
        return f"{peer.package}: not installed, not measured (pip install {peer.package})"
    x = torch.linspace(-1, 1, 1000)
    try:
        peer.decode(peer.encode(x), x)
    except Exception as error:  # whatever goes wrong in it, the others are still measured
        return f"{peer.name}: fails here, not measured ({type(error).__name__}: {error})"
    return None


def _load(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


# torch


def _cast(name: str, dtype: torch.dtype) -> Peer:
    def encode(x: Tensor) -> Message:
        return Message((x.to(dtype),))

    def decode(message: Message, x: Tensor) -> Tensor:
        decoded: Tensor = message.parts[0].to(torch.float32)
        return decoded

    return Peer(f"torch to({name})", "torch", "torch", encode, decode)


def _topk_encode(x: Tensor) -> Message:
    indices = x.abs().topk(max(1, int(x.numel() * DENSITY)), sorted=False).indices
    return Message((x[indices], indices.to(torch.int32)))


def _topk_decode(message: Message, x: Tensor) -> Tensor:
    values, indices = message.parts
    return torch.zeros_like(x).index_copy_(0, indices.long(), values)


def _qint8_encode(x: Tensor) -> Message:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what people call
        return Message((torch.quantize_per_tensor(x, float(x.abs().max()) / 127, 0, torch.qint8), 0.0))


def _qint8_decode(message: Message, x: Tensor) -> Tensor:
    decoded: Tensor = message.parts[0].dequantize()
    return decoded


def _packbits_encode(x: Tensor) -> Message:
    return Message((np.packbits(x.numpy() >= 0, bitorder="little"), x.abs().mean()))


def _packbits_decode(message: Message, x: Tensor) -> Tensor:
    bits, scale = message.parts
    return torch.from_numpy(np.unpackbits(bits, count=x.numel(), bitorder="little")).float().mul_(2).sub_(1).mul_(scale)


# torch's DDP communication hooks: the arithmetic of one rank, without the collective


def _fp16_hook_encode(x: Tensor) -> Message:
    return Message((x.to(torch.float16).div_(2),))


def _fp16_hook_decode(message: Message, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(message.parts[0]).mul_(2)


def _tensor_hook_encode(x: Tensor) -> Message:
    hooks = _load("torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer = torch.ao.quantization.MinMaxObserver()
        observer(x)
        scale, zero_point = (float(value) for value in observer.calculate_qparams())
    return Message((hooks._quantize_per_tensor_backend(x, scale, zero_point), scale, zero_point))


def _tensor_hook_decode(message: Message, x: Tensor) -> Tensor:
    hooks = _load("torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks")
    decoded: Tensor = hooks._dequantize_per_tensor_backend(*message.parts)
    return decoded


# bitsandbytes


def _bnb8_encode(x: Tensor) -> Message:
    codes, state = _load("bitsandbytes.functional").quantize_blockwise(x, blocksize=BLOCK8)
    return Message((codes, state.absmax), state)


def _bnb8_decode(message: Message, x: Tensor) -> Tensor:
    decoded: Tensor = _load("bitsandbytes.functional").dequantize_blockwise(message.parts[0], message.context)
    return decoded


def _bnb4(kind: str) -> Peer:
    def encode(x: Tensor) -> Message:
        codes, state = _load("bitsandbytes.functional").quantize_4bit(x, blocksize=64, quant_type=kind)
        return Message((codes, state.absmax), state)

    def decode(message: Message, x: Tensor) -> Tensor:
        decoded: Tensor = _load("bitsandbytes.functional").dequantize_4bit(message.parts[0], message.context)
        return decoded

    return Peer(f"bitsandbytes {kind}", "bitsandbytes", "bitsandbytes", encode, decode)


# hivemind


def _hivemind(name: str) -> Peer:
    def encode(x: Tensor) -> Message:
        compression = _load("hivemind.compression")
        info = compression.CompressionInfo.from_tensor(x)
        message = getattr(compression, name)().compress(x, info)
        return Message((message.buffer,), message)

    def decode(message: Message, x: Tensor) -> Tensor:
        decoded: Tensor = getattr(_load("hivemind.compression"), name)().extract(message.context)
        return decoded

    return Peer(f"hivemind {name.removesuffix('Quantization')}", "hivemind", "hivemind", encode, decode)


# torchao: the quantizers of its low-bit optimizers. Blocks must be whole, so the vector is padded as its users pad.


def _padded(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block))


def _torchao_map(bits: int, block: int) -> Peer:
    def encode(x: Tensor) -> Message:
        tools = _load("torchao.optim.quant_utils")
        table = torch.tensor(tools.create_dynamic_map(True, {8: 7, 4: 3}[bits], bits))
        scaled, scale = tools.scale_tensor(_padded(x, block), block)
        if bits == 8:
            return Message((tools.quantize_8bit_with_qmap(scaled, table), scale), table)
        codes = tools.quantize_4bit_with_qmap(scaled, table)
        return Message(((codes[::2] << 4) | codes[1::2], scale), table)

    def decode(message: Message, x: Tensor) -> Tensor:
        codes, scale = message.parts
        if bits == 4:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
        decoded: Tensor = _load("torchao.optim.quant_utils").dequant_with_qmap(codes, message.context, scale)
        return decoded[: x.numel()]

    return Peer(f"torchao optim {bits}-bit", "torchao", "torchao", encode, decode)


def _torchao_fp8_encode(x: Tensor) -> Message:
    return Message(_load("torchao.optim.subclass_fp8").quantize_fp8(_padded(x, BLOCK8), BLOCK8))


def _torchao_fp8_decode(message: Message, x: Tensor) -> Tensor:
    codes, scale = message.parts
    decoded: Tensor = codes.float().view(-1, BLOCK8) * scale.view(-1, 1)
    return decoded.view(-1)[: x.numel()]


# pi-quant


def _piquant(name: str, dtype: torch.dtype) -> Peer:
    def encode(x: Tensor) -> Message:
        module = _load("piquant.torch")
        scale, zero_point = module.compute_quant_params(x, dtype=dtype, ctx=_piquant_context())
        codes = module.quantize(x, scale=scale, zero_point=zero_point, dtype=dtype, ctx=_piquant_context())
        return Message((codes, scale, zero_point))

    def decode(message: Message, x: Tensor) -> Tensor:
        codes, scale, zero_point = message.parts
        decoded: Tensor = _load("piquant.torch").dequantize(
            codes, scale=scale, zero_point=zero_point, dtype=torch.float32, ctx=_piquant_context()
        )
        return decoded

    return Peer(f"pi-quant {name}", "pypiquant", "piquant", encode, decode)


_contexts: dict[int, Any] = {}


def _piquant_context() -> Any:
    # it has threads of its own, whose number is fixed when a context is made
    threads = torch.get_num_threads()
    if threads not in _contexts:
        _contexts[threads] = _load("piquant").Context(threads)
    return _contexts[threads]


PEERS = (
    _cast("float16", torch.float16),
    _cast("bfloat16", torch.bfloat16),
    _cast("float8_e4m3fn", torch.float8_e4m3fn),
    Peer("torch quantize_per_tensor", "torch", "torch", _qint8_encode, _qint8_decode),
    Peer("torch topk 1/64", "torch", "torch", _topk_encode, _topk_decode),
    Peer("numpy packbits + mean", "numpy", "numpy", _packbits_encode, _packbits_decode),
    Peer("DDP fp16_compress_hook", "torch", "torch", _fp16_hook_encode, _fp16_hook_decode),
    Peer("DDP quantization_pertensor", "torch", "torch", _tensor_hook_encode, _tensor_hook_decode),
    Peer("bitsandbytes 8-bit /256", "bitsandbytes", "bitsandbytes", _bnb8_encode, _bnb8_decode),
    _bnb4("nf4"),
    _bnb4("fp4"),
    _hivemind("Float16Compression"),
    _hivemind("ScaledFloat16Compression"),
    _hivemind("Uniform8BitQuantization"),
    _hivemind("Quantile8BitQuantization"),
    _hivemind("BlockwiseQuantization"),
    _torchao_map(8, BLOCK8),
    _torchao_map(4, BLOCK4),
    Peer("torchao optim fp8 /256", "torchao", "torchao", _torchao_fp8_encode, _torchao_fp8_decode),
    _piquant("uint8", torch.quint8),
    _piquant("uint4", torch.quint4x2),
    _piquant("uint2", torch.quint2x4),
)
