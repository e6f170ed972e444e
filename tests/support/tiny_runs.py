"""Runs with random weights, and their export."""

from __future__ import annotations

from pathlib import Path

from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.cli.main import main
from megatron_deberta.config import config_to_dict
from megatron_deberta.config.schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.model import parameter_shapes
from tests.support.tiny_models import random_weights, tiny_tokenizer


def save_run(
    config: ModelConfig,
    run_dir: Path,
    tokenizer_dir: Path,
    step: int = 3,
    train: TrainConfig | None = None,
    data: DataConfig | None = None,
) -> None:
    """Write a checkpoint of a pretrained model with random weights, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(tokenizer_dir))
    run = RunConfig(
        model=config,
        objective=ObjectiveConfig(name=config.head),
        data=data or DataConfig(train=("1", "shards/books"), sequence_length=32),
        train=train or TrainConfig(),
    )
    metadata = CheckpointMetadata(
        step=step,
        consumed_samples=0,
        config=config_to_dict(run),
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_path=str(tokenizer_dir),
    )
    weights = random_weights(config, seed=step)
    save_weights(run_dir, weights.items(), parameter_shapes(config), metadata)


def export_run(run: Path, output: Path, *options: str) -> Path:
    """Export a run, or one of its checkpoints, for transformers; return the folder."""
    assert main(["convert", "--checkpoint", str(run), "--output", str(output), *options]) == 0
    return output
