"""Loss and gradients are equal on all tensor-parallel layouts, in float64 with dropout.

After backward on each rank, replicated parameters must have whole gradients, and split ones the
rank's part. Then the same with the engines for the plain encoder, whose last norms and biases,
unlike those of the pretraining model, are not followed by another layer.

"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.deepspeed_engine import zero3_partition
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import DebertaBackbone, DropoutSeeds
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import LossSums, MaskedLanguageModel, ModelLosses
from tests.support.layout_matrix import MODEL, assemble, moments, relative_error
from tests.support.ranks import RankPool, grid
from tests.support.selection import every
from tests.support.tolerances import FP64, LAYOUT_GRADIENT

BASE = replace(MODEL, num_layers=3)
MODELS = {
    "1.5b-like": BASE,
    "v1-like": replace(
        BASE,
        conv_kernel_size=0,
        position_buckets=0,
        share_position_projections=False,
        normalize_position_table=False,
        key_bias=False,
        position_key_bias=False,
    ),
    "roberta-like": replace(
        BASE,
        conv_kernel_size=0,
        position_terms="none",
        mask_decoder_passes=0,
        absolute_positions="input",
    ),
}


MODELS |= {
    "pairs": replace(BASE, type_vocab_size=2, next_sentence_head=True),
    "bert-like": replace(MODELS["roberta-like"], type_vocab_size=2, next_sentence_head=True),
}


class EncoderProbe(DebertaBackbone):
    """The plain encoder, every layer on the token sequence, with an artificial loss."""

    def forward(self, batch: Batch, seeds: DropoutSeeds | None) -> ModelLosses:
        hidden = self.encode(batch.inputs, seeds)
        weights = torch.linspace(-1, 1, hidden.size(-1), dtype=hidden.dtype)
        real = batch.inputs.is_token.unsqueeze(-1)
        loss = (torch.sin(hidden * weights) * real).sum()
        return ModelLosses({"probe": LossSums(loss, batch.inputs.is_token.sum())})


def make_batch(documents: bool, pairs: bool = False) -> tuple[Batch, DropoutSeeds]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, BASE.vocab_size, (2, 16), generator=generator)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 11:] = False
    picked = torch.tensor([[0, 5, 9, 15], [3, 4, 10, -1]])
    labels = torch.where(picked >= 0, ids.gather(1, picked.clamp(min=0)), -100)
    samples = torch.tensor([100, 2**40])
    optional = {}
    if documents:
        edges = torch.tensor([[6], [4]])
        place = torch.arange(16).expand(2, 16)
        optional["document_ids"] = (place >= edges).long()
        optional["position_ids"] = torch.where(place >= edges, place - edges, place)
    if pairs:
        optional["token_type_ids"] = (torch.arange(16) > 7).long().expand(2, 16)
    inputs = ModelInputs(ids.masked_fill(~mask, 0), mask, **optional)
    next_sentence = torch.tensor([1, 0]) if pairs else None
    batch = Batch(inputs, picked, labels, samples, next_sentence)
    return batch, DropoutSeeds(11, 5, samples)


def run_layout(rank: int, config: RunConfig, probe: bool, documents: bool) -> dict[str, Any]:
    """Return this rank's loss and gradients (true parts), with their specs."""
    tp_size = config.parallel.tensor_parallel_size
    groups = single_process_groups(torch.device("cpu")) if tp_size == 1 else grid(tp_size)
    sharded = build_model(
        config,
        groups,
        torch.float64,
        model_class=EncoderProbe if probe else MaskedLanguageModel,
    )
    sharded.module.train()
    # Only the position of the fused functions matters here; compiling them takes seconds per shape.
    torch.compiler.set_stance("force_eager")
    pairs = config.model.next_sentence_head
    losses = sharded.module(*make_batch(documents, pairs)).losses.values()
    loss = torch.stack([each.loss for each in losses]).sum()
    count = sum(int(each.correct) for each in losses)
    loss.backward()
    gradients = {
        name: (sharded.specs[name], sharded.specs[name].true_part(parameter.grad))
        for name, parameter in sharded.module.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.item(), "count": count, "gradients": gradients}


def check(
    pool: RankPool, model: ModelConfig, parallel: ParallelConfig, *, probe: bool, documents: bool
) -> None:
    reference = run_layout(0, RunConfig(model=model), probe, documents)
    ranks = pool.run(run_layout, RunConfig(model=model, parallel=parallel), probe, documents)
    assert reference["gradients"]
    for rank in ranks:
        assert rank["count"] == reference["count"]
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-12)
        assert rank["gradients"].keys() == reference["gradients"].keys()
    for name, (_, expected) in reference["gradients"].items():
        actual = assemble([rank["gradients"][name] for rank in ranks], len(ranks))
        torch.testing.assert_close(
            actual, expected, **FP64, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("probe", [False, True], ids=["pretraining", "encoder"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", every(2, [True, False], ["slow"]), ids=["tp+sp", "tp"])
def test_two_ranks(two_ranks: RankPool, sequence: bool, recompute: Any, probe: bool) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=sequence, recompute=recompute
    )
    check(two_ranks, BASE, parallel, probe=probe, documents=False)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "tp+sp"]
)
@pytest.mark.parametrize("documents", [False, True], ids=["row", "documents"])
def test_models(two_ranks: RankPool, sequence: bool, model: str, documents: bool) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence)
    check(two_ranks, MODELS[model], parallel, probe=False, documents=documents)


@pytest.mark.parametrize("probe", [False, True], ids=["pretraining", "encoder"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_four_ranks(four_ranks: RankPool, sequence: bool, probe: bool) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, sequence_parallel=sequence)
    check(four_ranks, BASE, parallel, probe=probe, documents=False)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_fused(two_ranks: RankPool, sequence: bool) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=sequence, recompute="selective", fuse=True
    )
    check(two_ranks, BASE, parallel, probe=False, documents=False)


def engine_config(engine: Any, stage: Any, parallel: ParallelConfig) -> RunConfig:
    return RunConfig(
        model=BASE,
        parallel=replace(parallel, engine=engine, zero_stage=stage),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1, clip_grad_norm=0.0),
        train=TrainConfig(global_batch_size=2, micro_batch_size=2),
    )


def encoder_moments(rank: int, config: RunConfig) -> dict[str, Any]:
    """Return the first moments of one step of the probe: 1 - beta1 times the whole gradient."""
    deepspeed_engine.PERSISTENCE_THRESHOLD = (
        0  # Tensors of this size would not be partitioned otherwise.
    )
    tp_size = config.parallel.tensor_parallel_size
    groups = single_process_groups(torch.device("cpu")) if tp_size == 1 else grid(tp_size)
    partition = None
    if config.parallel.engine == "deepspeed" and config.parallel.zero_stage == 3:
        partition = functools.partial(zero3_partition, groups=groups, config=config)
    model = build_model(
        config, groups, torch.float32, model_class=EncoderProbe, partition=partition
    )
    model.module.train()
    torch.compiler.set_stance("force_eager")
    engine = build_engine(config, model.module, model.specs, groups)
    engine.backward(engine.module(*make_batch(documents=False)).losses["probe"].loss)
    assert not engine.step(1e-3).skipped
    found = moments(engine, model.specs)
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def encoder_reference() -> dict[str, Any]:
    return encoder_moments(0, engine_config("plain", 0, ParallelConfig()))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(
    "fuse", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "fused"]
)
def test_the_plain_encoder_through_engines(
    two_ranks: RankPool,
    encoder_reference: dict[str, Any],
    fuse: bool,
    sequence: bool,
    stage: int,
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence, fuse=fuse)
    ranks = two_ranks.run(encoder_moments, engine_config("deepspeed", stage, parallel))
    last = f"encoder.layers.{BASE.num_layers - 1}."
    for name in ("attention.norm.weight", "ffn.down.bias", "ffn.norm.weight", "ffn.norm.bias"):
        assert encoder_reference[last + name][1].abs().max() > 0
    for name, (_, expected) in encoder_reference.items():
        actual = assemble([rank[name] for rank in ranks], len(ranks))
        assert relative_error(actual, expected) <= LAYOUT_GRADIENT, name
