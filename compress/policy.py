"""Different codecs for different parameters in one flat buffer: `Mixed`.

The body of a mixed message is the bodies of its sections, one after another; the length of each is a multiple of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import Codec, check_body, check_decode, check_encode

__all__ = ["Choose", "Mixed", "sections"]

Choose = Callable[[str, tuple[int, ...], torch.dtype, str], Codec]

_SECTION_SEED = 1 << 48  # distance of the random seeds of neighbouring sections


@dataclass(frozen=True)
class Mixed(Codec):
    """Several codecs, each for a run of elements of the flat vector.

    Mixed messages are gathered: every rank decodes every body. Where dense codecs serve most elements of a vector that
    many ranks exchange, a bucket of its own for each codec costs fewer bytes.

    Args:
        runs: (codec, number of elements) from the start of the vector to its end.

    Raises:
        ValueError: a run is empty, or a vector does not have exactly the sum of the runs.

    Guarantee: the weakest of the sections' (delta and omega are None when one section has none).

    >>> from lowcomm.compress import Cast, Int4
    >>> codec = Mixed(((Int4(), 128), (Cast("f32"), 10)))
    >>> codec.nbytes(138)
    112
    """

    runs: tuple[tuple[Codec, int], ...]

    id = 0x7E
    requantizable = False

    def __post_init__(self) -> None:
        for codec, numel in self.runs:
            if numel < 1:
                raise ValueError(f"every run needs at least one element but {codec.config} has {numel}")
            if not codec.fixed_size or codec.nbytes(numel) % 4:
                raise ValueError(f"{codec.config}: a section needs a codec with a fixed body length, a multiple of 4")

    @classmethod
    def from_parameters(
        cls, named_parameters: Iterable[tuple[str, Tensor]], choose: Choose, role: str = "pseudo-gradient"
    ) -> Mixed:
        """The codec for the flat vector of these parameters, in this order.

        Neighbours for which `choose` returns equal codecs share a section, and blocks run across their border. Codecs
        that need shapes (`PowerSGD`, `DCTTopK`) get them here; `choose` returns them without.

        Args:
            named_parameters: as from `module.named_parameters()`. Only name, shape and dtype are read.
            choose: called as choose(name, shape, dtype, role), returns a codec. `Cast("f32")` is exact.
            role: what the vector holds, handed on to `choose`. Default "pseudo-gradient".

        Raises:
            ValueError: there is no parameter.

        >>> from lowcomm.compress import Cast, Int4
        >>> def choose(name, shape, dtype, role):
        ...     return Int4() if len(shape) > 1 else Cast("f32")
        >>> model = torch.nn.Linear(16, 8)
        >>> codec = Mixed.from_parameters(model.named_parameters(), choose)
        >>> [(type(part).__name__, numel) for part, numel in codec.runs]
        [('Int4', 128), ('Cast', 8)]
        """
        groups: list[tuple[Codec, list[tuple[int, ...]]]] = []
        for name, parameter in named_parameters:
            shape = tuple(parameter.shape)
            codec = choose(name, shape, parameter.dtype, role)
            if not groups or groups[-1][0] != codec:
                groups.append((codec, []))
            if parameter.numel():
                groups[-1][1].append(shape)
        if not groups:
            raise ValueError("no parameters were given; a generator can be used only once, list it first")
        return cls(tuple((codec.for_shapes(shapes), _numel(shapes)) for codec, shapes in groups if shapes))

    @property
    def block(self) -> int:
        return max(1, sum(numel for _, numel in self.runs))

    @property
    def unbiased(self) -> bool:
        return all(codec.unbiased for codec, _ in self.runs)

    def nbytes(self, n: int) -> int:
        if n == 0:
            return 0
        if n != sum(numel for _, numel in self.runs):
            raise ValueError(
                f"this mixed codec is for {sum(numel for _, numel in self.runs)} elements but the vector has {n}; "
                f"build one for each flat vector"
            )
        return sum(codec.nbytes(numel) for codec, numel in self.runs)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        flags = 0
        for codec, part, body, seed in self._sections(x.numel(), out, bucket):
            flags |= codec.encode(x[part], body, step=step, rank=rank, bucket=seed)
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        for codec, part, section, seed in self._sections(out.numel(), body, bucket):
            codec.decode(section, out[part], step=step, rank=rank, bucket=seed)

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        for codec, part, section, seed in self._sections(acc.numel(), body, bucket):
            codec.decode_add(section, acc[part], weight, step=step, rank=rank, bucket=seed)

    def encode_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        candidate: Tensor,
        out: Tensor,
        *,
        decay: float = 1.0,
        step: int = 0,
        rank: int = 0,
        bucket: int = 0,
    ) -> int:
        check_body(out, self.nbytes(x.numel()))
        flags = 0
        for codec, part, body, seed in self._sections(x.numel(), out, bucket):
            flags |= codec.encode_feedback(
                x[part], residual[part], candidate[part], body, decay=decay, step=step, rank=rank, bucket=seed
            )
        return flags

    def delta(self, n: int) -> float | None:
        bounds = [codec.delta(numel) for codec, numel in self.runs]
        known = [bound for bound in bounds if bound is not None]
        return min(known) if known and len(known) == len(bounds) else None

    def omega(self, n: int) -> float | None:
        bounds = [codec.omega(numel) for codec, numel in self.runs]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if known and len(known) == len(bounds) else None

    @property
    def config(self) -> str:
        return "mixed:" + ";".join(f"{numel}*{codec.config}" for codec, numel in self.runs)

    def _sections(self, n: int, body: Tensor, bucket: int) -> Iterator[tuple[Codec, slice, Tensor, int]]:
        """(codec, elements, bytes, bucket) of each section. Sections draw from seeds far apart."""
        first = 0
        for index, (codec, start, stop) in enumerate(sections(self, n)):
            last = first + codec.nbytes(stop - start)
            yield codec, slice(start, stop), body[first:last], bucket + index * _SECTION_SEED
            first = last


def sections(codec: Codec, n: int) -> Iterator[tuple[Codec, int, int]]:
    """(codec, start, stop) of each run of a vector of `n` elements: several for a `Mixed` codec, one for any other."""
    if not isinstance(codec, Mixed):
        yield codec, 0, n
        return
    start = 0
    for part, numel in codec.runs if n else ():
        yield part, start, start + numel
        start += numel


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
