"""Verification and random access to the tensors of a checkpoint, without an engine or ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    EMA,
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
from megatron_deberta.model.low_rank import is_trained


class Slice(NamedTuple):
    """Indices ``[start, stop)`` of one dimension of a tensor."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these indices of a tensor."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class WeightSource(Protocol):
    """Weights by canonical name, such as those of a checkpoint."""

    @property
    def path(self) -> Path:
        """Where they are stored."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical shape by canonical name."""

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""


class StoredRun(WeightSource, Protocol):
    """Weights with the metadata of their checkpoint."""

    @property
    def metadata(self) -> CheckpointMetadata:
        """Metadata of the checkpoint."""


class WeightView:
    """Weights of another source, unchanged; subclasses override ``tensor`` or ``shapes``.

    Args:
        source: the weights.

    Attributes:
        path: where they are stored.
        shapes: logical shape by canonical name.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.path = source.path
        self.shapes = source.shapes

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        return self._source.tensor(name, kind, part)


class RunView(WeightView):
    """View of a checkpoint, with its metadata.

    Args:
        source: the checkpoint.

    Attributes:
        metadata: of the checkpoint.
    """

    def __init__(self, source: StoredRun) -> None:
        super().__init__(source)
        self.metadata = source.metadata


class CheckpointReader:
    """Reader of a committed checkpoint.

    Opening it verifies the manifest against ``COMMITTED``; ``verify`` checks the tensor files.

    Args:
        path: folder of one step.

    Attributes:
        path: folder of the step.
        metadata: step, config, fingerprints and scalars.
        shapes: logical shape by canonical name, in the model's order.
        kinds: ``KINDS``, with ``EMA`` if the run averages, or ``("weight",)`` for imported weights.

    Raises:
        CheckpointError: it is not committed, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        manifest = _read_manifest(self.path)
        self.metadata = manifest.metadata
        self.shapes = manifest.parameters
        self.kinds = manifest.kinds
        self._files = manifest.files
        self._fragments: dict[str, list[Fragment]] = {name: [] for name in self.shapes}
        for fragment in manifest.fragments:
            self._fragments[fragment.parameter].append(fragment)
        self._open_files: dict[str, Any] = {}

    def verify(self, *, hashes: bool = True, share: int = 0, num_shares: int = 1) -> None:
        """Verify tensor files against the manifest.

        Args:
            hashes: compare SHA-256, which reads the files; sizes are always compared.
            share: first file; with ``num_shares``, divides the work among ranks.
            num_shares: check every ``num_shares``-th file.

        Raises:
            CheckpointError: a file is missing, truncated or altered.
        """
        for entry in self._files[share::num_shares]:
            file = self.path / entry.name
            try:
                size = file.stat().st_size
                digest = sha256_file(file) if hashes and size == entry.size else entry.sha256
            except OSError as error:
                raise CheckpointError(f"{file}: {error.strerror}; it is damaged") from error
            if size != entry.size:
                raise CheckpointError(f"{file} has {size} bytes, not {entry.size}; it is damaged")
            if digest != entry.sha256:
                raise CheckpointError(f"{file}: SHA-256 differs from the manifest's; it is damaged")

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter, or a slice of it.

        Args:
            name: canonical name.
            kind: one of ``kinds``.
            part: indices to read; None: all.

        Returns:
            fp32 CPU tensor. The moments of a frozen parameter are 0, and its average is its weight.

        Raises:
            CheckpointError: there is no such parameter, kind or index, or a file is damaged.
        """
        shape = self.shapes.get(name)
        if shape is None or kind not in self.kinds:
            raise CheckpointError(f"{self.path} holds no {kind} of {name}; it is of another model")
        if kind != WEIGHT and not is_trained(name, self.metadata.lora_rank):
            weight = self.tensor(name, WEIGHT, part)
            return weight if kind == EMA else torch.zeros_like(weight)
        requested = [range(extent) for extent in shape]
        if part is not None:
            dim, start, stop = part
            if not 0 <= start <= stop <= shape[dim]:
                raise CheckpointError(
                    f"{self.path}: {name} has {shape[dim]} indices along dimension {dim}, "
                    f"not {start} to {stop}; it is of another model"
                )
            requested[dim] = range(start, stop)
        key = tensor_key(kind, name)
        # Files first: their headers are checked against the manifest's shapes before any memory
        # is allocated for these.
        overlaps = [
            found
            for fragment in self._fragments[name]
            if (found := self._open_overlap(fragment, key, requested)) is not None
        ]
        result = torch.empty([len(extent) for extent in requested], dtype=torch.float32)
        for tensor, source, target in overlaps:
            result[target] = tensor[source]
        return result

    def _open_overlap(
        self, fragment: Fragment, key: str, requested: list[range]
    ) -> tuple[Any, tuple[slice, ...], tuple[slice, ...]] | None:
        """Open the part of the requested index ranges that a fragment contains.

        Returns:
            Its tensor, the indices in it, and those in the result; None: it contains none.
        """
        stored = [range(extent) for extent in self.shapes[fragment.parameter]]
        stored[fragment.dim] = range(fragment.offset, fragment.offset + fragment.length)
        overlap = [
            range(max(s.start, r.start), min(s.stop, r.stop))
            for s, r in zip(stored, requested, strict=True)
        ]
        if not all(overlap):
            return None
        tensor = self._open_tensor(fragment, key, tuple(map(len, stored)))
        source = tuple(_relative(o, s) for o, s in zip(overlap, stored, strict=True))
        target = tuple(_relative(o, r) for o, r in zip(overlap, requested, strict=True))
        return tensor, source, target

    def _open_tensor(self, fragment: Fragment, key: str, shape: tuple[int, ...]) -> Any:
        file = self.path / fragment.file
        try:
            if fragment.file not in self._open_files:
                self._open_files[fragment.file] = safe_open(file, framework="pt")
            tensor = self._open_files[fragment.file].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if tuple(tensor.get_shape()) != shape or tensor.get_dtype() != "F32":
            raise CheckpointError(f"{file} is damaged: {key} is not fp32 of shape {shape}")
        return tensor


def _relative(indices: range, origin: range) -> slice:
    return slice(indices.start - origin.start, indices.stop - origin.start)


def _read_manifest(path: Path) -> CheckpointManifest:
    try:
        expected = (path / COMMITTED_FILE).read_bytes()
        content = (path / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a committed checkpoint ({Path(error.filename).name} is missing); "
            "give a step folder of a run"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if commit_mark(content) != expected:
        raise CheckpointError(
            f"{path / MANIFEST_FILE}: SHA-256 differs from that in {COMMITTED_FILE}; it is damaged"
        )
    return CheckpointManifest.from_json(content, path / MANIFEST_FILE)
