"""Exports a checkpoint as a folder that transformers loads, checked before it gets its name.

Owns the order of steps and publication. Refuses to publish what does not compute the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.files import published_folder
from megatron_deberta.hf.config import MODELING_MODULE, SpecialIds, choose_model_type
from megatron_deberta.hf.names import ModelType
from megatron_deberta.hf.verify import ExportCheck, check_export
from megatron_deberta.hf.weights import build_filled
from megatron_deberta.hf.write_model import DTYPES, MAX_SHARD_BYTES, write_hf_model
from megatron_deberta.tokenizer import Tokenizer


@dataclass(frozen=True)
class Export:
    """What was exported."""

    model_type: ModelType
    reason: str
    """Why no stock type fits; empty where one does."""
    check: ExportCheck


def export_model(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    output: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Export:
    """Write weights, config, tokenizer and modeling file, compare, then publish at once.

    Args:
        config: the architecture.
        read: gives the logical fp32 tensor of a canonical name.
        tokenizer: the one that training used.
        output: folder to make; must not exist, or be empty.
        dtype: fp32, fp16 or bf16.
        max_shard_bytes: size above which another weight file is begun.

    Raises:
        CheckpointError: the export would not compute what our model computes.
        ConfigError: ``output`` is in use, or the tokenizer has more ids than the model.
    """
    if tokenizer.num_tokens > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.num_tokens} ids, the model {config.vocab_size} rows; "
            "give the tokenizer that the model was trained with"
        )
    model_type, reason = choose_model_type(config)
    ids = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    with output_folder(output) as folder:
        tokenizer.save(str(folder))
        write_hf_model(folder, config, model_type, read, ids, dtype, max_shard_bytes)
        if model_type != "roberta":
            source = Path(__file__).with_name(f"{MODELING_MODULE}.py")
            shutil.copyfile(source, folder / source.name)
        check = check_export(
            folder,
            model_type,
            lambda: build_filled(config, lambda name: read(name).to(DTYPES[dtype]), "reference"),
            tokenizer,
            dtype,
        )
    return Export(model_type, reason, check)


@contextmanager
def output_folder(output: Path) -> Iterator[Path]:
    """Give a folder to fill with a converted model, published as ``output`` if all goes well.

    Raises:
        CheckpointError: it cannot be written.
        ConfigError: ``output`` exists and is not an empty folder.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not empty; remove it or choose another --output")
    try:
        with published_folder(output) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {output}: {error}") from error
