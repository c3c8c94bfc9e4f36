"""What is counted between two scrapes: plain numbers, without locks.

What lives here: counters and histograms, written by one thread and read by any. What must not: names, help and labels'
meaning (`collector.py` has them), guards (`recorder.py` has them), I/O. One writer is what makes them safe without a
lock: a reader copies a list or a dict in one operation of the interpreter, and gets what was there at some moment. The
sum and the counts of a histogram may then be one observation apart, which no rate or quantile notices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

LABEL_SETS_MAX = 512
"""Of one counter: labels are closed sets, so more is a bug of ours, and is counted without its labels."""


class Counter:
    """Counts by label values. A set of labels that has never been counted is not told, unless `known` names it: a
    counter that appears with its first event has no increase that a query could see.
    """

    __slots__ = ("_values", "num_labels")

    def __init__(self, num_labels: int = 0, known: Iterable[tuple[str, ...]] = ()) -> None:
        self.num_labels = num_labels
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(known or ([()] if not num_labels else ()), 0)

    def add(self, labels: tuple[str, ...] = (), amount: float = 1) -> None:
        """Count."""
        values = self._values
        if labels not in values and len(values) >= LABEL_SETS_MAX:
            labels = ("other",) * self.num_labels
        values[labels] = values.get(labels, 0) + amount

    def values(self) -> list[tuple[tuple[str, ...], float]]:
        """As of now."""
        return list(self._values.copy().items())


class Histogram:
    """Observations by size. `bounds` ascend; each bucket includes its own, as Prometheus's `le` does."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of what was observed."""

    def observe(self, value: float) -> None:
        """Take one observation. Raises ValueError for NaN: it would have no bucket and spoil the sum for ever."""
        if value != value:  # noqa: PLR0124 - NaN, at a third of the cost of a call
            raise ValueError("not a number")
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[int]:
        """Cumulative counts, one for each bound and the last for +Inf."""
        cumulative, so_far = [], 0
        for count in self._counts[:]:
            so_far += count
            cumulative.append(so_far)
        return cumulative
