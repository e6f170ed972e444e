"""Reads any slice of any parameter out of a checkpoint, whatever layout wrote it.

Owns integrity checks and putting fragments together. Refuses to need an engine or ranks: export
and inspection use it alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    MANIFEST_FILE,
    WEIGHT,
    CheckpointManifest,
    CheckpointMetadata,
    Fragment,
    commit_mark,
    tensor_key,
)
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import sha256_file


class CheckpointReader:
    """A committed checkpoint.

    Opening it checks the manifest against ``COMMITTED``; ``verify`` checks the tensor files.

    Args:
        path: folder of one step.

    Attributes:
        path: that folder.

    Raises:
        CheckpointError: it is not committed, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._manifest = _read_manifest(self.path)
        self._fragments: dict[str, list[Fragment]] = {name: [] for name in self.shapes}
        for fragment in self._manifest.fragments:
            self._fragments[fragment.parameter].append(fragment)
        self._open_files: dict[str, Any] = {}

    @property
    def metadata(self) -> CheckpointMetadata:
        """Step, config, fingerprints, scalars."""
        return self._manifest.metadata

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> logical shape, in the model's order."""
        return self._manifest.parameters

    @property
    def kinds(self) -> tuple[str, ...]:
        """``("weight", "exp_avg", "exp_avg_sq")``, or ``("weight",)`` for imported weights."""
        return self._manifest.kinds

    def verify(self, *, hashes: bool = True, share: int = 0, num_shares: int = 1) -> None:
        """Check tensor files against the manifest.

        Args:
            hashes: compare SHA-256, which reads the files; sizes are always compared.
            share: look only at every ``num_shares``-th file from this one, so that ranks can
                divide the work.
            num_shares: see ``share``.

        Raises:
            CheckpointError: a file is missing, cut or altered; it is named.
        """
        for entry in self._manifest.files[share::num_shares]:
            file = self.path / entry.name
            try:
                size = file.stat().st_size
                digest = sha256_file(file) if hashes and size == entry.size else entry.sha256
            except OSError as error:
                raise CheckpointError(f"{file}: {error.strerror}; it is damaged") from error
            if size != entry.size:
                raise CheckpointError(f"{file} has {size} bytes, not {entry.size}; it is damaged")
            if digest != entry.sha256:
                raise CheckpointError(f"{file}: SHA-256 is not the manifest's; it is damaged")

    def tensor(
        self,
        name: str,
        kind: str = WEIGHT,
        dim: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> Tensor:
        """Read a parameter, or indices ``[start, stop)`` of one of its dimensions.

        Args:
            name: canonical name.
            kind: one of ``kinds``.
            dim: dimension to slice; None reads everything.
            start: first index; None is 0.
            stop: after the last index; None is the end.

        Returns:
            fp32 CPU tensor.

        Raises:
            CheckpointError: there is no such parameter, kind or index, or a file is damaged.
        """
        shape = self.shapes.get(name)
        if shape is None or kind not in self.kinds:
            raise CheckpointError(f"{self.path} holds no {kind} of {name}; it is of another model")
        wanted = [range(extent) for extent in shape]
        if dim is not None:
            extent = shape[dim]
            first, last = 0 if start is None else start, extent if stop is None else stop
            if not 0 <= first <= last <= extent:
                raise CheckpointError(
                    f"{self.path}: {name} has {extent} indices along dimension {dim}, "
                    f"not {first} to {last}; it is of another model"
                )
            wanted[dim] = range(first, last)
        result = torch.empty([len(indices) for indices in wanted], dtype=torch.float32)
        for fragment in self._fragments[name]:
            self._copy_overlap(fragment, tensor_key(kind, name), wanted, shape, result)
        return result

    def _copy_overlap(
        self,
        fragment: Fragment,
        key: str,
        wanted: list[range],
        shape: tuple[int, ...],
        result: Tensor,
    ) -> None:
        """Copy what a fragment has of the wanted index ranges to its place in the result."""
        held = [range(extent) for extent in shape]
        held[fragment.dim] = range(fragment.offset, fragment.offset + fragment.length)
        overlap = [
            range(max(h.start, w.start), min(h.stop, w.stop))
            for h, w in zip(held, wanted, strict=True)
        ]
        if not all(overlap):
            return
        stored = self._stored(fragment, key, tuple(len(indices) for indices in held))
        source = tuple(_relative(o, h) for o, h in zip(overlap, held, strict=True))
        target = tuple(_relative(o, w) for o, w in zip(overlap, wanted, strict=True))
        result[target] = stored[source]

    def _stored(self, fragment: Fragment, key: str, shape: tuple[int, ...]) -> Any:
        file = self.path / fragment.file
        try:
            if fragment.file not in self._open_files:
                self._open_files[fragment.file] = safe_open(file, framework="pt")
            stored = self._open_files[fragment.file].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if tuple(stored.get_shape()) != shape or stored.get_dtype() != "F32":
            raise CheckpointError(f"{file} is damaged: {key} is not fp32 of shape {shape}")
        return stored


def _relative(indices: range, origin: range) -> slice:
    return slice(indices.start - origin.start, indices.stop - origin.start)


def _read_manifest(path: Path) -> CheckpointManifest:
    try:
        expected = (path / COMMITTED_FILE).read_bytes()
        content = (path / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is no committed checkpoint ({Path(error.filename).name} is missing); "
            "name a step folder of a run"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if commit_mark(content) != expected:
        raise CheckpointError(
            f"{path / MANIFEST_FILE}: SHA-256 is not the one in {COMMITTED_FILE}; it is damaged"
        )
    return CheckpointManifest.from_json(content, path / MANIFEST_FILE)
