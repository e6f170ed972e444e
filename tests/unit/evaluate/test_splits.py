"""Micro batches of labelled tasks, with padding and packed, and collected outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.config.rules import validate, validate_for_world
from megatron_deberta.config.schema import CLASS_HEADS, GROUPED_HEADS, Head
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.splits import (
    OutputCollector,
    TaskBatchBuilder,
    check_task,
    pack_rows,
)
from megatron_deberta.finetune.data import EpochOrder
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.labelled import HEADS, SMALL, labelled_rows, labelled_run, labelled_steps
from tests.support.task_files import make_task

GROUPS = single_process_groups(torch.device("cpu"))


@pytest.mark.parametrize("head", HEADS)
def test_a_micro_batch_ends_with_its_longest_row(head: Head) -> None:
    rows = labelled_rows(labelled_run(head))
    samples = np.array([3, 0, -1, 7])
    batch = rows.batch(samples, samples)
    data = rows.encoded
    live = batch.row_index >= 0
    assert batch.inputs.is_token.any(0).all()
    assert batch.dropout_keys.shape == batch.row_index.shape
    for row, ids, mask in zip(
        batch.row_index, batch.inputs.input_ids, batch.inputs.is_token, strict=True
    ):
        expected = [1, 2] if row < 0 else data.input_ids[data.row(int(row))].tolist()
        assert ids[mask].tolist() == expected
        assert not ids[~mask].any()
    if head in GROUPED_HEADS:
        assert batch.choice_rows is not None
        counts = np.diff(data.example_offsets)[[3, 0, 7]]
        assert (batch.choice_rows >= 0).sum(1).tolist() == [counts[0], counts[1], 1, counts[2]]
        assert len(batch.dropout_keys[live].unique()) == live.sum()
    filler = int(batch.choice_rows[2, 0]) if head == "rerank" else 2
    unlabelled = batch.labels[filler].float().flatten()
    assert (unlabelled.isnan() | (unlabelled == -100)).all()


def test_rows_are_a_multiple_of_the_sequence_parallel_ranks() -> None:
    rows = labelled_rows(labelled_run("tokens"))
    wide = type(rows)(rows.head, rows.encoded, rows.filler, rows.pad_id, multiple=4)
    samples = np.arange(3)
    longest = rows.batch(samples, samples).inputs.input_ids.size(1)
    assert wide.batch(samples, samples).inputs.input_ids.size(1) == -(-longest // 4) * 4


def test_ranks_share_a_step_of_one_process() -> None:
    rows = labelled_rows(labelled_run("classification"))
    builder = TaskBatchBuilder(rows, EpochOrder(rows.lengths, 8, 1234, by_length=True).examples)
    (first, *_) = labelled_steps(labelled_run("classification"), GROUPS)
    whole = builder.build(range(8))
    assert torch.cat([batch.row_index for batch in first]).tolist() == whole.row_index.tolist()


@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_outputs_come_back_in_the_order_of_the_examples(head: Head, dp_size: int) -> None:
    """Every rank stores its rows; their sum has each row once."""
    rows = labelled_rows(labelled_run(head))
    data = rows.encoded
    totals, counts = [], []
    for rank in range(dp_size):
        collector = OutputCollector(head, data, 1, torch.device("cpu"))
        batches = list(rows.batches(2, rank, dp_size))
        for batch in batches:
            # Outputs name their row, or their token.
            value = batch.row_index.float() + 1
            if head in ("spans", "tokens"):
                value = batch.inputs.input_ids.unsqueeze(-1).float()
            elif head in CLASS_HEADS:
                value = value.unsqueeze(-1)
            collector.add(batch, value)
        totals.append(collector.outputs)
        counts.append(len(batches))
    found = torch.stack(totals).sum(0).flatten().tolist()
    expected: Sequence[int] = range(1, data.num_rows + 1)
    if head in ("spans", "tokens"):
        expected = data.input_ids.tolist()
    assert found == list(expected)
    assert len(set(counts)) == 1


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


@pytest.mark.parametrize(
    "head",
    [
        # An output per text, per token, and per group of texts.
        pytest.param(
            head,
            marks=() if head in ("classification", "tokens", "rerank") else pytest.mark.nightly,
        )
        for head in HEADS
    ],
)
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
    with pytest.raises(
        ConfigError, match=r"objective\.sift_weight=1 does not fit model\.head=embed"
    ):
        validate(labelled_run("embed", sift=1.0))


def test_negatives_of_the_batch_cannot_be_accumulated() -> None:
    config = labelled_run("embed", micro_batch_size=4)
    assert validate_for_world(config, 2).accumulation_steps == 1
    with pytest.raises(
        ConfigError, match=r"micro_batch_size=4 divides .*train\.micro_batch_size=8 \("
    ):
        validate_for_world(config, 1)
    scores = replace(config, objective=replace(config.objective, positive_similarity=None))
    assert validate_for_world(scores, 1).accumulation_steps == 2


def test_padding_samples_have_as_many_texts() -> None:
    rows = labelled_rows(labelled_run("embed"))
    none = np.array([-1, -1])
    batch = rows.batch(none, none)
    assert batch.choice_rows is not None
    assert batch.choice_rows.shape == (2, 3)
    assert batch.row_index.tolist() == [-1] * 6
    assert batch.labels.isnan().all()


@pytest.mark.parametrize(
    ("columns", "dev", "similarity", "problem"),
    [
        ({}, {}, 0.8, r"splits\.dev has no columns\.label"),
        ({}, {"label": "s"}, None, r"splits\.train has no columns\.label.*similarity=null"),
        ({}, {"label": "s"}, 0.8, ""),
        ({"label": "s"}, {}, None, ""),
    ],
)
def test_pairs_need_the_scores_that_are_used(
    columns: dict[str, str], dev: dict[str, str], similarity: float | None, problem: str
) -> None:
    pair = {"text": "a", "text_pair": "b"}
    own = {**pair, **dev} if dev else {}
    splits = {"train": "train", "dev": {"files": "dev", "columns": own}}
    task = make_task("embed", columns={**pair, **columns}, splits=splits)
    config = labelled_run("embed")
    objective = replace(config.objective, positive_similarity=similarity)
    config = replace(config, objective=objective)
    if not problem:
        check_task(config, task)
        return
    with pytest.raises(ConfigError, match=problem):
        check_task(config, task)
