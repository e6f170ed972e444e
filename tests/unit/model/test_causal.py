"""Causal form of the pretraining model: no state depends on later tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from tests.support.tiny_models import V2

MODELS = {
    "mask decoder": V2,
    "convolution": replace(V2, conv_kernel_size=3),
    "paper": replace(V2, position_buckets=0, p2c_index="paper", share_position_projections=False),
    "positions at the input": replace(V2, absolute_positions="input", mask_decoder_passes=0),
    "roberta": replace(
        V2, absolute_positions="input", mask_decoder_passes=0, position_terms="none"
    ),
}
LENGTH, CUT = 24, 13


def build(config: ModelConfig, backend: str) -> DebertaForPretraining:
    config = replace(config, initializer_range=0.2)
    options = RuntimeOptions(attention_backend=backend)
    return DebertaForPretraining(config, options, seed=1).double().eval()


def random_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, V2.vocab_size, (2, LENGTH), generator=generator)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_no_logit_depends_on_a_later_token(name: str, backend: str) -> None:
    model, ids = build(MODELS[name], backend), random_ids()
    documents = (torch.arange(LENGTH) >= 5).long().expand(2, -1)
    for document_ids in (None, documents):
        with torch.no_grad():
            before = model.masked_logits(ModelInputs(ids, document_ids=document_ids, causal=True))
            changed = ids.clone()
            changed[:, CUT + 1 :] = 5 + (ids[:, CUT + 1 :] + 7) % 100
            after = model.masked_logits(
                ModelInputs(changed, document_ids=document_ids, causal=True)
            )
            bidirectional = model.masked_logits(ModelInputs(changed, document_ids=document_ids))
        assert torch.equal(after[:, : CUT + 1], before[:, : CUT + 1])
        assert not torch.isclose(after[:, CUT + 1 :], before[:, CUT + 1 :]).any(-1).all()
        # The same weights in the other form see the change.
        assert not torch.allclose(bidirectional[:, : CUT + 1], before[:, : CUT + 1], atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_row_cut_short(name: str) -> None:
    model, ids = build(MODELS[name], "chunked"), random_ids()
    with torch.no_grad():
        whole = model.masked_logits(ModelInputs(ids, causal=True))
        for stop in (1, 2, CUT):
            short = model.masked_logits(ModelInputs(ids[:, :stop], causal=True))
            torch.testing.assert_close(short, whole[:, :stop], rtol=1e-9, atol=1e-9)
            last = torch.full((2, 1), stop - 1)
            one = model.masked_logits(ModelInputs(ids[:, :stop], causal=True), last)
            torch.testing.assert_close(one[:, 0], whole[:, stop - 1], rtol=1e-9, atol=1e-9)
