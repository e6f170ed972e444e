"""Losses and exports of embeddings, compared with sentence-transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import with_task_head
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_task_model
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.embed import Embedding
from tests.parity.test_embeddings import LIMIT, SAMPLES, batch_of, run_of
from tests.support.judges import record
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

pytestmark = pytest.mark.slow


def their_loss(texts: list[Tensor], labels: Tensor, positive: bool, temperature: float) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    model: Any = nn.Module()
    if positive:
        ranking = losses.MultipleNegativesRankingLoss(model, scale=1 / temperature)
        loss: Tensor = ranking.compute_loss_from_embeddings(texts, labels)
        return loss
    found: Tensor = losses.CosineSimilarityLoss(model).compute_loss_from_embeddings(texts, labels)
    return found


@pytest.mark.parametrize("positive_similarity", [0.1, None])
def test_losses(positive_similarity: float | None) -> None:
    library = pytest.importorskip("sentence_transformers")
    config = run_of(positive_similarity)
    batch, objective = batch_of(config), build_objective(config)
    assert isinstance(objective, Embedding)
    assert batch.choice_rows is not None
    ours = torch.randn(
        len(batch.row_index), 64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    real = torch.from_numpy(SAMPLES >= 0)
    count = int(real.sum())
    loss = objective.loss(ours, batch)[0] / count
    sides = list(theirs[batch.choice_rows[real]].unbind(1))
    is_ranking = positive_similarity is not None
    sides = sides if is_ranking else sides[:2]
    expected = their_loss(sides, batch.labels[real], is_ranking, config.objective.temperature)
    loss.backward()
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(expected.item(), rel=LIMIT)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=LIMIT, atol=LIMIT)
    record(
        library.__name__,
        library.__version__,
        ("MultipleNegativesRankingLoss with a negative" if is_ranking else "CosineSimilarityLoss")
        + ": loss and gradient",
        f"{(ours.grad - theirs.grad).abs().max().item():.1e}",
        f"{LIMIT:.0e}",
        count,
    )


@pytest.mark.parametrize("normalize", [False, True])
def test_exports_encode_as_we_do(normalize: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    config = replace(with_task_head(V2, "embed"), normalize_embeddings=normalize)
    read, folder = reader(random_weights(config)), tmp_path / "export"
    export_model(config, read, tiny_tokenizer(), folder)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    assert theirs.similarity_fn_name == "cosine"
    found = torch.from_numpy(theirs.encode(list(TEXT)))
    model, tokenizer = build_task_model(config, read), tiny_tokenizer()
    for text, embedding in zip(TEXT, found, strict=True):
        ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]])
        with torch.no_grad():
            expected = model.logits(ModelInputs(ids))[0]
        torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)
