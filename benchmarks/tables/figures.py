"""Figures of README.md, drawn from the committed results.

A picture carries the numbers that it shows in its metadata, so that ``--check`` compares numbers
and not pixels, which depend on the version of matplotlib.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image

from benchmarks.tables.common import Result
from benchmarks.tables.step import case_title

Bars = dict[str, dict[str, float]]
"""Values by case and model."""
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


def shown_bars(path: Path) -> Bars | None:
    """Read the numbers that a picture shows, or None if there is no picture."""
    if not path.exists():
        return None
    with Image.open(path) as picture:
        bars: Bars = json.loads(picture.info["Description"])
    return bars


def draw_bars(bars: Bars, label: str) -> bytes:
    """Draw horizontal bars as PNG.

    Args:
        bars: values by case and model.
        label: of the axis of values.
    """
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
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png", metadata={"Description": json.dumps(bars)})
    return picture.getvalue()
