"""Engine state moves between layouts, ZeRO stages and formats on real ranks bit-identically."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.config.schema import (
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import ShardedModel
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.step import TrainStep
from tests.support.checkpoints import metadata, save_state
from tests.support.layout_matrix import build
from tests.support.ranks import RankPool, grid
from tests.support.tiny_models import V2, tiny_tokenizer
from tests.support.tiny_runs import export_run
from tests.support.toy_engine import states

CHAIN = (
    ("deepspeed", "fp32", 1, 2),
    ("deepspeed", "fp32", 2, 4),
    ("deepspeed", "bf16", 3, 1),
    ("plain", "fp32", 0, 2),
    ("deepspeed", "fp16", 1, 1),
    ("deepspeed", "fp32", 0, 1),
    ("deepspeed", "fp32", 3, 2),
)
"""Engine, format, ZeRO stage and tensor-parallel size of each layout; the world has 4 ranks."""


def config_of(engine: str, dtype: str, stage: int, tp_size: int) -> RunConfig:
    return RunConfig(
        model=replace(V2, num_layers=2, conv_kernel_size=3),
        parallel=ParallelConfig(
            engine=engine,  # type: ignore[arg-type]
            zero_stage=stage,  # type: ignore[arg-type]
            tensor_parallel_size=tp_size,
            sequence_parallel=tp_size > 1,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        train=TrainConfig(steps=10, global_batch_size=8, micro_batch_size=2),
    )


def micro_batches(groups: ProcessGroups, config: RunConfig) -> list[Batch]:
    """Return this rank's part of a global batch of 8 random rows."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, 16)
    whole = Batch(
        ModelInputs(
            torch.randint(5, V2.vocab_size, shape, generator=generator),
            torch.ones(shape, dtype=torch.bool),
        ),
        masked_positions=torch.tensor([[1, 5, 9]]).repeat(8, 1),
        labels=torch.randint(5, V2.vocab_size, (8, 3), generator=generator),
        sample_index=torch.arange(8),
    )
    share, size = 8 // groups.dp_size, config.train.micro_batch_size
    first = groups.dp_rank * share
    return [
        whole._map(lambda tensor, at=at: tensor[at : at + size])
        for at in range(first, first + share, size)
    ]


def start(
    place: tuple[str, str, int, int],
) -> tuple[RunConfig, ProcessGroups, ShardedModel, Engine]:
    config = config_of(*place)
    groups = grid(place[-1])
    return config, groups, *build(config, groups)


def train_and_save(rank: int, run_dir: str, place: tuple[str, str, int, int]) -> list[float]:
    config, groups, model, engine = start(place)
    step = TrainStep(engine, config, groups)
    losses = [step(number, micro_batches(groups, config)).loss for number in range(2)]
    save_state(run_dir, engine, model.specs, groups, metadata(2, config))
    engine.destroy()
    return losses


def move(rank: int, source: str, target: str, place: tuple[str, str, int, int]) -> float:
    """Load, save again, and take a step; return its loss."""
    config, groups, model, engine = start(place)
    reader = store.choose_intact(source, groups)
    assert reader is not None
    store.load(reader, engine, model.specs)
    save_state(target, engine, model.specs, groups, metadata(2, config))
    loss = TrainStep(engine, config, groups)(2, micro_batches(groups, config)).loss
    engine.destroy()
    gc.collect()
    return loss


def content(run_dir: Path) -> dict[tuple[str, str], Tensor]:
    reader = CheckpointReader(step_dir(run_dir, 2))
    return {
        (name, kind): reader.tensor(name, kind) for name in reader.shapes for kind in reader.kinds
    }


@pytest.mark.slow
def test_state_is_unchanged_after_all_layouts(four_ranks: RankPool, tmp_path: Path) -> None:
    losses = four_ranks.run(train_and_save, str(tmp_path / "0"), CHAIN[0])
    assert all(rank == losses[0] for rank in losses)
    original = content(tmp_path / "0")
    assert any(tensor.any() for (_, kind), tensor in original.items() if kind == "exp_avg_sq")
    next_losses = {}
    for number, place in enumerate(CHAIN[1:], start=1):
        folders = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        ranks = four_ranks.run(move, *folders, place)
        assert all(math.isfinite(loss) and loss == ranks[0] for loss in ranks)
        next_losses[place] = ranks[0]
        moved = content(tmp_path / str(number))
        assert list(moved) == list(original)
        for key, tensor in original.items():
            assert tensor.equal(moved[key]), (place, key)
    in_fp32 = [loss for place, loss in next_losses.items() if place[1] == "fp32"]
    assert in_fp32 == pytest.approx([in_fp32[0]] * len(in_fp32), rel=1e-5)
    assert list(next_losses.values()) == pytest.approx([in_fp32[0]] * len(next_losses), rel=1e-2)


def train_and_save_with_tokenizer(rank: int, run_dir: str, tokenizer_dir: str) -> list[float]:
    """Train two steps on TP 2 x ZeRO-3; return the largest change of each weight."""
    config, groups, model, engine = start(("deepspeed", "fp32", 3, 2))
    before = {name: state.weight.clone() for name, state in states(engine).items()}
    step = TrainStep(engine, config, groups)
    for number in range(2):
        step(number, micro_batches(groups, config))
    named = replace(
        metadata(2, replace(config, data=DataConfig(sequence_length=16))),
        tokenizer_fingerprint=tiny_tokenizer().fingerprint,
        tokenizer_path=tokenizer_dir,
    )
    save_state(run_dir, engine, model.specs, groups, named)
    after = {name: state.weight for name, state in states(engine).items()}
    engine.destroy()
    return [(after[name] - weight).abs().max().item() for name, weight in before.items()]


@pytest.mark.slow
def test_checkpoint_of_tensor_parallel_zero3_ranks_is_exported(
    four_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tokenizer = (str(tmp_path / name) for name in ("run", "tokenizer"))
    tiny_tokenizer().save(tokenizer)
    for changes in four_ranks.run(train_and_save_with_tokenizer, run, tokenizer):
        assert min(changes) > 0
    reader = CheckpointReader(step_dir(run, 2))
    assert reader.metadata.layout == {"tp_size": 2, "dp_size": 2}
    assert len(list(reader.path.glob("part-*.safetensors"))) == 4
    # Compares the logits of the exported model with those of this project's model.
    export_run(tmp_path / "run", tmp_path / "out")
    assert "Verified on real text: largest difference of logits" in capsys.readouterr().out
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, canonical in (
        ("deberta.embeddings.word_embeddings.weight", "embeddings.token.weight"),
        ("deberta.encoder.layer.1.output.dense.weight", "encoder.layers.1.ffn.down.weight"),
        ("lm_predictions.lm_head.bias", "head.bias"),
    ):
        assert exported[name].equal(reader.tensor(canonical)), name
