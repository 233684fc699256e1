"""Ways to combine the vectors of N ranks when some of them may be wrong, or must not dominate.

Every rule is a small immutable object. It works on the messages of all contributing ranks, x_1 .. x_N in rank order,
or on one slice of them: what a rule needs to know about whole vectors (norms, distances, inner products) it computes
for its slice and completes with `total`, which adds the parts of all slices, in float64 and in a fixed order. So the
same code serves one process, the all-gather and the owners of a two-phase exchange, and all ranks decide alike.

>>> points = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 1.0], [100.0, -100.0]])
>>> Median().combine(points).tolist()
[1.0, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

__all__ = [
    "CenteredClipping",
    "GeometricMedian",
    "GradientAgreement",
    "Krum",
    "MajorityVote",
    "Median",
    "NormMedianClip",
    "NormalizedMean",
    "Rule",
    "TrimmedMean",
]

Total = Callable[[Tensor], Tensor]
_CHUNK = 1 << 18


def _alone(partial: Tensor) -> Tensor:
    return partial


@dataclass(frozen=True)
class Rule:
    """Base class of all rules. Weights do not enter: a rank contributes or, with weight 0, does not.

    Error feedback keeps what the codec lost. What a rule clips or refuses is dropped, or outliers would come back in
    every round.
    """

    @property
    def stateful(self) -> bool:
        """Whether `combine` needs its own previous result."""
        return False

    @property
    def needs_totals(self) -> bool:
        """Whether `combine` calls `total`: all rules but those that go coordinate by coordinate."""
        return True

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole vectors, so that they must be gathered."""
        return False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        """The combined vector, (n,) float32, or None: this round should be skipped.

        Args:
            x: (N, n) float32, one row for each contributing rank, in rank order. Not modified.
            total: completes float64 sums over slices; the default is for whole vectors.
            previous: the previous result, (n,), or None at first.
            round: the round number.

        Raises:
            ValueError: too few ranks for the rule.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Median(Rule):
    """Coordinate by coordinate the middle value; the mean of the two middle ones for even N. Tolerates < N/2 ranks."""

    @property
    def needs_totals(self) -> bool:
        return False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        return _coordinate_median(x)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """Coordinate by coordinate the mean without the b smallest and the b largest values. Tolerates b ranks.

    Args:
        trim: b, or None for floor(N / 10).
    """

    trim: int | None = None

    @property
    def needs_totals(self) -> bool:
        return False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        ranks = x.shape[0]
        b = ranks // 10 if self.trim is None else self.trim
        if b < 0 or ranks <= 2 * b:
            raise ValueError(f"trim={b} needs more than {2 * b} contributing ranks but there are {ranks}")
        return _ordered_mean(x.sort(0).values[b : ranks - b])


@dataclass(frozen=True)
class Krum(Rule):
    """The mean of the `keep` messages closest to their neighbours; ties go to the lower rank.

    score_i = sum of the N - f - 2 smallest squared distances to others

    Args:
        faulty: f, ranks that may be arbitrary; N >= 2 f + 3 is needed.
        keep: 1 for Krum (default), more for Multi-Krum, None for N - f - 2.

    Source: Blanchard et al. 2017 (arXiv 1703.02757).
    """

    faulty: int = 1
    keep: int | None = 1

    def scores(self, x: Tensor, total: Total = _alone) -> Tensor:
        """The score of every message, (N,) float64."""
        ranks = x.shape[0]
        if self.faulty < 0 or ranks < 2 * self.faulty + 3:
            raise ValueError(
                f"faulty={self.faulty} needs at least {2 * self.faulty + 3} contributing ranks but there are {ranks}"
            )
        pairs = list(combinations(range(ranks), 2))
        distances = total(torch.stack([_sum_of_squares(x[i], x[j]) for i, j in pairs]))
        table = torch.full((ranks, ranks), math.inf, dtype=torch.float64, device=x.device)
        for (i, j), distance in zip(pairs, distances, strict=True):
            table[i, j] = table[j, i] = distance
        return table.sort(1).values[:, : ranks - self.faulty - 2].sum(1)

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        keep = x.shape[0] - self.faulty - 2 if self.keep is None else self.keep
        best = self.scores(x, total).sort(stable=True).indices[:keep].sort().values
        return _ordered_mean(x[best])


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point with the smallest sum of distances, by Weiszfeld's iteration with smoothing. Tolerates < N/2 ranks.

    z = sum_i x_i / max(|x_i - z|, nu) / sum_i 1 / max(|x_i - z|, nu)

    Args:
        iterations: steps. Default 8.
        smoothing: nu, or None for a tenth of the median norm.
        start: "median" (default), "mean" or "zero". The authors start at the mean, but from there eight steps do not
            come back from a message that is 1e15 times too long.

    Source: Pillutla et al. (RFA, arXiv 1912.13445).
    """

    iterations: int = 8
    smoothing: float | None = None
    start: str = "median"

    def __post_init__(self) -> None:
        if self.start not in ("median", "mean", "zero"):
            raise ValueError(f'start must be "median", "mean" or "zero" but is: {self.start!r}')
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1 but is: {self.iterations}")

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        nu = self.smoothing
        if nu is None:
            nu = 0.1 * _lower_median(_norms(x, None, total))
        if self.start == "median":
            z = _coordinate_median(x)
        else:
            z = _ordered_mean(x) if self.start == "mean" else torch.zeros_like(x[0])
        for _ in range(self.iterations):
            distances = _norms(x, z, total).clamp(min=max(nu, 1e-30))
            shares = (1 / distances) / (1 / distances).sum()
            z = _weighted_sum(x, shares)
        return z


@dataclass(frozen=True)
class CenteredClipping(Rule):
    """Every message pulled to within `radius` of the previous result, then the mean. Tolerates < N/2 ranks.

    v = previous result (zero at first);  repeat: v = v + mean_i (x_i - v) min(1, tau / |x_i - v|)

    Meant for ranks that send momentum, m = (1 - beta) g + beta m. With an infinite radius it is the mean.

    Args:
        radius: tau; None takes the median of |x_i - v|. Default 10, for momentum in the form above with beta = 0.9.
        iterations: default 1.

    Source: Karimireddy et al. 2021 (arXiv 2012.10333) and their code; the automatic radius is ours.
    """

    radius: float | None = 10.0
    iterations: int = 1

    @property
    def stateful(self) -> bool:
        return True

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        v = torch.zeros_like(x[0]) if previous is None else previous.clone()
        for _ in range(self.iterations):
            distances = _norms(x, v, total)
            radius = _lower_median(distances) if self.radius is None else self.radius
            factors = torch.where(distances > radius, radius / distances.clamp(min=1e-300), 1.0)
            v = v + _weighted_sum(x - v, factors / x.shape[0])
        return v


@dataclass(frozen=True)
class NormMedianClip(Rule):
    """Messages longer than the median norm are shortened to it, then averaged. Against ranks that shout.

    x_i min(1, median|x| / (|x_i| + 1e-8)); the lower median for even N

    Args:
        contributors: divide each coordinate by the number of ranks that sent a value there, not by N.

    Source: the aggregation of SparseLoCo (arXiv 2508.15706, 2603.08163) and its public code.
    """

    contributors: bool = False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        norms = _norms(x, None, total)
        factors = (_lower_median(norms) / (norms + 1e-8)).clamp(max=1.0)
        if not self.contributors:
            return _weighted_sum(x, factors / x.shape[0])
        return _weighted_sum(x, factors) / (x != 0).sum(0).clamp(min=1)


@dataclass(frozen=True)
class NormalizedMean(Rule):
    """The mean of the directions: every message divided by its own norm (zero messages stay zero)."""

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        norms = _norms(x, None, total)
        factors = torch.where(norms > 0, 1 / norms.clamp(min=1e-300), 0.0)
        return _weighted_sum(x, factors / x.shape[0])


@dataclass(frozen=True)
class GradientAgreement(Rule):
    """The mean of the messages that point the same way (GAF); the round is skipped when no two agree.

    start with one message; take the next one in if its cosine distance to the mean of those taken is <= threshold

    Args:
        threshold: of 1 - cosine. Default 0.97; below 1.
        halving: as published: messages in rank order, each new one averaged half and half with all before it, so that
            late ones weigh most. Default False: the plain mean, starting at another rank each round.

    Source: gradient agreement filtering (arXiv 2412.18052) and its public code.
    """

    threshold: float = 0.97
    halving: bool = False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        ranks = x.shape[0]
        first = 0 if self.halving else round % ranks
        accepted = [first]
        kept = x[first]
        for step in range(1, ranks):
            candidate = x[(first + step) % ranks]
            if _cosine_distance(kept, candidate, total) <= self.threshold:
                accepted.append((first + step) % ranks)
                kept = (kept + candidate) / 2 if self.halving else _ordered_mean(x[sorted(accepted)])
        return kept.clone() if len(accepted) > 1 else None


@dataclass(frozen=True)
class MajorityVote(Rule):
    """The sign that most ranks have, +1.0 or -1.0; zero counts as plus. Tolerates < N/2 ranks in sign.

    With a one-bit codec in both phases this is signSGD with majority vote, 1 bit per element and direction.

    Args:
        tie: what an even vote gives: +1 (default), -1, 0, or "previous" for the last result. 0 needs a second codec
            that has a zero.

    Source: Bernstein et al. 2018 (arXiv 1810.05291).
    """

    tie: float | str = 1

    def __post_init__(self) -> None:
        if self.tie not in (1, -1, 0, "previous"):
            raise ValueError(f'tie must be 1, -1, 0 or "previous" but is: {self.tie!r}')

    @property
    def stateful(self) -> bool:
        return self.tie == "previous"

    @property
    def needs_totals(self) -> bool:
        return False

    def combine(
        self, x: Tensor, *, total: Total = _alone, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        votes = x.shape[0] - 2 * (x < 0).sum(0)
        plus = torch.ones_like(x[0])
        tie = plus * self.tie if not isinstance(self.tie, str) else plus if previous is None else previous
        return torch.where(votes == 0, tie, votes.sign().to(x.dtype))


def _coordinate_median(x: Tensor) -> Tensor:
    ordered, middle = x.sort(0).values, x.shape[0] // 2
    if x.shape[0] % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _ordered_mean(x: Tensor) -> Tensor:
    """Mean over the rows, summed in row order: the same bits on every device."""
    mean = torch.zeros_like(x[0])
    for row in x:
        mean.add_(row)
    return mean.div_(x.shape[0])


def _weighted_sum(x: Tensor, factors: Tensor) -> Tensor:
    result = torch.zeros_like(x[0])
    for row, factor in zip(x, factors.to(torch.float32), strict=True):
        result.add_(row * factor)
    return result


def _norms(x: Tensor, center: Tensor | None, total: Total) -> Tensor:
    """(N,) float64: |x_i - center|."""
    zero = torch.zeros((), device=x.device).expand(x.shape[1]) if center is None else center
    return total(torch.stack([_sum_of_squares(row, zero) for row in x])).sqrt()


def _cosine_distance(a: Tensor, b: Tensor, total: Total) -> float:
    ab, aa, bb = total(torch.stack([_inner(a, b), _inner(a, a), _inner(b, b)])).tolist()
    return 1.0 - ab / math.sqrt(aa * bb) if aa > 0 and bb > 0 else 1.0


def _sum_of_squares(a: Tensor, b: Tensor) -> Tensor:
    difference = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        part = a[start : start + _CHUNK].double() - b[start : start + _CHUNK].double()
        difference = difference + tree_sum64(part.square_())
    return difference


def _inner(a: Tensor, b: Tensor) -> Tensor:
    product = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        product = product + tree_sum64(a[start : start + _CHUNK].double() * b[start : start + _CHUNK].double())
    return product


def tree_sum64(x: Tensor) -> Tensor:
    """Sum of a float64 vector by halving: elementwise additions only, so neither device nor threads change the result.

    >>> tree_sum64(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).item()
    6.0
    """
    while x.numel() > 1:
        half = (x.numel() + 1) // 2
        folded = x[:half].clone()
        folded[: x.numel() - half] += x[half:]
        x = folded
    return x.sum()


def _lower_median(values: Tensor) -> float:
    return float(values.sort().values[(values.numel() - 1) // 2])
