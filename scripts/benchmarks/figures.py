"""Order statistics for short, noisy series. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """A series by its median, what lies around it, and how well the median is known."""

    count: int
    median: float
    p10: float
    p90: float
    least: float
    most: float
    median_low: float
    """Lower end of a 95 % interval of the median (order statistics, no assumption on the distribution)."""
    median_high: float


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile by linear interpolation between order statistics; ``share`` in 0..1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarize(values: Sequence[float]) -> Summary:
    """Summarize a series.

    Raises:
        ValueError: it is empty.
    """
    if not values:
        raise ValueError("nothing was measured: the series is empty")
    ordered = sorted(values)
    count = len(ordered)
    # The number of values below the median is binomial(count, 1/2); 1.96 sigma of it on either side.
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return Summary(
        count=count,
        median=statistics.median(ordered),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        least=ordered[0],
        most=ordered[-1],
        median_low=ordered[low],
        median_high=ordered[max(low, high)],
    )
