"""Losses of re-ranking beside those of sentence-transformers, on an exported model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.config.schema import with_task_head
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_task_model
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.rerank import Reranking
from megatron_deberta.tasks import Example, encode, load_task
from tests.support.judges import record
from tests.support.labelled import labelled_rows, labelled_run
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

pytestmark = pytest.mark.slow

LIMIT = 1e-5
QUERIES = [
    Example(id="0", text=TEXT[0][:30], choices=(TEXT[1], TEXT[2], TEXT[3]), relevance=(1, 0, 0)),
    Example(id="1", text=TEXT[1][:30], choices=(TEXT[0], TEXT[1]), relevance=(0, 1)),
    Example(id="2", text=TEXT[2][:9], choices=(*TEXT, TEXT[0][:20]), relevance=(0, 1, 0.5, 0.5, 0)),
]
LOSSES = {"bce": "BinaryCrossEntropyLoss", "ranknet": "RankNetLoss", "listnet": "ListNetLoss"}


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients(kind: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder import losses

    config = with_task_head(V2, "rerank")
    weights = random_weights(config)
    export_model(config, reader(weights), tiny_tokenizer(), tmp_path / "model")
    # eval: without dropout.
    model = library.CrossEncoder(str(tmp_path / "model"), device="cpu").eval()
    labels = [torch.tensor(example.relevance) for example in QUERIES]
    inputs: list[Any] = [[e.text for e in QUERIES], [list(e.choices) for e in QUERIES]]
    # RankNetLoss has binary logarithms unless it is told otherwise.
    options = {"ranknet": {"reduction_log": "natural"}}.get(kind, {})
    judge: Callable[..., Any] = getattr(losses, LOSSES[kind])(model, **options)
    if kind == "bce":
        pairs = [(e.text, passage) for e in QUERIES for passage in e.choices]
        expected = judge([list(side) for side in zip(*pairs, strict=True)], torch.cat(labels))
    else:
        expected = judge(inputs, labels)
    expected.backward()

    run = labelled_run("rerank", model=V2, ranking_loss=kind)
    ours, objective = build_task_model(config, reader(weights)), build_objective(run)
    assert isinstance(objective, Reranking)
    data = encode(load_task("custom_rerank"), QUERIES, tiny_tokenizer(), 96)
    batch = labelled_rows(run, data).batch(*[np.arange(len(QUERIES))] * 2)
    total, _ = objective.loss(ours.logits(batch.inputs), batch)
    found = total / objective.count_targets(batch)["task"]
    found.backward()

    assert found.item() == pytest.approx(expected.item(), rel=LIMIT)
    worst = abs(found.item() / expected.item() - 1)
    theirs = dict(model.named_parameters())
    # The gradient of the bias is 0 but for bce.
    for name in ("classifier.weight", "pooler.dense.weight"):
        (other,) = (p.grad for n, p in theirs.items() if n.endswith(name))
        gradient = ours.get_parameter(name).grad
        assert gradient is not None
        error = float((gradient - other).norm() / other.norm())
        assert error < LIMIT, name
        worst = max(worst, error)
    record(
        "sentence_transformers", library.__version__, f"{LOSSES[kind]}: loss and gradients",
        f"{worst:.0e}", f"{LIMIT:g}", len(QUERIES),
    )  # fmt: skip
