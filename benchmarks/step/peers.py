"""BERT, RoBERTa and ModernBERT of transformers in their fastest settings.

These are: logits at masked positions only, no padding (so no mask, and torch's flash attention in
layers with global attention), torch.compile if configured, and the fastest of ModernBERT's
attention settings. Settings that need the flash-attn package are reported as missing without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from benchmarks.step.batch import StepBatch
from benchmarks.step.sides import Setting
from megatron_deberta.config.schema import ModelConfig

PEERS = ("modernbert", "roberta", "bert")
WINDOWS, GLOBAL = "own windows", "all layers global"
_VARIANTS = {
    "modernbert": (
        f"{WINDOWS}, sdpa",
        f"{WINDOWS}, flex_attention",
        f"{WINDOWS}, flash_attention_2",
        f"{GLOBAL}, sdpa",
    ),
    "roberta": (f"{GLOBAL}, sdpa",),
    "bert": (f"{GLOBAL}, sdpa",),
}


def variants(name: str, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return attention settings of a peer that can run here, and the reason for each other."""
    usable, missing = [], {}
    for variant in _VARIANTS[name]:
        if "flash_attention_2" in variant and importlib.util.find_spec("flash_attn") is None:
            missing[variant] = "no flash-attn package: no unpadded path, no windowed flash kernel"
        elif "flex_attention" in variant and device.type == "cpu":
            missing[variant] = "torch has no backward of flex_attention on a CPU"
        else:
            usable.append(variant)
    return usable, missing


class SparsePeer(nn.Module):
    """A masked language model of transformers whose head runs on masked positions only."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.token_loss = nn.CrossEntropyLoss()

    def forward(self, input_ids: Tensor, masked_positions: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss per masked token; arguments as in `StepBatch`."""
        hidden = self.body(input_ids).last_hidden_state
        index = masked_positions.unsqueeze(-1).expand(-1, -1, hidden.size(-1))
        logits = self.head(hidden.gather(1, index).flatten(0, 1))
        return cast(Tensor, self.token_loss(logits.float(), labels.flatten()))


class Peer:
    """A peer with the size and vocabulary of ``setting.model``.

    Args:
        setting: shared by all sides.
        name: one of `PEERS`.
        variant: one of `variants`.
        length: tokens per row.
    """

    def __init__(self, setting: Setting, name: str, variant: str, length: int) -> None:
        self._name, self._variant, self._size = name, variant, setting.model
        with setting.device:
            self.whole = _build(name, variant, setting.model, length)
        self.whole.to(setting.dtype).train()
        self.model = _sparse(self.whole)
        self._run = torch.compile(self.model) if setting.compile_peers else self.model
        dropout = [getattr(self.whole.config, key, None) for key in _DROPOUTS]
        self.notes: dict[str, Any] = {
            "attention": variant,
            "compiled": setting.compile_peers,
            "dropout": max(p for p in dropout if p is not None),
        }

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        """Return the mean loss per masked token; dropout uses torch's generator, not ``step``."""
        return cast(Tensor, self._run(batch.input_ids, batch.masked_positions, batch.labels))

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run without torch.compile, except for functions that transformers compiles itself."""
        compiled, self._run = self._run, self.model
        yield
        self._run = compiled

    def flops_per_token(self, batch: StepBatch) -> float:
        """Return the FLOPs by torch's counter on the meta device.

        Keys outside a layer's attention window are not counted even if the kernel computes them.
        """
        rows, length = batch.input_ids.shape
        # Eager attention, because the counter does not support every fused kernel.
        variant = f"{self._variant.split(', ')[0]}, eager"
        with torch.device("meta"):
            whole = _build(self._name, variant, self._size, length)
        columns = (batch.input_ids, batch.masked_positions, batch.labels)
        with FlopCounterMode(display=False) as counter:
            _sparse(whole)(*(column.to("meta") for column in columns)).backward()
        flops = counter.get_total_flops() / (rows * length)
        config: Any = whole.config
        kinds = getattr(config, "layer_types", None) or []
        windowed = kinds.count("sliding_attention")
        outside = max(0, length - 2 * config.sliding_window - 1) if windowed else 0
        return float(flops - 3 * 4 * self._size.hidden_size * outside * windowed)

    @torch.no_grad()
    def check(self, batch: StepBatch) -> float:
        """Return the relative difference of the loss to transformers' own forward."""
        self.whole.eval()
        loss = self.model(batch.input_ids, batch.masked_positions, batch.labels).item()
        expected = self.whole(batch.input_ids, labels=batch.dense_labels()).loss.item()
        self.whole.train()
        return abs(loss - expected) / expected


_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout")


def _build(name: str, variant: str, size: ModelConfig, length: int) -> nn.Module:
    """Return a peer with initial weights on the current default device."""
    attention = variant.split(", ")[1]
    common: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_attention_heads": size.num_heads,
        "attn_implementation": attention,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if name == "modernbert":
        # ModernBERT-base: 22 layers to DeBERTa's 12, an inner width of 1.5 times the width.
        layers = round(size.num_layers * 22 / 12)
        common |= {"cls_token_id": None, "sep_token_id": None}
        if variant.startswith(GLOBAL):
            common["layer_types"] = ["full_attention"] * layers
        config = ModernBertConfig(
            num_hidden_layers=layers, intermediate_size=size.hidden_size * 3 // 2, **common
        )
        return ModernBertForMaskedLM._from_config(config)
    common |= {"num_hidden_layers": size.num_layers, "intermediate_size": size.ffn_hidden_size}
    if name == "roberta":
        # Position ids start after the padding id.
        return RobertaForMaskedLM._from_config(
            RobertaConfig(max_position_embeddings=max(length, 512) + 2, **common)
        )
    return BertForMaskedLM._from_config(
        BertConfig(max_position_embeddings=max(length, 512), **common)
    )


def _sparse(whole: Any) -> SparsePeer:
    if isinstance(whole, ModernBertForMaskedLM):
        return SparsePeer(whole.model, nn.Sequential(whole.head, whole.decoder))
    if isinstance(whole, RobertaForMaskedLM):
        return SparsePeer(whole.roberta, whole.lm_head)
    return SparsePeer(whole.bert, whole.cls)
