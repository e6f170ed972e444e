"""Runs with autoregressive batches on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.layout_matrix import GLOBAL_BATCH, Layout, micro_batches, moments, run_config
from tests.support.ranks import grid


def causal_batch(input_ids: Tensor, attention_mask: Tensor, sample_index: Tensor) -> Batch:
    """Return the rows with every next token as a target."""
    following = attention_mask[:, 1:]
    positions = torch.arange(input_ids.size(1) - 1).expand(len(input_ids), -1)
    return Batch(
        ModelInputs(input_ids, attention_mask, causal=True),
        positions.masked_fill(~following, -1),
        input_ids[:, 1:].masked_fill(~following, IGNORED_LABEL),
        sample_index,
    )


def as_causal(batch: Batch) -> Batch:
    """Return the rows of a batch, as they are, with every next token as a target."""
    return causal_batch(batch.inputs.input_ids, batch.inputs.is_token, batch.sample_index)


def run_two_forms(rank: int, layout: Layout | None, steps: int) -> dict[str, Any]:
    """Return losses and moments of a run of ``mlm+ar`` with dropout; even steps are causal."""
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    groups = grid(layout.tp_size) if layout else single_process_groups(torch.device("cpu"))
    micro_batch = GLOBAL_BATCH // groups.dp_size // 2
    config = run_config(layout, micro_batch=micro_batch)
    config = replace(config, objective=ObjectiveConfig(name="mlm+ar"))
    sharded = build_rank_model(config, groups)
    sharded.module.train()
    engine = build_engine(config, sharded.module, sharded.specs, groups)
    take_step = TrainStep(engine, config, groups)
    losses: list[float] = []
    norms: list[float] = []
    first: dict[str, Any] = {}
    for step in range(steps):
        batches: list[Batch] = micro_batches(step, groups, micro_batch=micro_batch)
        if step % 2 == 0:
            batches = [as_causal(batch) for batch in batches]
        result = take_step(step, batches)
        losses.append(result.loss)
        norms.append(result.outcome.grad_norm)
        if step == 0:
            first = moments(engine, sharded.specs)
    engine.destroy()
    return {"losses": losses, "norms": norms, "first": first}
