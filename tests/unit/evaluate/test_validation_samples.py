"""Samples read during a validation: the most probable tokens of the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.evaluate.validation_samples import SampleRecorder, best_tokens
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.tiny_models import V2

ONE = ProcessGroups(0, 1, 0, 1, 0, 1, None, None, torch.device("cpu"))


def make_batch(first: int, *, causal: bool = False) -> Batch:
    """Return three rows of 12 tokens, the last one shorter; two masks each."""
    ids = torch.randint(5, V2.vocab_size, (3, 12), generator=torch.Generator().manual_seed(first))
    attention = torch.ones(3, 12, dtype=torch.bool)
    attention[2, 9:] = False
    positions = torch.tensor([[2, 5, 7], [1, 3, -1], [4, 8, -1]])
    labels = torch.tensor([[9, 8, 7], [6, 5, -100], [11, 12, -100]])
    inputs = ModelInputs(ids, attention, causal=causal)
    return Batch(inputs, positions, labels, torch.arange(first, first + 3))


@pytest.fixture(scope="module")
def model() -> MaskedLanguageModel:
    torch.manual_seed(1)
    return MaskedLanguageModel(V2, RuntimeOptions()).eval()


def test_the_first_rows_are_read_with_their_best_tokens(model: MaskedLanguageModel) -> None:
    batches = [make_batch(0, causal=True), make_batch(10), make_batch(20)]
    recorder = SampleRecorder(model, ONE, 4)

    def validate() -> Evaluation:
        for batch in batches:
            model(batch, None)
        return Evaluation({})

    recorder.watch(validate)()
    rows = recorder.take()
    assert [row.sample for row in rows] == [10, 11, 12, 20]
    assert [len(row.tokens) for row in rows] == [12, 12, 9, 12]
    assert [row.positions for row in rows[:2]] == [[2, 5, 7], [1, 3]]
    assert rows[2].labels == [11, 12]
    batch = batches[1]
    with torch.no_grad():
        logits = model.masked_logits(batch.inputs, batch.masked_positions)
    best = logits.softmax(-1).topk(3)
    assert rows[1].candidates == best.indices.view(3, 3, 3)[1, :2].tolist()
    expected = best.values.view(3, 3, 3)[1, :2]
    torch.testing.assert_close(torch.tensor(rows[1].probabilities), expected)
    # Nothing is read outside of a validation, and the hooks are gone.
    validate()
    assert recorder.take() == []
    assert not model._forward_pre_hooks


def test_other_ranks_and_zero_rows_read_nothing(model: MaskedLanguageModel) -> None:
    def validate() -> None:
        return None

    assert SampleRecorder(model, ONE, 0).watch(validate) is validate
    other = replace(ONE, dp_rank=1, dp_size=2)
    assert SampleRecorder(model, other, 2).watch(validate) is validate
    # A model without a vocabulary projection, such as a classifier.
    assert SampleRecorder(torch.nn.Linear(2, 2), ONE, 2).watch(validate) is validate


def test_padding_of_the_vocabulary_is_no_candidate() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 9.0, 9.0]])
    ids, shares = best_tokens(logits.clone(), 10, 13, None)
    assert ids.tolist() == [[11, 10, 12]]
    torch.testing.assert_close(shares[0], F.softmax(torch.tensor([2.0, 1.0, 0.0]), -1))
