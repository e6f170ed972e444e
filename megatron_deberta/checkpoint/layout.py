"""On-disk layout of checkpoints: file names and the manifest (docs/checkpoint-format.md)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import Count, Number, parse_json, read_json

FORMAT = "megatron_deberta checkpoint"
FORMAT_VERSION = 1

WEIGHT = "weight"
EMA = "ema"
# Components of a parameter's state, named as in ``engine.base.ParameterState``.
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")

MANIFEST_FILE = "manifest.json"
# Written last; contains the SHA-256 of the manifest, which contains those of the files.
COMMITTED_FILE = "COMMITTED"
# Its name until the commit: a step folder that contains it was left by a killed save.
UNCOMMITTED_FILE = f".{COMMITTED_FILE}"

# In the run folder: step and score of the checkpoint with the best validation score.
BEST_FILE = "best.json"

STAGING_PREFIX = ".staging-"
DELETING_PREFIX = ".deleting-"
_STEP_NAME = re.compile(r"step_(\d{8})")
_HIDDEN_NAME = re.compile(r"\.(staging|deleting)-step_\d{8}(\.\d+)?")
_TENSOR_FILE = re.compile(r"part-\d{5}-\d{4}\.safetensors")


def state_kinds(config: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the kinds of state that a run with this config, as plain JSON types, saves."""
    return (*KINDS, EMA) if config.get("optimizer", {}).get("ema_decay") else KINDS


EngineScalar = Annotated[int | float, Field(ge=-(1 << 53), le=1 << 53, allow_inf_nan=False)]


class Best(TypedDict):
    """Content of ``best.json``.

    Attributes:
        step: of the checkpoint.
        score: on the validation examples.
        examples: fingerprint of these; older records have none.
    """

    step: Count
    score: Number | None
    examples: NotRequired[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMetadata:
    """State of a run besides its tensors.

    Attributes:
        step: completed optimizer steps.
        consumed_samples: global samples consumed by those steps: the complete data position.
        config: resolved ``RunConfig`` as plain JSON types, including seeds.
        tokenizer_fingerprint: content hash of the tokenizer.
        tokenizer_path: where it was.
        data_fingerprint: content hash of the shards; empty for imported weights.
        scalars: engine state: Adam's step count, loss scale and its counters.
        layout: ``tp_size`` and ``dp_size`` of the ranks that saved; information only.
        guard: state of the numeric guard; empty in older checkpoints.
        why_untrained: why the model cannot predict tokens before it is trained, of an import
            without a trained head; empty: it can. Not written if empty.
    """

    step: Count
    consumed_samples: Count
    config: dict[str, dict[str, Any]]
    tokenizer_fingerprint: str
    tokenizer_path: str
    data_fingerprint: str = ""
    scalars: dict[str, EngineScalar] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    why_untrained: str = ""

    @property
    def lora_rank(self) -> int | None:
        """Rank of the low-rank adapters (``finetune.lora_rank``); None: all weights are trained."""
        rank: int | None = self.config.get("finetune", {}).get("lora_rank")
        return rank


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Tensor file of a checkpoint."""

    name: str
    size: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """Indices ``[offset, offset + length)`` of one dimension of a parameter's state, in one file.

    ``dim`` is 0, with the whole extent, for parameters that are not split.
    """

    parameter: str
    file: str
    dim: Count
    offset: Count
    length: Count


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Content of a checkpoint besides its tensors.

    Attributes:
        metadata: state of the run.
        kinds: a prefix of ``(*KINDS, EMA)``; ``("weight",)`` for imported weights.
        parameters: logical shape, without padding, by canonical name, in the model's order.
        files: the tensor files.
        fragments: what they contain.
    """

    metadata: CheckpointMetadata
    kinds: tuple[str, ...]
    parameters: dict[str, tuple[Count, ...]]
    files: tuple[FileEntry, ...]
    fragments: tuple[Fragment, ...]

    def to_json(self) -> bytes:
        """Return the content of ``manifest.json``."""
        content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        if not self.metadata.why_untrained:
            del content["metadata"]["why_untrained"]
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, source: Path) -> CheckpointManifest:
        """Parse and validate the content of ``manifest.json``.

        Raises:
            CheckpointError: it is not a manifest, has another version, names a file outside the
                checkpoint, or its fragments do not tile the parameters.
        """
        what, remedy = "a checkpoint manifest", "use the release that wrote it"
        header = parse_json(
            content, _Header, source, what, error=CheckpointError, remedy=remedy,
            ignore_unknown=True,
        )  # fmt: skip
        if (header["format"], header["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{source}: format {header['format']!r} version {header['version']!r} is not "
                f"{FORMAT!r} version {FORMAT_VERSION}; {remedy}"
            )
        file = parse_json(
            content, _ManifestFile, source, what, error=CheckpointError, remedy=remedy
        )
        manifest = cls(file.metadata, file.kinds, file.parameters, file.files, file.fragments)
        manifest._check(source)
        return manifest

    def _check(self, source: Path) -> None:
        names = {entry.name for entry in self.files}
        for name in names:
            if not _TENSOR_FILE.fullmatch(name):
                raise CheckpointError(f"{source}: {name!r} is not the name of a tensor file")
        known = (*KINDS, EMA)
        if not self.kinds or self.kinds != known[: len(self.kinds)]:
            raise CheckpointError(f"{source}: kinds {self.kinds} are not a prefix of {known}")
        fragments: dict[str, list[Fragment]] = {name: [] for name in self.parameters}
        for fragment in self.fragments:
            if fragment.parameter not in fragments or fragment.file not in names:
                raise CheckpointError(
                    f"{source}: {fragment} refers to an unlisted parameter or file"
                )
            fragments[fragment.parameter].append(fragment)
        for name, parts in fragments.items():
            if not _covers(parts, self.parameters[name]):
                raise CheckpointError(f"{source}: fragments of {name} do not cover its shape")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ManifestFile(CheckpointManifest):
    """Content of ``manifest.json`` with its header."""

    format: str
    version: int


class _Header(TypedDict):
    """What is read first of ``manifest.json``."""

    format: str
    version: int


@dataclass(frozen=True, slots=True)
class _PartIndex:
    """Content of a rank's index."""

    files: list[FileEntry]
    fragments: list[Fragment]


def _covers(fragments: Sequence[Fragment], shape: tuple[int, ...]) -> bool:
    """Return whether the fragments tile a parameter along one dimension."""
    dims = {fragment.dim for fragment in fragments}
    if len(dims) != 1 or not 0 <= (dim := dims.pop()) < len(shape):
        return False
    end = 0
    for fragment in sorted(fragments, key=lambda part: part.offset):
        if fragment.offset != end or fragment.length <= 0:
            return False
        end += fragment.length
    return end == shape[dim]


def tensor_key(kind: str, parameter: str) -> str:
    """Return the name of a tensor in a safetensors file."""
    return f"{kind}/{parameter}"


def tensor_file(rank: int, number: int) -> str:
    """Return the name of the ``number``-th file that a rank writes."""
    return f"part-{rank:05d}-{number:04d}.safetensors"


def part_index_file(rank: int) -> str:
    """Return the name of a rank's temporary index, which rank 0 merges into the manifest."""
    return f"part-{rank:05d}.json"


def checkpoints_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Return the folder of a run's checkpoints.

    Raises:
        CheckpointError: it is a symbolic link, through which files elsewhere would be deleted.
    """
    folder = Path(run_dir) / "checkpoints"
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a symbolic link, which is not followed; set train.run_dir to a folder on "
            "the other disk"
        )
    return folder


def step_dir(run_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return checkpoints_dir(run_dir) / f"step_{step:08d}"


def commit_mark(manifest: bytes) -> bytes:
    """Return the content of ``COMMITTED``: the manifest's SHA-256 and a newline."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def read_mark(checkpoint: Path) -> str:
    """Return what ``COMMITTED`` of a checkpoint holds, without the newline; damage stays in it."""
    return (checkpoint / COMMITTED_FILE).read_text(encoding="ascii", errors="replace").strip()


def committed_steps(run_dir: str | os.PathLike[str]) -> list[int]:
    """List the steps of a run's committed checkpoints, ascending."""
    return [step for step in _steps(run_dir) if (step_dir(run_dir, step) / COMMITTED_FILE).exists()]


def record_best(
    run_dir: str | os.PathLike[str], step: int, score: float, examples: str = ""
) -> None:
    """Record a run's best checkpoint, atomically; arguments as in `Best`."""
    best = Best(step=step, score=score)
    if examples:
        best["examples"] = examples
    write_atomically(Path(run_dir) / BEST_FILE, json.dumps(best).encode())


def read_best(run_dir: str | os.PathLike[str]) -> Best | None:
    """Return the record of a run's best checkpoint; None: there is none."""
    file = Path(run_dir) / BEST_FILE
    if not file.exists():
        return None
    return read_json(
        file, Best, "a record of the best checkpoint", remedy="remove it", error=CheckpointError
    )


def forget_best(run_dir: str | os.PathLike[str]) -> None:
    """Remove the record of a run's best checkpoint, if there is one."""
    (Path(run_dir) / BEST_FILE).unlink(missing_ok=True)


def find_best(run_dir: str | os.PathLike[str]) -> Path | None:
    """Return a run's best checkpoint, if it is recorded and committed."""
    best = read_best(run_dir)
    if best is None:
        return None
    path = step_dir(run_dir, best["step"])
    return path if (path / COMMITTED_FILE).exists() else None


def leftovers(run_dir: str | os.PathLike[str]) -> list[Path]:
    """List the folders left by killed saves and deletions of this software."""
    hidden = checkpoints_dir(run_dir).glob(".*")
    staged = [path for path in hidden if _HIDDEN_NAME.fullmatch(path.name)]
    return sorted([*staged, *filter(_is_unfinished_save, _uncommitted(run_dir))])


def foreign_folders(run_dir: str | os.PathLike[str]) -> list[Path]:
    """List uncommitted step folders that no save has left, such as incomplete copies."""
    return [path for path in _uncommitted(run_dir) if not _is_unfinished_save(path)]


def _uncommitted(run_dir: str | os.PathLike[str]) -> list[Path]:
    paths = (step_dir(run_dir, step) for step in _steps(run_dir))
    return [path for path in paths if not (path / COMMITTED_FILE).exists()]


def _is_unfinished_save(path: Path) -> bool:
    return (path / UNCOMMITTED_FILE).exists() and not path.is_symlink()


def _steps(run_dir: str | os.PathLike[str]) -> list[int]:
    folder = checkpoints_dir(run_dir)
    if not folder.is_dir():
        return []
    matches = (_STEP_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def part_index_json(files: Sequence[FileEntry], fragments: Sequence[Fragment]) -> bytes:
    """Return the content of a rank's index."""
    content = {"files": [asdict(f) for f in files], "fragments": [asdict(f) for f in fragments]}
    return json.dumps(content).encode()


def read_part_index(path: Path) -> tuple[list[FileEntry], list[Fragment]]:
    """Read a rank's index; inverse of ``part_index_json``.

    Raises:
        CheckpointError: it is damaged.
    """
    index = read_json(path, _PartIndex, "an index", error=CheckpointError, remedy="save again")
    return index.files, index.fragments
