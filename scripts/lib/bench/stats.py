"""Medians, their intervals, and alternated pairs.

Invariants:
- A ratio is the median of the pairs' ratios, so that drift of the machine during a run touches both sides alike.
- An interval is that of the median by order statistics: no distribution is assumed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Median:
    """A median and the 95 % interval around it."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def median(values: Sequence[float]) -> Median:
    """The median of values with its 95 % interval."""
    ordered = sorted(values)
    n = len(ordered)
    reach = int(0.98 * math.sqrt(n)) + 1
    middle = n // 2
    return Median(statistics.median(ordered), ordered[max(0, middle - reach)], ordered[min(n - 1, middle + reach)], n)


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> tuple[Median, Median, Median]:
    """(ours, theirs, ratio) of `count` alternated pairs; who goes first alternates too."""
    found: list[tuple[float, float]] = []
    for i in range(count):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        a, b = first(), second()
        found.append((a, b) if i % 2 == 0 else (b, a))
    return median([a for a, _ in found]), median([b for _, b in found]), median([a / b for a, b in found])


def show(name: str, text: str) -> None:
    """One line of the table."""
    print(f"| {name} | {text} |", flush=True)


def verdict(measured: float, bar: float) -> str:
    """Whether a bar is met."""
    return f"bar {bar:g}: {'met' if measured <= bar else 'MISSED'}"
