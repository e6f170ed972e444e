"""Shard specification: the part of a logical parameter that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParameterSpec:
    """A rank's shard of one parameter: indices ``[offset, offset + length)`` of ``dim``.

    The local tensor may be longer along ``dim`` by zero padding (vocabulary).

    Attributes:
        name: canonical name (docs/architecture.md).
        logical_shape: shape of the whole parameter, without padding.
        dim: split dimension; None: the parameter is replicated.
        offset: first logical index along ``dim``; 0 if replicated.
        length: number of logical indices along ``dim``; the whole extent if replicated.
        local_shape: shape of the local tensor, padding included.
    """

    name: str
    logical_shape: tuple[int, ...]
    dim: int | None
    offset: int
    length: int
    local_shape: tuple[int, ...]

    @property
    def split_dim(self) -> int:
        """``dim``, or 0 if the parameter is replicated."""
        return 0 if self.dim is None else self.dim

    def true_part(self, local: Tensor) -> Tensor:
        """Return the local tensor without its padding, a view."""
        return local.narrow(self.split_dim, 0, self.length)
