"""Bar charts of times, as text for a terminal and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BAR_WIDTH = 40


def text(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """One line per row: name, bar, value in `unit`."""
    longest = max(value for _, value in rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"  {name:<{width}}  {'█' * max(1, round(value / longest * BAR_WIDTH)):<{BAR_WIDTH}} "
        f"{value:>8.2f} {unit}"
        for name, value in rows
    )


def svg(path: Path, title: str, rows: Sequence[tuple[str, float]], unit: str) -> None:
    """Write the same chart to `path`; the same rows give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = [name for name, _ in rows]
    values = [value for _, value in rows]
    with pyplot.rc_context({"svg.hashsalt": "kvdepot", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1), layout="constrained")
        bars = axes.barh(names, values, color="#4c78a8")
        axes.bar_label(bars, [f"{value:.2f} {unit}" for value in values], padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(title, loc="left")
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
