"""Export of a checkpoint to Hugging Face format, verified before it is published."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig, RankingLoss
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.files import FolderInUseError, folder_writer, published_folder
from megatron_deberta.hf.config import (
    DTYPES,
    MODELING_MODULE,
    THRESHOLDS_FIELD,
    UNTRAINED_FIELD,
    SpecialIds,
    choose_model_type,
    to_hf_config,
)
from megatron_deberta.hf.heads import HEADS, cross_encoder_fields
from megatron_deberta.hf.loading import build_with_head, tokenizer_fields
from megatron_deberta.hf.model_card import TrainingFacts, model_card
from megatron_deberta.hf.names import HFTensor, ModelType, hf_tensors
from megatron_deberta.hf.verify import ExportCheck, check_export
from megatron_deberta.model import DebertaBackbone, count_parameters
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.tokenizer.tokenizer import CONFIG_FILE, JSON_FILE

UNKNOWN_TRAINING = TrainingFacts()
POOLING_FOLDER = "1_Pooling"
NORMALIZE_FOLDER = "2_Normalize"
_POOLING_MODES = (
    "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
    "lasttoken",
)  # fmt: skip
"""Keys of ``1_Pooling/config.json`` that all versions of sentence-transformers and
text-embeddings-inference read."""
GENERATOR_FOLDER = "generator"
"""Folder of the generator in the export of replaced-token detection."""
MAX_SHARD_BYTES = 4 << 30
"""Maximum size of a weight file, and of the memory used while writing."""


@dataclass(frozen=True)
class ExportResult:
    """Type and verification of an export."""

    model_type: ModelType
    reason: str
    """Why no stock type fits; empty for stock types."""
    check: ExportCheck


def export_model(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    output: Path,
    *,
    dtype: str = "fp32",
    facts: TrainingFacts = UNKNOWN_TRAINING,
    generator: tuple[ModelConfig, Callable[[str], Tensor]] | None = None,
    generator_facts: TrainingFacts = UNKNOWN_TRAINING,
    extend: Callable[[Path], object] | None = None,
    why_untrained: str = "",
    ranking_loss: RankingLoss = "bce",
    thresholds: Mapping[str, float] | None = None,
) -> ExportResult:
    """Write weights, config, tokenizer, code and model card, verify them, publish the folder.

    Args:
        config: the architecture.
        read: returns the whole fp32 tensor of a canonical name, of the shape
            ``parameter_shapes(config)[name]``.
        tokenizer: the tokenizer used in training.
        output: folder to create; must not exist, or be empty.
        dtype: fp32, fp16 or bf16.
        facts: training of the model, for the model card.
        generator: of replaced-token detection, exported to the folder ``generator`` inside.
        generator_facts: its training, for its model card.
        extend: called with the verified folder before it is published, to add files.
        why_untrained: why the model (or the generator) cannot predict tokens; empty: it can.
        ranking_loss: of the head ``rerank``, the loss that its scores were trained with.
        thresholds: probability from which each label is predicted, by name; None or empty: none.

    Raises:
        CheckpointError: the exported model computes different values than the training model.
        ConfigError: ``output`` is in use, or the tokenizer has more ids than the model.
    """
    if tokenizer.num_tokens > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.num_tokens} ids, the model {config.vocab_size} rows; "
            "give the tokenizer that the model was trained with"
        )
    with output_folder(output) as folder:
        result = _write_export(folder, output.name, config, read, tokenizer, dtype, facts)
        written = folder
        if generator is not None:
            (folder / GENERATOR_FOLDER).mkdir()
            name = f"{output.name}/{GENERATOR_FOLDER}"
            written = folder / GENERATOR_FOLDER
            _write_export(written, name, *generator, tokenizer, dtype, generator_facts)
        if thresholds:
            _add_fields(folder / "config.json", {THRESHOLDS_FIELD: dict(thresholds)})
        if why_untrained:
            _add_fields(written / "config.json", {UNTRAINED_FIELD: why_untrained})
        if config.head == "rerank" and ranking_loss != "bce":
            _add_fields(folder / "config.json", cross_encoder_fields(ranking_loss))
        if extend is not None:
            extend(folder)
    return result


def _write_export(
    folder: Path,
    name: str,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    dtype: str,
    facts: TrainingFacts,
) -> ExportResult:
    """Write one model to an existing folder, and verify it."""
    model_type, reason = choose_model_type(config)
    ids = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    _save_tokenizer(tokenizer, folder, config)
    write_hf_model(folder, config, model_type, read, ids, dtype)
    if HEADS[config.head].is_encoder:
        _write_pooling(folder, config)
    parameters = count_parameters(config)
    card = model_card(name, config, model_type, parameters, facts)
    (folder / "README.md").write_text(card, encoding="utf-8")

    def rounded(parameter: str) -> Tensor:
        return read(parameter).to(DTYPES[dtype])

    def build() -> DebertaBackbone:
        return build_with_head(config, rounded, "reference")

    _add_fields(folder / "config.json", tokenizer_fields(tokenizer, load_tokenizer(str(folder))))
    check = check_export(folder, model_type, build, tokenizer, dtype)
    return ExportResult(model_type, reason, check)


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Save the tokenizer as the model needs it.

    ``truncation=True`` cuts at the model's length, pairs get token types if the model has them, and
    for tags and answers the offsets of pieces are without the space before a word.
    """
    tokenizer.save(str(folder))
    path = folder / CONFIG_FILE
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["model_max_length"] = config.max_position_embeddings
    if config.type_vocab_size > 1:
        fields["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    _write_json(path, fields)
    if config.head in ("tokens", "spans"):
        path = folder / JSON_FILE
        spec = with_trimmed_offsets(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(spec, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def with_trimmed_offsets(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a ``tokenizer.json`` whose offsets exclude the space before a word; ids are the same.

    Args:
        spec: content of the file; returned unchanged if its words are not split at single spaces.
    """
    whole = spec["pre_tokenizer"] or {}
    steps = whole.get("pretokenizers", [whole])
    if any(step.get("type") == "ByteLevel" for step in steps):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        byte_level["use_regex"] = True
        processors = [byte_level, spec["post_processor"]]
        return {**spec, "post_processor": {"type": "Sequence", "processors": processors}}
    first, *others = steps
    replaced = [step.get("pattern") for step in (spec["normalizer"] or {}).get("normalizers", [])]
    collapses = {"Regex": " {2,}"} in replaced and {"Regex": " \\z"} in replaced
    words = (
        first.get("type") == "Metaspace" and first["split"] and first["prepend_scheme"] != "never"
    )
    if not (collapses and words):
        return spec
    # The space is removed, and the one that is put before each word has the span of the word.
    removed = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    steps = [removed, {**first, "prepend_scheme": "always"}, *others]
    return {**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def refuse_existing(output: Path) -> None:
    """Check that an output folder can be created.

    Raises:
        ConfigError: ``output`` exists and is not an empty folder, or another process writes it.
    """
    if writer := folder_writer(output):
        raise ConfigError(
            f"{output} is being written by {writer}; wait for it, or choose another --output"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not empty; remove it or choose another --output")


@contextmanager
def output_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is published as ``output`` if no error occurs.

    Raises:
        CheckpointError: it cannot be written.
        ConfigError: ``output`` exists and is not an empty folder, or another process writes it.
    """
    refuse_existing(output)
    try:
        with published_folder(output, alone=True) as folder:
            yield folder
    except FolderInUseError as error:
        raise ConfigError(
            f"{output} {error.strerror}; wait for it, or choose another --output"
        ) from error
    except (OSError, SafetensorError) as error:
        # Something else may have been written there meanwhile.
        refuse_existing(output)
        raise CheckpointError(f"cannot write {output}: {error}") from error


def write_hf_model(
    directory: Path,
    config: ModelConfig,
    model_type: ModelType,
    read: Callable[[str], Tensor],
    ids: SpecialIds,
    dtype: str = "fp32",
) -> None:
    """Write config, code and safetensors files, holding one file's tensors in memory at a time.

    Args:
        directory: an existing folder.
        config: the architecture.
        model_type: result of `choose_model_type`.
        read: returns the whole fp32 tensor of a canonical name, of the shape
            ``parameter_shapes(config)[name]``.
        ids: special token ids of the tokenizer.
        dtype: fp32, fp16 or bf16.

    Raises:
        CheckpointError: a weight is beyond fp16's range or has another shape than its config says.
    """
    entries = hf_tensors(config, model_type, ids.pad)
    shards = _split_into_shards(entries, DTYPES[dtype].itemsize)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{suffix}.safetensors"
        tensors = {entry.name: _convert(entry, read, dtype) for entry in shard}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total_size = sum(math.prod(entry.shape) for entry in entries) * DTYPES[dtype].itemsize
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    fields = to_hf_config(config, model_type, ids, torch_name)
    # Without ``auto_map``, the stock class needs no code of this package.
    if "auto_map" in fields:
        file = f"{MODELING_MODULE}.py"
        shutil.copyfile(Path(__file__).with_name(file), directory / file)
    _write_json(directory / "config.json", fields)


def _convert(entry: HFTensor, read: Callable[[str], Tensor], dtype: str) -> Tensor:
    packed = entry.pack([read(name) for name in entry.canonical_names])
    if tuple(packed.shape) != entry.shape:
        raise CheckpointError(
            f"{entry.name}: shape {tuple(packed.shape)} in the checkpoint is not {entry.shape} of "
            "its config; the checkpoint is of another model"
        )
    converted = packed.to(DTYPES[dtype]).contiguous()
    if dtype == "fp16" and not torch.isfinite(converted).all():
        largest = packed.abs().max().item()
        raise CheckpointError(
            f"{entry.name} holds {largest:g}, beyond fp16's range; use --dtype bf16 or fp32"
        )
    return converted


def _split_into_shards(entries: list[HFTensor], itemsize: int) -> list[list[HFTensor]]:
    shards: list[list[HFTensor]] = [[]]
    shard_bytes = 0
    for entry in entries:
        size = math.prod(entry.shape) * itemsize
        if shards[-1] and shard_bytes + size > MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(entry)
        shard_bytes += size
    return shards


def _write_pooling(folder: Path, config: ModelConfig) -> None:
    """Make an export of an encoder a sentence-transformers model with mean pooling.

    Mean pooling, because the head ``embed`` has it, and no objective of pretraining trains the
    state of the first token for sentences.
    """
    kinds = {"": "Transformer", POOLING_FOLDER: "Pooling"}
    if config.normalize_embeddings:
        kinds[NORMALIZE_FOLDER] = "Normalize"
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": config.hidden_size}
    pooling |= {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in _POOLING_MODES}
    length = {"max_seq_length": config.max_position_embeddings, "do_lower_case": False}
    for kind in filter(None, kinds):
        (folder / kind).mkdir()
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", length)
    _write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    _write_json(folder / POOLING_FOLDER / "config.json", pooling)


def _add_fields(path: Path, fields: dict[str, Any]) -> None:
    _write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **fields})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
