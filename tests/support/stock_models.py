"""transformers' DeBERTa models with random weights, stock and with ``use_fast_attention``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_deberta.hf import fast_attention, use_fast_attention

VOCABULARY = 50
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
V3 = {
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("Deberta", {"pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2}),
    "v1_p2c": ("Deberta", {"pos_att_type": ["p2c"]}),
    "v1_c2p": ("Deberta", {"pos_att_type": ["c2p"], "position_biased_input": True}),
    "v2": ("DebertaV2", V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "v2_separate": ("DebertaV2", {"pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 3}),
    "v3": ("DebertaV2", V3),
    "v3_c2p": ("DebertaV2", V3 | {"pos_att_type": ["c2p"]}),
    "v3_p2c": ("DebertaV2", V3 | {"pos_att_type": ["p2c"]}),
    "v3_content": ("DebertaV2", {"relative_attention": False, "pos_att_type": []}),
}
HEADS = [
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering", "ForMultipleChoice",
]  # fmt: skip


def heads_of(kind: str) -> list[str]:
    """Return the heads of a kind; transformers has no multiple choice for v1."""
    return [head for head in HEADS if head != "ForMultipleChoice" or KINDS[kind][0] != "Deberta"]


def build(kind: str, head: str = "Model", **fields: Any) -> Any:
    family, own = KINDS[kind]
    labels = {"num_labels": 2 if head == "ForQuestionAnswering" else 3}
    config = getattr(transformers, f"{family}Config")(**BASE | own | labels | fields)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{head}")(config).train()


def inputs(rows: int, length: int, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def labelled(head: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rows, length = batch["input_ids"].shape
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if head == "ForQuestionAnswering":
        last = torch.full((rows,), length - 1)
        return batch | {"start_positions": torch.zeros_like(last), "end_positions": last // 2}
    if head == "ForMultipleChoice":
        twice = {name: torch.stack([value, value.flip(0)], 1) for name, value in batch.items()}
        return twice | {"labels": torch.arange(rows) % 2}
    labels = {
        "ForMaskedLM": ids.masked_fill(mask == 0, -100),
        "ForSequenceClassification": torch.arange(rows) % 3,
        "ForTokenClassification": (ids % 3).masked_fill(mask == 0, -100),
    }
    return batch | ({"labels": labels[head]} if head in labels else {})


def results(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs and the gradients of all parameters."""
    model.zero_grad()
    out = model(**batch)
    found = {name: value for name, value in out.items() if torch.is_tensor(value)}
    loss = out["loss"] if "loss" in out else out.last_hidden_state.square().mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach().clone() for n, t in (found | gradients).items()}


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], limit: float = 1e-5) -> None:
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        error = (ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error <= limit, f"{name}: {error:.2g}"


def compare(model: Any, batch: dict[str, Tensor], **options: Any) -> None:
    stock = results(model, batch)
    with use_fast_attention(model, **options):
        ours = results(model, batch)
    assert_same(ours, stock)


class OperatorCalls:
    """Counts the calls of our attention operator by ``use_fast_attention``.

    Args:
        monkeypatch: restores the operator.

    Attributes:
        count: calls so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        # The two entries of the operator: with and without padding.
        for name in ("packed_attention", "disentangled_attention"):
            monkeypatch.setattr(fast_attention, name, self._counted(getattr(fast_attention, name)))

    def _counted(self, operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            out: Tensor = operator(*args, **kwargs)
            return out

        return call

    def take(self) -> int:
        """Return the calls since the last time."""
        count, self.count = self.count, 0
        return count
