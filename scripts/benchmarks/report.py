"""What a run leaves behind: a table for the eye, JSON for later comparison, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.benchmarks import machine


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, right-aligned, in Markdown: ready for docs/benchmarks.md."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def milliseconds(seconds: float) -> str:
    """Three significant digits, or whole milliseconds above that."""
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(number: int | None) -> str:
    return "?" if number is None else f"{number / 1e6:.0f}"


def document(benchmark: str, body: dict[str, Any]) -> dict[str, Any]:
    """The frame around every benchmark's JSON."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        **body,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plot_serve(path: Path, levels: Sequence[dict[str, Any]], title: str) -> None:
    """Throughput, time to first token and inter-token latency over concurrency. `levels` as `serve` writes them."""
    # Only here: it takes a second to import, and a run's figures must not depend on it.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    concurrency = [str(level["concurrency"]) for level in levels]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    figure.suptitle(title)
    bars = axes[0].bar(concurrency, [level["figures"]["output_tokens_per_s"] for level in levels])
    axes[0].bar_label(bars, fmt="%.0f")
    axes[0].set_title("output tokens/s")
    for axis, key, name in ((axes[1], "first_token", "time to first token"), (axes[2], "inter_token", "inter-token")):
        for percent in ("p50", "p99"):
            values = [level["figures"][key][f"{percent}_s"] * 1000 for level in levels]
            axis.plot(concurrency, values, marker="o", label=percent)
            for place, value in zip(concurrency, values, strict=True):
                label = milliseconds(value / 1000)
                axis.annotate(label, (place, value), textcoords="offset points", xytext=(0, 6), ha="center")
        axis.set_title(f"{name} (ms)")
        axis.set_yscale("log")
        axis.margins(0.15)
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend()
    for axis in axes:
        axis.set_xlabel("concurrent streams")
    figure.savefig(path, dpi=120)
    plt.close(figure)
