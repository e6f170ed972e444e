"""Runs of replaced-token detection on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig, RTDConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.ops.cross_entropy import CrossEntropy
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.layout_matrix import (
    GLOBAL_BATCH,
    MODEL,
    Layout,
    micro_batches,
    moments,
    run_config,
)
from tests.support.ranks import grid

Samples = dict[int, list[int]]
RTD = replace(MODEL, head="rtd")
JOINT = RTDConfig()
ALTERNATING = RTDConfig(update="alternating", discriminator_learning_rate=5e-4)


def rtd_config(
    layout: Layout | None, model: ModelConfig = RTD, *, micro_batch: int = 2, **sections: Any
) -> RunConfig:
    """Return the config of a layout; None: one process with the plain engine."""
    config = run_config(layout, micro_batch=micro_batch)
    return replace(config, model=model, objective=ObjectiveConfig(name="rtd"), **sections)


def record_samples(module: nn.Module) -> Samples:
    """Return a table that every pass of the generator fills: sample index -> drawn pieces."""
    drawn: Samples = {}

    def record(_: nn.Module, arguments: tuple[Any, ...], result: CrossEntropy) -> None:
        batch: Batch = arguments[0]
        assert result.samples is not None
        rows = result.samples.view(batch.labels.shape)
        for index, positions, pieces in zip(
            batch.sample_index.tolist(),
            batch.masked_positions,
            rows,
            strict=True,
        ):
            drawn[index] = pieces[positions >= 0].tolist()

    module.get_submodule("generator").register_forward_hook(record)
    return drawn


def run_rtd(
    rank: int,
    layout: Layout | None,
    model: ModelConfig,
    steps: int,
    rtd: RTDConfig = JOINT,
) -> dict[str, Any]:
    """Return losses, metrics, samples and moments of a run with dropout on this rank."""
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    groups = grid(layout.tp_size) if layout else single_process_groups(torch.device("cpu"))
    micro_batch = GLOBAL_BATCH // groups.dp_size // 2
    config = rtd_config(layout, model, micro_batch=micro_batch, rtd=rtd)
    sharded = build_rank_model(config, groups)
    sharded.module.train()
    samples = record_samples(sharded.module)
    engine = build_engine(config, sharded.module, sharded.specs, groups)
    take_step = TrainStep(engine, config, groups)
    losses: list[float] = []
    norms: list[float] = []
    first: dict[str, Any] = {}
    for step in range(steps):
        result = take_step(step, micro_batches(step, groups, micro_batch=micro_batch))
        losses += [result.loss, result.metrics["discriminator_loss"]]
        norms.append(result.outcome.grad_norm)
        if rtd.update == "alternating":
            norms.append(result.metrics["discriminator_grad_norm"])
        if step == 0:
            first = moments(engine, sharded.specs)
    engine.destroy()
    return {"losses": losses, "norms": norms, "first": first, "samples": samples}
