"""Packed documents have the same losses and logits as separate ones."""

import itertools

import pytest
import torch

from megatron_deberta.config.schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import build_loaders
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.objectives import MaskedLanguageModel

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=48,
    vocab_size=200,
    max_position_embeddings=64,
    max_relative_positions=32,
    position_buckets=8,
    conv_kernel_size=3,
    initializer_range=0.2,
)


@pytest.fixture(scope="module")
def model():
    built = MaskedLanguageModel(MODEL).double().eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            fill_initial(parameter, name, tuple(parameter.shape), MODEL, 3)
    return built


@pytest.mark.parametrize("objective", ["mlm", "autoregressive"])
def test_packed_rows_equal_separate_documents(
    model, write_shard, random_documents, vocabulary, objective
):
    config = RunConfig(
        model=MODEL,
        objective=ObjectiveConfig(name=objective),
        data=DataConfig(
            train=(write_shard(random_documents(60)),),
            validation_fraction=0.0,
            sequence_length=64,
            attend_across_documents=False,
            num_workers=0,
        ),
        train=TrainConfig(global_batch_size=4, micro_batch_size=2, seed=7),
    )
    loader, _ = build_loaders(config, vocabulary, 0, 1, 0)
    compared = edges = 0
    for batch in itertools.chain.from_iterable(itertools.islice(loader, 3)):
        with torch.no_grad():
            packed = model.masked_logits(batch.inputs, batch.masked_positions)
            ((loss, right),) = model(batch).losses.values()
        alone_loss, alone_right = 0.0, 0
        for row in range(batch.inputs.input_ids.size(0)):
            real = batch.inputs.is_token[row]
            for document in batch.inputs.document_ids[row][real].unique().tolist():
                place = torch.where(real & (batch.inputs.document_ids[row] == document))[0]
                first, stop = int(place[0]), int(place[-1]) + 1
                assert batch.inputs.position_ids[row, first:stop].tolist() == list(
                    range(stop - first)
                )
                chosen = batch.masked_positions[row]
                inside = (chosen >= first) & (chosen < stop)
                if not inside.any():
                    continue
                ids = batch.inputs.input_ids[row : row + 1, first:stop]
                at = (chosen[inside] - first).unsqueeze(0)
                labels = batch.labels[row : row + 1, inside]
                alone_inputs = ModelInputs(ids, causal=batch.inputs.causal)
                with torch.no_grad():
                    alone = model.masked_logits(alone_inputs, at)
                    separate = Batch(alone_inputs, at, labels, labels[:, 0])
                    ((one_loss, one_right),) = model(separate).losses.values()
                torch.testing.assert_close(alone[0], packed[row, inside], rtol=1e-9, atol=1e-9)
                alone_loss, alone_right = alone_loss + one_loss.item(), alone_right + one_right
                compared += int(inside.sum())
                edges += document > 0
        assert alone_loss == pytest.approx(loss.item(), rel=1e-6)
        assert alone_right == right
    assert compared > 60
    assert edges > 5
