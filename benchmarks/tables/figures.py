"""Figures of README.md, drawn from the committed results.

A picture carries the numbers that it shows in its metadata, so that ``--check`` compares numbers
and not pixels, which depend on the version of matplotlib.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.learn.judge import BASELINE
from benchmarks.tables.common import Result
from benchmarks.tables.step import case_title

Bars = dict[str, dict[str, float]]
"""Values by case and model."""
Curves = dict[str, list[list[float]]]
"""Minutes, millions of tokens and bits per byte of points, by recipe."""
COLORS = {"megatron_deberta": "#3949ab", "transformers": "#9fa8b5"}


def step_bars(record: Result) -> Bars:
    """Tokens per second of a pretraining step."""
    sides = {"megatron_deberta": "ours", "transformers": "huggingface"}
    return {
        case_title(row): {
            name: round(row["sides"][side]["tokens_per_second"], 1) for name, side in sides.items()
        }
        for row in record["results"]
    }


def shown_numbers(path: Path) -> Any:
    """Read the numbers that a picture shows; None if there is no picture."""
    if not path.exists():
        return None
    with Image.open(path) as picture:
        return json.loads(picture.info["Description"])


def draw_step_bars(bars: Bars) -> bytes:
    """Draw horizontal bars as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    height = 0.38
    for number, (model, color) in enumerate(COLORS.items()):
        values = [case[model] for case in bars.values()]
        places = [place + (number - 0.5) * height for place in range(len(bars))]
        drawn = axes.barh(places, values, height, color=color, label=model)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, one CPU")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return _png(figure, bars)


def draw_recipes(curves: Curves) -> bytes:
    """Draw bits per byte against processor time and against tokens as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    by_time, by_tokens = figure.subplots(1, 2, sharey=True)
    for number, (recipe, points) in enumerate(curves.items()):
        minutes, tokens, bits = zip(*points, strict=True)
        width = 2.5 if recipe == BASELINE else 1.2
        # Ten colors, then the same ones dashed.
        style = {"color": f"C{number % 10}", "linestyle": "--" if number >= 10 else "-"}
        style |= {"linewidth": width, "marker": "o", "markersize": 3}
        by_time.plot(minutes, bits, label=recipe, **style)
        by_tokens.plot(tokens, bits, **style)
    by_time.set(xlabel="processor time, minutes", ylabel="bits per byte of held-out text")
    by_tokens.set(xlabel="tokens, millions")
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return _png(figure, curves)


def _png(figure: Any, numbers: object) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png", metadata={"Description": json.dumps(numbers)})
    return picture.getvalue()
