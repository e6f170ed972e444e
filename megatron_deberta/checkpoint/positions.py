"""Context extension: a checkpoint read with more absolute positions than it has."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.checkpoint.layout import WEIGHT
from megatron_deberta.checkpoint.reader import CheckpointReader, Slice

POSITION_TABLES = ("embeddings.position.weight", "mask_decoder.position.weight")
"""Tables with a row per absolute position; those of relative positions do not grow."""

Rule = Literal["repeat", "interpolate"]


def extend_table(table: Tensor, rows: int, rule: Rule) -> Tensor:
    """Return a position table with more rows.

    Args:
        table: fp32 ``[P, D]``.
        rows: new number of rows, at least P.
        rule: ``repeat``: row i is row i mod P (Beltagy et al. 2020, Longformer, arXiv:2004.05150,
            section 5); ``interpolate``: linear interpolation between the first and the last row.
    """
    if rule == "repeat":
        return table[torch.arange(rows) % table.shape[0]]
    columns = F.interpolate(table.T[None], size=rows, mode="linear", align_corners=True)
    return columns[0].T.contiguous()


class ExtendedPositions:
    """Weights of a checkpoint with longer position tables, for a new run.

    Args:
        reader: the checkpoint.
        rows: new number of positions.
        rule: as for ``extend_table``.

    Attributes:
        path: folder of the checkpoint.
        metadata: of the checkpoint.
        shapes: logical shape by canonical name.
    """

    def __init__(self, reader: CheckpointReader, rows: int, rule: Rule) -> None:
        self._reader = reader
        self._rows = rows
        self._rule: Rule = rule
        self.path, self.metadata = reader.path, reader.metadata
        self.shapes = {
            name: (rows, *shape[1:]) if name.endswith(POSITION_TABLES) else shape
            for name, shape in reader.shapes.items()
        }

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        if not name.endswith(POSITION_TABLES):
            return self._reader.tensor(name, kind, part)
        table = extend_table(self._reader.tensor(name, kind), self._rows, self._rule)
        return table if part is None else part.of(table)
