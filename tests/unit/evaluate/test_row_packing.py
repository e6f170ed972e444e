"""Rows of a task's batch side by side: the same outputs and gradients, fewer tokens computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.config.rules import validate
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.splits import pack_rows
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.labelled import HEADS, SMALL, labelled_rows, labelled_run, labelled_steps

GROUPS = single_process_groups(torch.device("cpu"))


def batches(config: Any) -> tuple[TaskBatch, TaskBatch]:
    """The same samples, one of them padding, with and without packed rows."""
    samples = np.array([3, 0, 5, -1, 2, 1])
    rows = labelled_rows(config)
    plain, packed = (replace(rows, pack=pack).batch(samples, samples) for pack in (False, True))
    return plain, packed


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("classification", {}),
        ("classification", {"conv_kernel_size": 3, "absolute_positions": "input"}),
        ("classification", {"conv_kernel_size": 3, "num_layers": 1}),
        ("regression", {}),
        ("choices", {}),
        ("tokens", {}),
        ("tokens", {"conv_kernel_size": 3, "absolute_positions": "input"}),
        ("spans", {}),
    ],
)
def test_packed_rows_equal_padded_ones(head: Any, changes: dict[str, Any]) -> None:
    config = labelled_run(head, model=replace(SMALL, **changes))
    module = build_model(config, GROUPS).module
    results = []
    for batch in batches(config):
        module.zero_grad()
        found = module(batch)
        (loss, correct), outputs = found.losses["task"], found.outputs
        loss.backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        if head in ("tokens", "spans"):
            outputs = outputs[batch.inputs.is_token]
        results.append([loss, correct, outputs, *gradients])
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_losses_of_packed_rows_equal_padded_ones_over_20_steps(head: Any) -> None:
    losses: list[list[float]] = []
    for pack in (False, True):
        config = labelled_run(head, pack_rows=pack)
        validate(config)
        model = build_rank_model(config, GROUPS)
        engine = build_engine(config, model.module, model.specs, GROUPS)
        take_step = TrainStep(engine, config, GROUPS)
        steps = enumerate(labelled_steps(config, GROUPS))
        losses.append([take_step(step, batches).loss for step, batches in steps])
        engine.destroy()
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_little_is_computed_for_padding() -> None:
    samples = np.arange(24)
    rows = replace(labelled_rows(labelled_run("classification")), pack=True)
    packed = rows.batch(samples, samples)
    index = packed.packing.tokens
    assert index is not None
    real = int(packed.inputs.is_token.sum())
    assert index.numel() < 1.1 * real < 0.8 * packed.inputs.input_ids.numel()
    # Each real token is there once.
    flat = packed.inputs.is_token.flatten().nonzero().flatten()
    assert torch.equal(index[index >= 0].sort().values, flat)


@pytest.mark.parametrize("sizes", [[1], [4, 4], [5, 1, 2, 2, 1, 3, 5]])
def test_each_row_begins_at_its_place(sizes: list[int]) -> None:
    length = 5
    index, firsts, places = (each.numpy() for each in pack_rows(np.array(sizes), length))
    bins, numbers = np.divmod(places, firsts.shape[1])
    for row, size in enumerate(sizes):
        begin = firsts[bins[row], numbers[row]]
        tokens = index[bins[row], begin : begin + size]
        assert tokens.tolist() == list(range(row * length, row * length + size))
    assert (index >= 0).sum() == sum(sizes)
    documents = np.where(index < 0, len(sizes), index // length)
    assert (np.diff(documents) >= 0).all()


def test_dropout_of_packed_rows_is_that_of_their_key() -> None:
    config = labelled_run("classification", dropout=0.1)
    module = build_model(config, GROUPS).module
    _, packed = batches(config)
    losses = [
        float(module(packed, DropoutSeeds(1, step, packed.dropout_keys)).losses["task"].loss)
        for step in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_sift_is_refused() -> None:
    config = labelled_run("regression", sift=1.0)
    validate(config)
    with pytest.raises(ConfigError, match="finetune.pack_rows"):
        validate(labelled_run("regression", sift=1.0, pack_rows=True))
