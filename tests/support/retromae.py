"""Runs of RetroMAE on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.batch import Batch, DecoderRows
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.layout_matrix import GLOBAL_BATCH, Layout, micro_batches, moments, run_config
from tests.support.ranks import grid

MASK = 3


def with_decoder(batch: Batch) -> Batch:
    """Return a batch whose decoder predicts every second token; some rows have fewer tokens."""
    ids, is_token = batch.inputs.input_ids, batch.inputs.is_token
    positions = torch.arange(1, ids.size(1), 2).expand(len(ids), -1)
    real = is_token.gather(1, positions)
    labels = ids.gather(1, positions).masked_fill(~real, IGNORED_LABEL)
    every_second = (torch.arange(ids.size(1)) % 2 == 1) & is_token
    rows = DecoderRows(
        ids.masked_fill(every_second, MASK), positions.masked_fill(~real, -1), labels
    )
    return replace(batch, decoder=rows)


def run_retromae(
    rank: int, layout: Layout | None, steps: int, objective: ObjectiveConfig
) -> dict[str, Any]:
    """Return losses, norms and moments of a run with dropout on this rank."""
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    groups = grid(layout.tp_size) if layout else single_process_groups(torch.device("cpu"))
    micro_batch = GLOBAL_BATCH // groups.dp_size // 2
    config = replace(run_config(layout, micro_batch=micro_batch), objective=objective)
    sharded = build_rank_model(config, groups)
    sharded.module.train()
    engine = build_engine(config, sharded.module, sharded.specs, groups)
    take_step = TrainStep(engine, config, groups)
    losses: list[float] = []
    norms: list[float] = []
    first: dict[str, Any] = {}
    for step in range(steps):
        batches = micro_batches(step, groups, micro_batch=micro_batch)
        result = take_step(step, [with_decoder(batch) for batch in batches])
        losses += [result.loss, result.metrics["reconstruction_loss"]]
        norms.append(result.outcome.grad_norm)
        if step == 0:
            first = moments(engine, sharded.specs)
    engine.destroy()
    return {"losses": losses, "norms": norms, "first": first}
