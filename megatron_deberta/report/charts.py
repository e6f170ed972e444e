"""Charts as SVG with colours from the page's style sheet, and their data for the pointer.

matplotlib draws them, which the project needs anyway. Its colours are replaced by CSS variables, so
that one picture serves light and dark pages; text stays text. A report of a run is some hundred
kilobytes instead of the several megabytes of a plotting library in JavaScript.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

Point = tuple[float, float]

NUM_COLORS = 8
"""Number of the variables ``--c0``, ``--c1``, ... of the style sheet."""
MAX_POINTS = 600
"""Points drawn of a line; more cannot be told apart at this width."""
_SIZE = (5.2, 2.9)
"""Inches. At a phone's width the picture is shown at about this size."""
_AXES = (0.15, 0.17, 0.83, 0.73)
"""Left, bottom, width and height of the axes, as shares of the picture. A layout engine would take
as long as the drawing."""
_INK, _GRID, _CURVE = "#010203", "#010204", "#0102{:02x}"
_SERIES = 0x40
Style = Literal["line", "dashed", "points", "band", "marker"]


@dataclass(frozen=True, slots=True)
class Series:
    """A line or a set of points.

    Attributes:
        name: in the legend.
        points: x and y, ascending x.
        color: number of a colour.
        style: ``line``, ``dashed``, ``points`` (with a thin line), ``band`` (stacked areas) or
            ``marker`` (vertical lines, y is ignored).
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report.

    Attributes:
        title: heading.
        y_label: quantity and unit.
        series: what is drawn.
        x_label: quantity and unit.
        note: sentence below the heading.
        percent: y is a share, shown in percent.
    """

    title: str
    y_label: str
    series: Sequence[Series]
    x_label: str = "optimizer step"
    note: str = ""
    percent: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw besides vertical lines."""
        return not any(each.points for each in self.series if each.style != "marker")


@dataclass(frozen=True, slots=True)
class DrawnChart:
    """A chart as the page shows it.

    Attributes:
        chart: what was drawn.
        number: of the chart in the page.
        svg: the picture.
        data: position of the axes in the picture, as shares of its size, the range of x, and the
            series, for the values at the pointer.
    """

    chart: Chart
    number: int
    svg: Markup
    data: dict[str, Any] = field(default_factory=dict)


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most ``most`` points; of each group of neighbours the lowest and the highest.

    Spikes therefore stay visible.
    """
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    for group in np.array_split(np.arange(len(points)), most // 2 - 1):
        values = [points[index][1] for index in group]
        kept |= {int(group[int(np.argmin(values))]), int(group[int(np.argmax(values))])}
    return [points[index] for index in sorted(kept)]


def draw(chart: Chart, number: int) -> DrawnChart:
    """Draw a chart.

    Args:
        chart: not empty.
        number: of the chart in the page, part of the identifiers in its SVG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": f"chart{number}", "text.parse_math": False,
        "font.family": "sans-serif", "font.size": 9.5, "axes.edgecolor": _GRID,
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "axes.spines.top": False, "axes.spines.right": False, "path.simplify": False,
    }  # fmt: skip
    series = [Series(each.name, thin(each.points), each.color, each.style) for each in chart.series]
    with rc_context(settings):
        figure = Figure(figsize=_SIZE)
        axes = figure.add_axes(_AXES)
        _draw_bands(axes, [each for each in series if each.style == "band"])
        for each in series:
            _draw_series(axes, each)
        axes.set(xlabel=chart.x_label)
        # Beside the axis it would be hidden by long tick labels, such as 0.00104.
        axes.set_title(chart.y_label, loc="left", fontsize=settings["font.size"])
        axes.locator_params(axis="both", nbins=6)
        if chart.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        low, high = axes.get_xlim()
    left, bottom, width, height = _AXES
    data = {
        "box": [left, 1 - bottom - height, left + width, 1 - bottom],
        "x": [low, high],
        "percent": chart.percent,
        "series": [
            {
                "name": each.name,
                "color": each.color % NUM_COLORS,
                "points": [[_short(x), _short(y)] for x, y in each.points],
            }
            for each in series
            if each.style != "marker" and each.points
        ],
    }
    return DrawnChart(chart, number, _themed(stream.getvalue(), number), data)


def _draw_bands(axes: Any, bands: Sequence[Series]) -> None:
    """Draw areas on top of each other; all have the same x."""
    below = np.zeros(len(bands[0].points) if bands else 0)
    for band in bands:
        x, y = (np.array(values, float) for values in zip(*band.points, strict=True))
        axes.fill_between(x, below, below + y, color=_color(band.color), linewidth=0, step="pre")
        below = below + y


def _draw_series(axes: Any, series: Series) -> None:
    if not series.points or series.style == "band":
        return
    x, y = zip(*series.points, strict=True)
    color = _color(series.color)
    if series.style == "marker":
        for place in x:
            axes.axvline(place, color=color, linewidth=1.2, linestyle=(0, (2, 2)))
        return
    lone = len(series.points) == 1
    axes.plot(
        x,
        y,
        color=color,
        linewidth=1.0 if series.style == "points" else 1.4,
        linestyle="--" if series.style == "dashed" else "-",
        marker="o" if series.style == "points" or lone else "",
        markersize=3.5,
    )


def _color(number: int) -> str:
    return _CURVE.format(_SERIES + number % NUM_COLORS)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _themed(svg: str, number: int) -> Markup:
    """Replace colours by variables of the style sheet and the fixed size by the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    for color in range(NUM_COLORS):
        svg = svg.replace(_color(color), f"var(--c{color})")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" xmlns:xlink=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    svg = re.sub(r"font-family: [^;]*; ", "", svg)
    # Identifiers of groups, such as figure_1, would be in the page once per chart.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    start = f'<svg role="img" aria-labelledby="chart-{number}"'
    return Markup(svg.replace("<svg", start, 1))
