"""Losses of embeddings equal their definition in fp64; exports keep the head and its outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_deberta.cli.main import main
from megatron_deberta.config.schema import RunConfig, with_task_head
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.evaluate.predict import open_predictor
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_task_model
from megatron_deberta.hf.onnx.check import graph_logits
from megatron_deberta.hf.onnx.graph import write_graph
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.task_models import DebertaForEmbedding
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.embed import Embedding
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from tests.support.labelled import labelled_rows, labelled_run
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

SAMPLES = np.array([3, 0, -1, 7, 2, 15, 1])
LIMIT = 1e-6


def run_of(positive_similarity: float | None) -> RunConfig:
    config = labelled_run("embed")
    objective = replace(config.objective, positive_similarity=positive_similarity)
    return replace(config, objective=objective)


def batch_of(config: RunConfig) -> TaskBatch:
    """Return pairs with negatives, a padding sample, and a pair that is no positive."""
    batch = labelled_rows(config).batch(SAMPLES, SAMPLES)
    assert sorted(set(batch.labels[~batch.labels.isnan()].tolist())) == [0.5, 1.0]
    return batch


def definition(embeddings: Tensor, batch: TaskBatch, config: RunConfig) -> Tensor:
    """Return the reference loss, computed pair by pair."""
    assert batch.choice_rows is not None
    objective = config.objective
    rows = [row for row, sample in zip(batch.choice_rows, SAMPLES, strict=True) if sample >= 0]
    labels = [value for value in batch.labels.tolist() if value == value]
    unit = embeddings / embeddings.square().sum(-1, keepdim=True).sqrt()
    losses = []
    for (first, second, _), label in zip(rows, labels, strict=True):
        cosine = unit[first] @ unit[second]
        if objective.positive_similarity is None:
            losses.append((cosine - label) ** 2)
        elif label >= objective.positive_similarity:
            others = [unit[first] @ unit[row] for pair in rows for row in pair[1:]]
            scores = torch.stack(others) / objective.temperature
            losses.append(scores.exp().sum().log() - cosine / objective.temperature)
    return torch.stack(losses).sum()


@pytest.mark.parametrize("positive_similarity", [0.8, 0.1, None])
def test_loss_and_gradient_are_the_definition(positive_similarity: float | None) -> None:
    config = run_of(positive_similarity)
    batch = batch_of(config)
    objective = build_objective(config)
    assert isinstance(objective, Embedding)
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(len(batch.row_index), 32, generator=generator).requires_grad_()
    twin = ours.detach().double().requires_grad_()
    loss, correct = objective.loss(ours, batch)
    expected = definition(twin, batch, config)
    loss.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(expected.item(), rel=LIMIT)
    assert ours.grad is not None
    assert twin.grad is not None
    assert twin.grad.abs().max() > 0.01
    torch.testing.assert_close(ours.grad.double(), twin.grad, rtol=LIMIT, atol=LIMIT)
    count = {0.8: 4, 0.1: 6, None: 6}[positive_similarity]
    assert int(objective.count_targets(batch)["task"]) == count
    assert 0 <= int(correct) <= count


@pytest.mark.parametrize("packed", [False, True])
def test_embeddings_are_means_over_tokens(packed: bool) -> None:
    config = with_task_head(V2, "embed")
    model = build_task_model(config, reader(random_weights(config)))
    assert isinstance(model, DebertaForEmbedding)
    run = labelled_run("embed", pack_rows=packed)
    batch = labelled_rows(run).batch(SAMPLES, SAMPLES)
    with torch.no_grad():
        if packed:
            assert batch.packing is not None
            found = model.packed_logits(batch.inputs, batch.packing)
        else:
            found = model.logits(batch.inputs)
        for row, (ids, mask) in enumerate(
            zip(batch.inputs.input_ids, batch.inputs.is_token, strict=True)
        ):
            alone = model.encode(ModelInputs(ids[mask][None]))[0]
            torch.testing.assert_close(found[row], alone.mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_exports_have_the_same_embeddings(normalize: bool, tmp_path: Path) -> None:
    config = replace(with_task_head(V2, "embed"), normalize_embeddings=normalize)
    read, folder = reader(random_weights(config)), tmp_path / "export"
    export_model(config, read, tiny_tokenizer(), folder)
    modules = json.loads((folder / "modules.json").read_text())
    names = [module["type"].rpartition(".")[2] for module in modules]
    assert names == ["Transformer", "Pooling", *["Normalize"] * normalize]
    assert all((folder / module["path"]).is_dir() for module in modules)
    similarity = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert similarity == {"similarity_fn_name": "cosine"}

    model = build_task_model(config, read)
    assert isinstance(model, DebertaForEmbedding)
    write_graph(tmp_path / "model.onnx", config, read, "encoder")
    graph = graph_logits(tmp_path / "model.onnx", "encoder")
    with open_predictor("", folder, "") as predictor, torch.no_grad():
        assert predictor.config.model == config
        examples = [Example(id=text, text=text) for text in TEXT]
        encoded = encode(predictor.task, examples, predictor.tokenizer)
        (block,) = predictor.predict_texts(examples)
        found = block.outputs
        for row, embedding in enumerate(found):
            ids = torch.from_numpy(encoded.input_ids[encoded.row(row)]).long()
            inputs = ModelInputs(ids[None], torch.ones_like(ids[None]).bool())
            for expected in (model.logits(inputs)[0], model.pool(graph(inputs), inputs)[0]):
                torch.testing.assert_close(
                    torch.from_numpy(embedding), expected, rtol=1e-5, atol=1e-5
                )
            if normalize:
                assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-6)
    written = tmp_path / "embeddings.npy"
    texts = [option for text in TEXT for option in ("--text", text)]
    assert main(["predict", "--model", str(folder), *texts, "--output", str(written)]) == EXIT_DONE
    assert np.array_equal(np.load(written, allow_pickle=False), found)
