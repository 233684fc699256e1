"""Which algorithm carries a vector."""

from __future__ import annotations

from ..compress import Cast, Codec, Feedback
from .dense import Dense
from .exchange import Algorithm, Buffers
from .gather import AllGather
from .linear import Linear
from .ring import Ring
from .robust import Rule
from .shared import Shared, SharedTopK
from .two_phase import TwoPhase
from .union import Union

__all__ = ["choose"]


def choose(
    codec: Codec | SharedTopK | None,
    second: Codec | None,
    feedback: Feedback | None,
    option: str,
    reduce: str | Rule,
    buffers: Buffers,
    world_size: int,
) -> tuple[Algorithm, Algorithm | None]:
    """The algorithm for the options of an AllReduce, and another one for vectors with which it takes less time.

    Args:
        option: "auto" or the name of an algorithm.

    Raises:
        ValueError: the options do not go together.
    """
    if not isinstance(second, Codec | None) or not isinstance(codec, Codec | SharedTopK | None):
        raise ValueError(
            "codec must be a Codec, a SharedTopK or None, second_codec a Codec or None, but they are: "
            f"{codec!r}, {second!r}"
        )
    if second is not None and option not in ("auto", "two_phase"):
        raise ValueError(f'second_codec belongs to algorithm="two_phase" but algorithm is {option!r}; remove it')
    if option == "ring":
        return _ring(codec, feedback, reduce, buffers, world_size), None
    if option in ("linear", "union") or isinstance(codec, SharedTopK):
        return _float_sum(codec, feedback, option, reduce, buffers), None
    if isinstance(reduce, Rule) and reduce.whole:
        if option not in ("auto", "all_gather") or second is not None:
            raise ValueError(f"{type(reduce).__name__} needs whole vectors; leave algorithm and second_codec unset")
        return AllGather(Cast("f32") if codec is None else codec, feedback, reduce, buffers), None
    if codec is None:
        return _uncompressed(second, option, reduce, buffers, world_size), None
    if option == "auto" and codec.linear and reduce in ("mean", "sum"):
        return Linear(codec, feedback, buffers), None
    again = codec if second is None else second
    possible = codec.fixed_size and again.fixed_size and again.requantizable
    if option == "two_phase" and not possible:
        raise ValueError(
            f'algorithm="two_phase" needs codecs with fixed_size and requantizable, which {again.config} and '
            f'{codec.config} are not both; use algorithm="all_gather" or another second_codec'
        )
    gather = AllGather(codec, feedback, reduce, buffers)
    if option == "all_gather" or not possible or (option == "auto" and world_size <= 2):
        return gather, None
    two_phase = TwoPhase(codec, again, feedback, reduce, buffers, world_size)
    return two_phase, gather if option == "auto" and second is None else None


def _ring(
    codec: Codec | SharedTopK | None, feedback: Feedback | None, reduce: str | Rule, buffers: Buffers, world_size: int
) -> Algorithm:
    if not isinstance(codec, Codec) or not (codec.fixed_size and codec.requantizable):
        raise ValueError(f'algorithm="ring" needs a codec with fixed_size and requantizable but codec is: {codec!r}')
    if feedback is not None or reduce not in ("mean", "sum"):
        raise ValueError(
            f'algorithm="ring" encodes running sums: it knows no error feedback and only "mean" and "sum", but got '
            f'feedback={feedback!r}, reduce={reduce!r}; use algorithm="two_phase"'
        )
    return Ring(codec, buffers, world_size)


def _uncompressed(
    second: Codec | None, option: str, reduce: str | Rule, buffers: Buffers, world_size: int
) -> Algorithm:
    if option != "auto" or second is not None:
        raise ValueError("codec=None uses the backend's all-reduce: leave algorithm and second_codec unset")
    if not isinstance(reduce, Rule):
        return Dense(reduce, world_size)
    exact = Cast("f32")  # rules need the vectors of single ranks
    return TwoPhase(exact, exact, None, reduce, buffers, world_size)


def _float_sum(
    codec: Codec | SharedTopK | None, feedback: Feedback | None, option: str, reduce: str | Rule, buffers: Buffers
) -> Algorithm:
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce must be "mean" or "sum" where vectors are summed as floats but is: {reduce!r}')
    if isinstance(codec, SharedTopK):
        if option != "auto":
            raise ValueError(f"SharedTopK is an algorithm of its own; leave algorithm unset but it is: {option!r}")
        return Shared(codec, feedback, buffers)
    if option == "union":
        return Union(codec, feedback, buffers)
    if codec is None or not codec.linear:
        raise ValueError(f'algorithm="linear" needs a linear codec but codec is: {codec!r}')
    return Linear(codec, feedback, buffers)
