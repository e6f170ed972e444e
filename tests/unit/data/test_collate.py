"""Autoregressive rows, the form of each step's batch, and rows for a decoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import DataConfig, ObjectiveConfig, RunConfig, TrainConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import build_loaders
from megatron_deberta.data.collate import NextTokens, StepForms, TwoFormBuilder
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.model.inputs import ModelInputs


def forms(fraction: float, *, seed: int = 1, first: int = 0, size: int = 8) -> StepForms:
    return StepForms(fraction=fraction, seed=seed, first_sample=first, global_batch_size=size)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1 / 3, 0.5, 0.9, 1.0])
def test_forms_are_spread_evenly(fraction: float) -> None:
    found = [forms(fraction).is_causal(8 * step) for step in range(3000)]
    for window in (3000, 1000, 60):
        counts = [sum(found[begin : begin + window]) for begin in range(0, 3000, window)]
        assert all(abs(count - fraction * window) < 1 + 1e-9 for count in counts)


def test_form_is_the_same_for_all_samples_of_a_step_and_after_a_resumption() -> None:
    expected = [forms(0.3).is_causal(8 * step) for step in range(50)]
    assert 0 < sum(expected) < 50
    assert [forms(0.3, first=8 * 17).is_causal(8 * step + 5) for step in range(50)] == expected
    assert [forms(0.3, seed=2).is_causal(8 * step) for step in range(50)] != expected


def test_forms_after_a_ramp_start_at_any_sample() -> None:
    """The first step with a larger batch starts at a sample that the batch does not divide."""
    ramped = forms(0.5, first=13)
    steps = [[ramped.is_causal(13 + 8 * step + place) for place in range(8)] for step in range(20)]
    assert all(len(set(step)) == 1 for step in steps)
    assert sum(step[0] for step in steps) == 10


def test_next_tokens(vocabulary: Vocabulary) -> None:
    cls, sep = vocabulary.cls_id, vocabulary.sep_id
    tokens = np.array([cls, 7, 8, sep, 9, sep, cls, 9, sep])
    sizes = np.array([6, 3])
    across = NextTokens(vocabulary, 6, within_documents=False)
    assert across.max_targets == 5
    rows = across(tokens, sizes, sizes)
    assert rows.tokens is tokens
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert rows.labels.tolist() == [7, 8, sep, 9, sep, 9, sep]
    assert rows.counts.tolist() == [5, 2]
    within = NextTokens(vocabulary, 6, within_documents=True)(tokens, sizes, sizes)
    assert within.positions.tolist() == [0, 1, 2, 4, 6, 7]
    assert within.labels.tolist() == [7, 8, sep, sep, 9, sep]
    assert within.counts.tolist() == [4, 2]


def test_loaders_of_every_layout_read_the_same_forms(
    write_shard: Callable[..., str],
    random_documents: Callable[..., list[np.ndarray]],
    vocabulary: Vocabulary,
) -> None:
    config = RunConfig(
        data=DataConfig(
            train=(write_shard(random_documents(60)),),
            validation_fraction=0.2,
            sequence_length=32,
            num_workers=0,
        ),
        objective=ObjectiveConfig(name="mlm+ar", autoregressive_fraction=0.3),
        train=TrainConfig(global_batch_size=4, micro_batch_size=1, seed=7, eval_batches=1),
    )

    def steps(dp_rank: int, dp_size: int, consumed: int) -> list[list[Batch]]:
        loader, _ = build_loaders(config, vocabulary, dp_rank, dp_size, consumed)
        return list(itertools.islice(loader, 20 - consumed // 4))

    whole = [[batch.inputs.causal for batch in step] for step in steps(0, 1, 0)]
    assert all(len(set(step)) == 1 for step in whole)
    assert sum(step[0] for step in whole) == 6
    for rank in range(2):
        for consumed in (0, 28):
            found = [[batch.inputs.causal for batch in step] for step in steps(rank, 2, consumed)]
            assert [step[0] for step in found] == [step[0] for step in whole][consumed // 4 :]
            assert all(len(set(step)) == 1 for step in found)
    for batch in itertools.chain.from_iterable(steps(0, 1, 0)[:5]):
        real = batch.masked_positions >= 0
        rows, places = real.nonzero(as_tuple=True)
        at = batch.masked_positions[real]
        if batch.inputs.causal:
            assert batch.masked_positions.shape[1] == 31
            assert torch.equal(batch.inputs.input_ids[rows, at + 1], batch.labels[real])
            assert int(real.sum()) == int(batch.inputs.is_token.sum()) - len(batch.labels)
        else:
            assert batch.masked_positions.shape[1] == 5
    _, validation = build_loaders(config, vocabulary, 0, 1, 0)
    assert validation is not None
    forms_found = [batch.inputs.causal for batch in validation]
    assert len(forms_found) == len(validation)
    assert forms_found == sorted(forms_found)
    assert sum(forms_found) * 2 == len(forms_found)


class _Fixed:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def build(self, samples: object) -> Batch:
        return self.batch


def test_steps_get_batches_of_their_form() -> None:
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    masked, causal = (
        Batch(ModelInputs(zeros, causal=causal), zeros, zeros, torch.zeros(1))
        for causal in (False, True)
    )
    step_forms = forms(0.5)
    builder = TwoFormBuilder(_Fixed(masked), _Fixed(causal), step_forms)
    for step in range(20):
        is_causal = builder.build(range(8 * step + 2, 8 * step + 4)).inputs.causal
        assert is_causal == step_forms.is_causal(8 * step)
    # Copies keep their form.
    assert causal.to("cpu").clone().inputs.causal
    assert not masked.clone().inputs.causal


def decoder_loaders(
    shard: str, vocabulary: Vocabulary, dp_rank: int = 0, dp_size: int = 1, consumed: int = 0
) -> tuple[list[Batch], list[Batch]]:
    config = RunConfig(
        data=DataConfig(
            train=(shard,), validation_fraction=0.2, sequence_length=32, num_workers=0,
            packing="doc_sentences",
        ),
        objective=ObjectiveConfig(
            name="retromae", mask_probability=0.25, retromae_mask_probability=0.5
        ),
        train=TrainConfig(global_batch_size=4, micro_batch_size=1, seed=7, eval_batches=2),
    )  # fmt: skip
    train, validation = build_loaders(config, vocabulary, dp_rank, dp_size, consumed)
    assert validation is not None
    steps = itertools.islice(train, 6 - consumed // 4)
    return list(itertools.chain.from_iterable(steps)), list(validation)


def test_rows_are_masked_again_for_a_decoder_as_a_function_of_the_sample(
    write_shard: Callable[..., str],
    random_documents: Callable[..., list[np.ndarray]],
    vocabulary: Vocabulary,
) -> None:
    shard = write_shard(random_documents(60))
    whole, validation = decoder_loaders(shard, vocabulary)
    by_sample = {int(one.sample_index): one for one in whole}
    overlaps = []
    for one in (*whole, *validation):
        rows = one.decoder
        assert rows is not None
        is_token = one.inputs.is_token
        own = [
            original(ids, positions, labels)
            for ids, positions, labels in (
                (one.inputs.input_ids, one.masked_positions, one.labels), rows
            )
        ]  # fmt: skip
        assert torch.equal(*own)
        real = rows.masked_positions >= 0
        assert rows.masked_positions.shape[1] == 16
        expected = min(round(int(is_token.sum()) * 0.5), int(is_token.sum()) - 2)
        assert int(real.sum()) == expected
        places = rows.masked_positions[real]
        assert (rows.input_ids[0, places] == vocabulary.mask_id).all()
        assert not vocabulary.is_special[rows.labels[real]].any()
        inside = torch.isin(one.masked_positions[one.masked_positions >= 0], places)
        overlaps.append(inside.double().mean())
    # Independent of the encoder's mask.
    assert 0.35 < float(torch.stack(overlaps).mean()) < 0.65
    for rank, consumed in ((0, 0), (1, 8)):
        for one in decoder_loaders(shard, vocabulary, rank, 2, consumed)[0]:
            other = by_sample[int(one.sample_index)].decoder
            assert one.decoder is not None
            assert other is not None
            assert all(torch.equal(a, b) for a, b in zip(one.decoder, other, strict=True))


def original(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    real = positions >= 0
    out = ids.clone()
    out[0, positions[real]] = labels[real]
    return out
