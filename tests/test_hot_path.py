"""Once buffers exist, codecs with kernels allocate nothing: no temporary, no copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_checks import gaussian
from lowcomm.compress import (
    E3M0,
    Codec,
    Eden,
    Float8,
    Int,
    Int4,
    Int8,
    Sign,
    Ternary,
    Threshold,
    TopK,
    available_levels,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CODECS: list[Codec] = [
    *(Int8(), Int4(), Int4(rounding="stochastic"), Int4(affine=True), Int(bits=5, block=100)),
    *(Float8(), Float8("e5m2"), E3M0(), E3M0(rounding="stochastic"), Sign(), Sign("two_means"), Ternary()),
    *(TopK(), TopK(density=0.01, scope="global"), TopK(value="int8", index="bits"), Threshold(2.5)),
    *(Eden(1), Eden(4), Eden(2, "unbiased")),
]
SMALL = 256  # bytes: a number or a header, not a vector


class Allocations(TorchDispatchMode):
    """Lists the tensor operations that give memory which none of their arguments had."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        known = {a.untyped_storage().data_ptr() for a in [*args, *(kwargs or {}).values()] if isinstance(a, Tensor)}
        for out in outputs:
            storage = out.untyped_storage() if isinstance(out, Tensor) else None
            if storage is not None and storage.data_ptr() not in known and storage.nbytes() > SMALL:
                self.found.append(str(func))
        return result


@pytest.mark.skipif(len(available_levels()) == 1, reason="no kernels here")
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_nothing_is_allocated(codec: Codec) -> None:
    n = 100_003
    x, residual, candidate, out = gaussian(n), torch.zeros(n), torch.empty(n), torch.empty(n)
    body = torch.empty(codec.nbytes(n), dtype=torch.uint8)

    def round_of_calls() -> None:
        codec.encode(x, body, step=1)
        codec.decode(body, out, step=1)
        codec.decode_add(body, out, 0.5, step=1)
        codec.encode_feedback(x, residual, candidate, body, step=1)

    round_of_calls()
    with Allocations() as allocations:
        round_of_calls()
    assert allocations.found == []


def test_an_allocation_would_be_seen() -> None:
    with Allocations() as allocations:
        torch.zeros(1000).add_(1)
        gaussian(1000).clone()
    assert any("clone" in name for name in allocations.found)
