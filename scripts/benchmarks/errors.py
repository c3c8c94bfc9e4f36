"""The one way in which a benchmark fails."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The run is worth nothing, and this sentence says why. Figures of it are not written."""
