"""Attention maps as an interactive HTML page that needs no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files

from megatron_deberta.attention_maps.compute import PARTS, TextMaps
from megatron_deberta.errors import ConfigError

MAX_BYTES = 64 << 20
"""Of values in a page; browsers open larger ones slowly."""


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
