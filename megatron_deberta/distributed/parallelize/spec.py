"""Shard specification: the part of a logical parameter that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParameterSpec:
    """A rank's shard of one parameter: indices ``[offset, offset + length)`` of ``dim``.

    The local tensor may be longer along ``dim`` by zero padding (vocabulary).
    """

    name: str
    """Canonical name (docs/architecture.md)."""
    logical_shape: tuple[int, ...]
    """Shape of the whole parameter, without padding."""
    dim: int | None
    """Split dimension; None: the parameter is replicated."""
    offset: int
    """First logical index along ``dim``; 0 if replicated."""
    length: int
    """Number of logical indices along ``dim``; the whole extent if replicated."""
    local_shape: tuple[int, ...]
    """Shape of the local tensor, padding included."""

    @property
    def split_dim(self) -> int:
        """``dim``, or 0 if the parameter is replicated."""
        return 0 if self.dim is None else self.dim

    def true_part(self, local: Tensor) -> Tensor:
        """The local tensor without its padding (a view)."""
        return local.narrow(self.split_dim, 0, self.length)
