"""Slices across fragments, and invalid manifests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, KINDS, MANIFEST_FILE, commit_mark
from megatron_deberta.checkpoint.reader import CheckpointReader, Slice
from megatron_deberta.errors import CheckpointError
from tests.support.checkpoints import SHAPES, logical_states, metadata, save_alone, save_on_grid


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint written by four tensor-parallel ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_dir = tmp_path_factory.mktemp("run")
        path: Path = save_on_grid(monkeypatch, 4, 1, run_dir, metadata(1))[0]
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may alter."""
    return shutil.copytree(saved, tmp_path / saved.name)


@pytest.mark.parametrize("name", SHAPES)
def test_every_slice_of_every_dimension(saved: Path, name: str) -> None:
    reader = CheckpointReader(saved)
    for kind in KINDS:
        logical = logical_states()[name][kind]
        assert torch.equal(reader.tensor(name, kind), logical)
        for dim, extent in enumerate(logical.shape):
            middle = (extent // 3, extent // 2)
            for start, stop in ((0, 0), (0, 1), (1, extent), middle, (1, extent - 1)):
                part = reader.tensor(name, kind, Slice(dim, start, stop))
                assert torch.equal(part, logical.narrow(dim, start, stop - start))


def test_what_is_not_there_is_named(saved: Path) -> None:
    reader = CheckpointReader(saved)
    with pytest.raises(CheckpointError, match="no weight of nothing"):
        reader.tensor("nothing")
    with pytest.raises(CheckpointError, match="no momentum of head.bias"):
        reader.tensor("head.bias", "momentum")
    with pytest.raises(CheckpointError, match="70 indices along dimension 0, not 60 to 71"):
        reader.tensor("head.bias", part=Slice(0, 60, 71))


def forge(path: Path, change: Any) -> None:
    """Alter the manifest and commit it with a correct hash."""
    manifest = json.loads((path / MANIFEST_FILE).read_bytes())
    write_manifest(path, json.dumps(change(manifest) or manifest).encode())


def write_manifest(path: Path, content: bytes) -> None:
    (path / MANIFEST_FILE).write_bytes(content)
    (path / COMMITTED_FILE).write_bytes(commit_mark(content))


FORGERIES = {
    "version": lambda m: m.update(version=2),
    "format": lambda m: m.update(format="zip"),
    "unknown field": lambda m: m["metadata"].update(extra=1),
    "no fields": lambda m: {"a": 1},
    "a list": lambda m: [1],
    "climbing path": lambda m: m["files"][0].update(name="../part-00000-0000.safetensors"),
    "absolute path": lambda m: m["files"][0].update(name="/etc/passwd"),
    "gap": lambda m: m["fragments"].pop(),
    "overlap": lambda m: m["fragments"].append(m["fragments"][0]),
    "unlisted file": lambda m: m["fragments"][0].update(file="part-00099-0000.safetensors"),
    "unlisted parameter": lambda m: m["fragments"][0].update(parameter="other"),
    "dimension beyond shape": lambda m: [f.update(dim=5) for f in m["fragments"]] and None,
    "list for the config": lambda m: m["metadata"].update(config=[]),
    "text for the step": lambda m: m["metadata"].update(step="3"),
    "a step beyond 64 bits": lambda m: m["metadata"].update(step=10**30),
    "text for lengths": lambda m: [f.update(length="4") for f in m["fragments"]] and None,
    "text for dimensions": lambda m: [f.update(dim="0") for f in m["fragments"]] and None,
    "text for scalars": lambda m: m["metadata"]["scalars"].update(adam_step="7"),
    "infinite scalar": lambda m: m["metadata"]["scalars"].update(loss_scale=float("inf")),
    "kinds": lambda m: m.update(kinds=["exp_avg"]),
    "no kinds": lambda m: m.update(kinds=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_manifest_is_rejected(copied: Path, forgery: str) -> None:
    forge(copied, FORGERIES[forgery])
    with pytest.raises(CheckpointError) as rejection:
        CheckpointReader(copied)
    assert "SHA-256" not in str(rejection.value)


@pytest.mark.parametrize("content", [b"", b"\x80", b"[" * 100000, b"null", b"{"])
def test_manifest_that_is_not_json(copied: Path, content: bytes) -> None:
    write_manifest(copied, content)
    with pytest.raises(CheckpointError, match="not a checkpoint manifest"):
        CheckpointReader(copied)


@pytest.mark.parametrize("extent", [5, 10**15])
def test_shapes_are_checked_against_the_file_before_memory_is_allocated(
    tmp_path: Path, extent: int
) -> None:
    path = save_alone(tmp_path, 1)

    def widen(manifest: Any) -> None:
        manifest["parameters"]["embeddings.norm.weight"] = [extent]
        for fragment in manifest["fragments"]:
            if fragment["parameter"] == "embeddings.norm.weight":
                fragment["length"] = extent

    forge(path, widen)
    with pytest.raises(CheckpointError, match="damaged: .* is not fp32 of shape"):
        CheckpointReader(path).tensor("embeddings.norm.weight")
