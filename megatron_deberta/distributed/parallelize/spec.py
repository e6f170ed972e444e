"""What part of each logical parameter a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParameterSpec:
    """A rank's part of one parameter.

    The rank holds indices ``[offset, offset + length)`` of dimension ``dim`` of the logical
    tensor. The tensor it holds may be longer along ``dim`` by zero padding (vocabulary).
    """

    name: str
    """Canonical name (docs/architecture.md)."""
    logical_shape: tuple[int, ...]
    """Shape of the whole parameter, without padding."""
    dim: int | None
    """Split dimension; None: the parameter is replicated."""
    offset: int
    """First logical index held along ``dim``; 0 if replicated."""
    length: int
    """Number of logical indices held along ``dim``; the whole extent if replicated."""
    local_shape: tuple[int, ...]
    """Shape of the tensor this rank holds, padding included."""

    @property
    def split_dim(self) -> int:
        """``dim``, or 0 where the parameter is replicated (a slice of everything)."""
        return 0 if self.dim is None else self.dim

    def true_part(self, local: Tensor) -> Tensor:
        """The held tensor without its padding (a view)."""
        return local.narrow(self.split_dim, 0, self.length)
