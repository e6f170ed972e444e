"""Attention maps as PNG, and as an interactive HTML page that needs no network.

A PNG has one row per model, layer and head, and one column per part.
"""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_deberta.attention_maps.compute import PARTS, PROBABILITIES, TERMS, Head, TextMaps
from megatron_deberta.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BYTES = 64 << 20
"""Of values in a page; browsers open larger ones slowly."""
MAX_ROWS = 48
"""A picture of more rows is hard to read, and larger than many programs open."""
_MAX_LABELS = 48
_PANEL_INCHES = 2.8
_INCHES_PER_LABEL = 0.16
_LABEL_CHARACTERS = 12
_LABEL_INCHES = 0.95
_TICK_INCHES = 0.6
_TITLE_INCHES = 0.5
_BAR_INCHES = 0.65


def draw(models: Sequence[TextMaps]) -> bytes:
    """Draw the maps of one or several models as PNG.

    Colours of probabilities range from 0 to the largest of the panel, those of scores are symmetric
    and the same for the terms of a row. Queries are rows of a panel, keys columns.

    Raises:
        ConfigError: there would be more than ``MAX_ROWS`` rows.
    """
    rows = [
        (maps, layer, head)
        for row in range(max(len(maps.layers) for maps in models))
        for head in models[0].heads
        for maps in models
        if row < len(maps.layers) and head in maps.heads
        for layer in [maps.layers[row]]
    ]
    if len(rows) > MAX_ROWS:
        raise ConfigError(
            f"{len(rows)} rows (models x layers x heads) are too many for a PNG, which has at most "
            f"{MAX_ROWS}; choose fewer --layers or --heads, or write .html"
        )
    longest = max(len(maps.pieces) for maps in models)
    labelled = longest <= _MAX_LABELS
    side = max(_PANEL_INCHES, _INCHES_PER_LABEL * longest) if labelled else 1.4 * _PANEL_INCHES
    grid = _Grid(len(rows), side, _LABEL_INCHES if labelled else _TICK_INCHES)
    for index, row in enumerate(rows):
        _draw_row(grid, index, *row, labelled=labelled)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        grid.figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()


def title(maps: TextMaps, layer: int, head: Head) -> str:
    """Return the title of a picture of one layer and head.

    Args:
        maps: of the model.
        layer: number of the layer, from 1.
        head: number of the head, or ``mean``.
    """
    name = f"head {head}" if isinstance(head, int) else f"{head} over heads"
    return f"{maps.name}: layer {layer} of {maps.num_layers}, {name}"


class _Grid:
    """A figure with panels at fixed places: automatic layouts take minutes for many panels."""

    def __init__(self, rows: int, side: float, labels: float) -> None:
        from matplotlib.figure import Figure

        self._width = labels + len(PARTS) * (side + _BAR_INCHES)
        self._row = side + labels + _TITLE_INCHES
        self._height = rows * self._row
        self.side, self._labels = side, labels
        self.figure: Figure = Figure(figsize=(self._width, self._height))

    def add(self, row: int, column: int, offset: float, width: float, height: float) -> Any:
        """Add axes of a size in inches, ``offset`` inches right of a panel's left edge."""
        left = self._labels + column * (self.side + _BAR_INCHES) + offset
        bottom = self._height - (row + 1) * self._row + self._labels
        whole, high = self._width, self._height
        return self.figure.add_axes((left / whole, bottom / high, width / whole, height / high))


def _draw_row(
    grid: _Grid, row: int, maps: TextMaps, layer: int, head: Head, *, labelled: bool
) -> None:
    found = {part: maps.map(layer, head, part) for part in PARTS}
    terms = [values for part, values in found.items() if part in TERMS and values is not None]
    limit = max(float(np.abs(values).max()) for values in terms) or 1.0
    for column, (part, values) in enumerate(found.items()):
        panel = grid.add(row, column, 0.0, grid.side, grid.side)
        heading = f"{title(maps, layer, head)}\n{part}" if part == PROBABILITIES else part
        panel.set_title(heading, fontsize=9, loc="left", parse_math=False)
        if labelled or values is None:
            # A tick takes milliseconds, a text far less.
            panel.set(xticks=[], yticks=[])
        if values is None:
            panel.text(0.5, 0.5, "none", ha="center", va="center", color="gray")
            continue
        shades: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
        if part == PROBABILITIES:
            shades = {"cmap": "Blues", "vmin": 0}
        image = panel.imshow(values, interpolation="nearest", **shades)
        if part in (PROBABILITIES, "c2c"):
            # The terms have the same colours.
            beside = grid.add(row, column, grid.side + 0.08, 0.1, 0.7 * grid.side)
            bar = grid.figure.colorbar(image, cax=beside)
            bar.ax.tick_params(labelsize=6)
        panel.tick_params(labelsize=7, labelleft=column == 0)
        if labelled:
            _label(panel, maps.pieces, rows=column == 0)


def _label(panel: Any, pieces: Sequence[str], *, rows: bool) -> None:
    """Write the pieces under a panel (keys), and with ``rows`` left of it (queries)."""
    labels = [piece.strip()[:_LABEL_CHARACTERS] or "\u2581" for piece in pieces]
    style: dict[str, Any] = {"fontsize": 7, "parse_math": False}
    for place, label in enumerate(labels):
        panel.text(place, len(labels) - 0.2, label, rotation=90, ha="center", va="top", **style)
        if rows:
            panel.text(-0.8, place, label, ha="right", va="center", **style)


def write_page(models: Sequence[TextMaps], text: str) -> bytes:
    """Return the page with the maps of one or several models.

    Args:
        models: their maps.
        text: the text, for the heading.

    Raises:
        ConfigError: there are more than ``MAX_BYTES`` of values.
    """
    size = sum(maps.values.nbytes for maps in models)
    if size > MAX_BYTES:
        raise ConfigError(
            f"the page would hold {size >> 20} MiB of values, more than {MAX_BYTES >> 20}; choose "
            "fewer --layers or --heads, or shorten the text"
        )
    content = {
        "text": text,
        "parts": PARTS,
        "models": [
            {
                "name": maps.name,
                "pieces": maps.pieces,
                "num_layers": maps.num_layers,
                "layers": maps.layers,
                "heads": maps.heads,
                "parts": maps.parts,
                "values": base64.b64encode(maps.values.astype("<f4").tobytes()).decode(),
            }
            for maps in models
        ],
    }
    # No piece of text can end the script element.
    data = json.dumps(content).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", data).encode()
