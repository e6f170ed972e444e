"""Order of examples, micro batches and collected outputs of labelled tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_deberta.config.schema import Head
from megatron_deberta.data import Integers
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.finetune.batches import OutputCollector, TaskBatchBuilder, TaskBatches
from megatron_deberta.finetune.order import EpochOrder
from tests.support.labelled import HEADS, encoded, labelled_rows, labelled_run, labelled_steps

LENGTHS: Integers = np.random.default_rng(0).integers(3, 60, 1003)


def order(*, by_length: bool = True, seed: int = 1) -> EpochOrder:
    return EpochOrder(LENGTHS, 8, seed, by_length=by_length)


@pytest.mark.parametrize("by_length", [True, False])
def test_every_example_once_per_epoch(by_length: bool) -> None:
    examples = order(by_length=by_length)
    assert examples.steps_per_epoch == 126
    epochs = [examples.examples(range(e * 1008, (e + 1) * 1008)) for e in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == [-1] * 5 + list(range(1003))
    assert not np.array_equal(*epochs)
    # Missing examples are in one batch.
    assert len({i // 8 for i in np.flatnonzero(epochs[0] < 0)}) == 1


def test_order_is_a_function_of_seed_and_index() -> None:
    whole = order().examples(range(2016))
    pieces = [order().examples([index])[0] for index in (2015, 3, 1500, 800)]
    assert pieces == [whole[index] for index in (2015, 3, 1500, 800)]
    assert not np.array_equal(order(seed=2).examples(range(64)), whole[:64])


def test_batches_by_length_have_little_padding_and_random_order() -> None:
    def padding(found: Integers) -> float:
        batches = [LENGTHS[batch[batch >= 0]] for batch in found.reshape(-1, 8)]
        return sum(len(b) * b.max() - b.sum() for b in batches) / LENGTHS.sum()

    grouped = order().examples(range(1008))
    assert padding(grouped) < 0.05 < 0.4 < padding(order(by_length=False).examples(range(1008)))
    longest = [LENGTHS[batch].max() for batch in grouped.reshape(-1, 8)]
    rises = sum(later > earlier for earlier, later in pairwise(longest))
    assert 40 < rises < 86


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
    if head == "choices":
        assert batch.choice_rows is not None
        counts = np.diff(data.example_offsets)[[3, 0, 7]]
        assert (batch.choice_rows >= 0).sum(1).tolist() == [counts[0], counts[1], 1, counts[2]]
        assert len(batch.dropout_keys[live].unique()) == live.sum()
    unlabelled = batch.labels[2].float().flatten()
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
    groups = single_process_groups(torch.device("cpu"))
    (first, *_) = labelled_steps(labelled_run("classification"), groups)
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
        batches = list(TaskBatches(rows, 2, rank, dp_size))
        for batch in batches:
            # Outputs name their row, or their token.
            value = batch.row_index.float() + 1
            if head in ("spans", "tokens"):
                value = batch.inputs.input_ids.unsqueeze(-1).float()
            elif head == "classification":
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


def test_support_data_has_unequal_numbers_of_choices() -> None:
    assert set(np.diff(encoded("choices").example_offsets)) == {2, 3, 4}
