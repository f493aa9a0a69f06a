"""Bars, lines and dots, as text for a terminal and as SVG. Only the standard library is needed.

An SVG has a background of its own, so that it is readable on light and on dark pages, and a title
and a description for readers who do not see it. The same figures give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

BAR_WIDTH = 40

# One class for each series: its color on a light page, and on a dark one.
COLORS = (
    ("#0b63b5", "#58a6ff"),
    ("#b3500a", "#f0883e"),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#bc8cff"),
    ("#57606a", "#9ea7b3"),
    ("#bf3989", "#f778ba"),
)
TEXT, MUTED, GRID, PAPER = (
    ("#1f2328", "#e6edf3"),
    ("#57606a", "#9ea7b3"),
    ("#d8dee4", "#30363d"),
    ("#ffffff", "#0d1117"),
)
# Above the width of most characters at the font size of 13.
CHARACTER = 7.2
# Between the baselines of two labels.
LINE = 16
# The height of a row of dots.
ROW = 26

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and its ticks. The first and the last are its ends."""

    label: str
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """The place of `value` between the ends, 0 to 1."""
        first, last = self.ticks[0][0], self.ticks[-1][0]
        if not first <= value <= last:
            raise ValueError(f"{self.label}: {value} is outside of the axis, {first} to {last}")
        if self.is_log:
            return math.log(value / first) / math.log(last / first)
        return (value - first) / (last - first)


def linear(label: str, values: Iterable[float]) -> Axis:
    """An axis from 0 to at least the largest of `values`, with 3 to 6 ticks."""
    largest = max(values)
    step = 10.0 ** math.floor(math.log10(largest))
    step *= next(factor for factor in (0.2, 0.5, 1, 2) if largest / (step * factor) <= 6)
    count = math.ceil(largest / step)
    return Axis(label, tuple((i * step, f"{i * step:,g}") for i in range(count + 1)))


def decades(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis of whole powers of ten around `values`."""
    first = math.floor(math.log10(min(values)))
    last = math.ceil(math.log10(max(values)))
    return Axis(label, tuple((10.0**i, f"{10.0**i:,g}") for i in range(first, last + 1)), True)


@dataclass(frozen=True)
class Line:
    """A line through points, with a label at its last one."""

    label: str
    points: tuple[Point, ...]
    color: int
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over two axes; `note` says where and how they were measured."""

    title: str
    note: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class DotRow:
    """Values in one row of dots. The series of each value gives its color and shape."""

    label: str
    values: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class DotGroup:
    """Rows of dots below a heading."""

    heading: str
    rows: tuple[DotRow, ...]


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
    """Write the same bars to `path`."""
    left = CHARACTER * max(len(name) for name, _ in rows) + 30
    longest = max(value for _, value in rows)
    right = 760.0 - CHARACTER * len(f"{longest:.2f} {unit}") - 24
    parts = [_text(20, 32, title, "title")]
    for number, (name, value) in enumerate(rows):
        top = 50 + 32 * number
        width = max(1.0, value / longest * (right - left))
        parts += [
            _text(left - 10, top + 15, name, "end"),
            f'<rect class="f0" x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" rx="2"/>',
            _text(left + width + 8, top + 15, f"{value:.2f} {unit}"),
        ]
    about = "; ".join(f"{name}: {value:.2f} {unit}" for name, value in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_document(760, 62 + 32 * len(rows), title, about, "", parts), encoding="utf-8")


def panels(
    title: str, about: str, content: Sequence[Panel], *, gutter: int, metadata: str = ""
) -> str:
    """An SVG of panels, two per row. `gutter` is the width of the labels right of the lines."""
    width, height, top = 490, 310, 52
    parts = [_text(20, 32, title, "title")]
    for number, panel in enumerate(content):
        left, down = width * (number % 2), top + height * (number // 2)
        parts += [f'<g transform="translate({left} {down})">']
        parts += [*_panel(panel, width, height, gutter), "</g>"]
    rows = (len(content) + 1) // 2
    columns = min(len(content), 2)
    return _document(width * columns, top + height * rows + 8, title, about, metadata, parts)


def dots(
    title: str,
    about: str,
    axis: Axis,
    series: Sequence[str],
    content: Sequence[DotGroup],
    *,
    middle: tuple[float, str, str],
    metadata: str = "",
) -> str:
    """An SVG of rows of dots over one axis, with a legend of the `series`.

    `middle` is a value that is drawn as a line, and the words left and right of it.
    """
    width, left, right, top = 940, 300.0, 900.0, 112.0
    value, less, more = middle
    parts = [_text(20, 32, title, "title")]
    x = left
    for number, name in enumerate(series):
        parts += [_mark(x, 58, number), _text(x + 12, 62, name)]
        x += 40 + CHARACTER * len(name)

    def place(one: float) -> float:
        return left + axis.place(one) * (right - left)

    def scale(y: float) -> list[str]:
        return [_text(place(tick), y, name, "muted middle") for tick, name in axis.ticks]

    parts += [
        _text(place(value) - 10, 88, f"← {less}", "muted end"),
        _text(place(value) + 10, 88, f"{more} →", "muted"),
        *scale(top - 4),
    ]
    y = top
    for group in content:
        parts += [_text(20, y + 20, group.heading, "strong")]
        y += 28
        height = ROW * len(group.rows) + 2
        for tick, _ in axis.ticks:
            kind = "axis" if tick == value else "grid"
            parts += [_path(f"M{place(tick):.1f} {y:.1f}v{height}", kind)]
        for row in group.rows:
            y += ROW
            middle_y = y - ROW / 2 + 1
            parts += [_text(left - 14, middle_y + 4, row.label, "end")]
            parts += [_path(f"M{left} {middle_y}H{right}", "grid")]
            present = sorted({number for number, _ in row.values})
            for number, one in row.values:
                # Marks of different series at the same place stay visible.
                spread = 2.5 * (present.index(number) - (len(present) - 1) / 2)
                parts += [_mark(place(one), middle_y + spread, number)]
        y += 6
    parts += [*scale(y + 12), _text((left + right) / 2, y + 34, axis.label, "muted middle")]
    return _document(width, round(y + 48), title, about, metadata, parts)


def _panel(panel: Panel, width: int, height: int, gutter: int) -> list[str]:
    left, right, top, bottom = 64.0, float(width - gutter), 66.0, float(height - 54)
    parts = [
        _text(20, 16, panel.title, "strong"),
        _text(20, 34, panel.note, "muted small"),
        _text(20, top - 12, panel.y.label, "muted"),
        _text((left + right) / 2, bottom + 38, panel.x.label, "muted middle"),
    ]

    def place(point: Point) -> Point:
        across, up = panel.x.place(point[0]), panel.y.place(point[1])
        return left + across * (right - left), bottom - up * (bottom - top)

    for tick, name in panel.y.ticks:
        y = bottom - panel.y.place(tick) * (bottom - top)
        kind = "axis" if y == bottom else "grid"
        parts += [_path(f"M{left} {y:.1f}H{right}", kind), _text(left - 8, y + 4, name, "end")]
    for tick, name in panel.x.ticks:
        x = left + panel.x.place(tick) * (right - left)
        parts += [_path(f"M{x:.1f} {bottom}v5", "axis"), _text(x, bottom + 20, name, "middle")]
    ends = []
    for line in panel.lines:
        points = [place(point) for point in line.points]
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        kind = f"line s{line.color}" + (" dashed" if line.is_dashed else "")
        parts += [_path(f"M{steps}", kind)]
        if not line.is_dashed:
            parts += [_mark(x, y, line.color, shape=0) for x, y in points]
        ends.append(points[-1])
    heights = _apart([y for _, y in ends], bottom)
    for line, (x, y), label_y in zip(panel.lines, ends, heights, strict=True):
        parts += [
            _path(f"M{x + 6:.1f} {y:.1f}L{right + 16} {label_y:.1f}", f"leader s{line.color}"),
            _text(right + 20, label_y + 4, line.label, f"f{line.color}"),
        ]
    return parts


def _apart(wanted: Sequence[float], bottom: float) -> list[float]:
    """The heights next to `wanted` at which labels do not overlap, in the same order."""
    order = sorted(range(len(wanted)), key=lambda one: wanted[one])
    placed = [wanted[one] for one in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + LINE)
    placed[-1] = min(placed[-1], max(bottom, wanted[order[-1]]))
    for i in reversed(range(len(placed) - 1)):
        placed[i] = min(placed[i], placed[i + 1] - LINE)
    return [placed[order.index(one)] for one in range(len(wanted))]


def _document(
    width: int, height: int, title: str, about: str, metadata: str, parts: Sequence[str]
) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title about">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
            *([f"<metadata>{escape(metadata)}</metadata>"] if metadata else []),
            f"<style>\n{_style()}\n</style>",
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def colors(which: int) -> list[str]:
        rules = [
            f"text{{fill:{TEXT[which]}}}",
            f".muted{{fill:{MUTED[which]}}}",
            f".grid{{stroke:{GRID[which]}}}",
            f".axis{{stroke:{MUTED[which]}}}",
            f".paper{{fill:{PAPER[which]}}}.mark{{stroke:{PAPER[which]}}}",
        ]
        for number, pair in enumerate(COLORS):
            rules.append(f".s{number}{{stroke:{pair[which]}}}.f{number}{{fill:{pair[which]}}}")
        return rules

    return "\n".join(
        [
            "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}",
            ".title{font-size:16px;font-weight:600}.strong{font-weight:600}.small{font-size:12px}",
            ".middle{text-anchor:middle}.end{text-anchor:end}path{fill:none}",
            ".line{stroke-width:2}.dashed{stroke-dasharray:6 4}.leader{stroke-width:1;opacity:.5}",
            *colors(0),
            f"@media(prefers-color-scheme:dark){{{''.join(colors(1))}}}",
        ]
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _path(steps: str, kind: str) -> str:
    return f'<path class="{kind}" d="{steps}"/>'


def _mark(x: float, y: float, color: int, shape: int | None = None) -> str:
    """A filled mark: `shape`, or the shape that belongs to the color."""
    r = 4.5
    shapes = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
        f"M{x - 2:.1f} {y - 6:.1f}h4v12h-4z",
        f"M{x:.1f} {y + 5:.1f}l-5 -9h10z",
    )
    steps = shapes[color if shape is None else shape]
    return f'<path class="mark f{color}" d="{steps}"/>'
