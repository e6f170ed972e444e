"""Models of a comparison: this project's and transformers' DeBERTa; others are in ``peers``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import DebertaV2ForMaskedLM

from benchmarks.lib.stock import stock_config
from benchmarks.step.batch import MASKED_SHARE, StepBatch
from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model import DropoutSeeds, ModelInputs
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.flops import (
    BACKWARD_FACTOR,
    forward_flops,
    training_flops_per_token,
)


class Side(Protocol):
    """One model of a comparison.

    Attributes:
        notes: settings that are added to the result.
    """

    model: nn.Module
    notes: dict[str, Any]

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        """Return the mean loss per masked token."""
        ...

    def eager(self) -> AbstractContextManager[Any]:
        """Return a context in which the side runs without torch.compile."""
        ...

    def flops_per_token(self, batch: StepBatch) -> float:
        """Return the FLOPs per token of forward and backward, without recomputation."""
        ...


@dataclass(frozen=True)
class Setting:
    """Settings that all sides of a comparison share.

    Attributes:
        model: the size; peers use their own architecture with this vocabulary.
    """

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    compile_peers: bool = False


def without_mask_decoder(model: ModelConfig) -> ModelConfig:
    """Return the model without mask decoder and absolute positions, as transformers has it."""
    return replace(model, mask_decoder_passes=0, absolute_positions="none")


def without_position_terms(model: ModelConfig) -> ModelConfig:
    """Return the model with content-to-content attention only."""
    return replace(model, position_terms="none", normalize_position_table=False)


class Ours:
    """This project's pretraining model, as the trainer builds it.

    Args:
        setting: shared by all sides.
        plain_attention: replace the operator by flash attention without position terms.
        fuse: ``parallel.fuse``.
    """

    def __init__(
        self, setting: Setting, *, plain_attention: bool = False, fuse: bool = False
    ) -> None:
        config = setting.model
        if plain_attention:
            config = without_position_terms(config)
        self._config = config
        groups = single_process_groups(setting.device)
        run = RunConfig(model=config, parallel=ParallelConfig(fuse=fuse))
        self.model = build_model(run, groups, setting.dtype).module.train()
        self.notes: dict[str, Any] = {
            "mask_decoder_passes": config.mask_decoder_passes,
            "fuse": fuse,
        }
        if plain_attention:
            use_plain_attention(self.model)
            self.notes["attention"] = "torch scaled_dot_product_attention, no position terms"

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        """Return the mean loss per masked token of the model's own objective."""
        losses = self.model(batch.unpadded(), DropoutSeeds(1, step, batch.samples)).losses
        return cast(Tensor, losses["masked"].loss) / batch.labels.numel()

    def eager(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is compiled."""
        return torch.compiler.set_stance("force_eager")

    def flops_per_token(self, batch: StepBatch) -> float:
        """Return the FLOPs by the formula of the training log."""
        rows, length = batch.input_ids.shape
        return training_flops_per_token(self._config, length, rows, MASKED_SHARE)


class OurEncoder(Ours):
    """The encoder of this project's model without mask decoder; the head is not computed."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(replace(setting, model=without_mask_decoder(setting.model)))

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        """Return the mean square of a feature; LayerNorm fixes that of all features together."""
        seeds = DropoutSeeds(1, step, batch.samples)
        hidden: Tensor = self.model.encode(ModelInputs(batch.input_ids), seeds)  # type: ignore[operator]
        return hidden[..., 0].float().square().mean()

    def flops_per_token(self, batch: StepBatch) -> float:
        """Return the FLOPs of forward and backward per token, without those of the head."""
        rows, length = batch.input_ids.shape
        flops = forward_flops(self._config, length, rows, MASKED_SHARE)
        return BACKWARD_FACTOR * (flops.total - flops.head)


def use_plain_attention(model: nn.Module) -> None:
    """Replace the attention operator of every layer by torch's attention without positions.

    Raises:
        AttributeError: the attention has no method ``_attend``.
    """
    for module in model.modules():
        if isinstance(module, DisentangledSelfAttention):
            _ = module._attend
            module._attend = partial(_plain_attention, module)  # type: ignore[method-assign]


def _plain_attention(
    module: DisentangledSelfAttention, query: Tensor, key_value: Any, _: Any, context: Any
) -> Tensor:
    dropout = module.attention_dropout if context.seeds is not None else 0.0
    return F.scaled_dot_product_attention(query, key_value.key, key_value.value, dropout_p=dropout)


class Stock:
    """transformers' ``DebertaV2ForMaskedLM`` with its own loss, which computes all logits."""

    def __init__(self, setting: Setting, *, disentangled_flash: bool = False) -> None:
        plain = without_mask_decoder(setting.model)
        self._config = stock_config(plain)
        with setting.device:
            model = DebertaV2ForMaskedLM(self._config)
        self.model = model.to(setting.dtype).train()
        self.notes: dict[str, Any] = {"attention": "eager"}
        if disentangled_flash:
            from disentangled_flash import __version__, optimize_deberta_training

            optimize_deberta_training(self.model.deberta, backend="triton")
            self.notes = {"attention": f"DisentangledFlash {__version__}, training path"}

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        """Return the mean loss per masked token; dropout uses torch's generator, not ``step``."""
        return self._loss(self.model, batch.input_ids, batch.dense_labels())

    def eager(self) -> AbstractContextManager[Any]:
        """Return an empty context: the model is never compiled."""
        return nullcontext()

    def flops_per_token(self, batch: StepBatch) -> float:
        """Return the FLOPs of the eager form by torch's counter on the meta device."""
        with torch.device("meta"):
            model = DebertaV2ForMaskedLM(self._config)
        ids = torch.zeros_like(batch.input_ids, device="meta")
        with FlopCounterMode(display=False) as counter:
            self._loss(model, ids, ids).backward()
        return float(counter.get_total_flops() / ids.numel())

    def _loss(self, model: DebertaV2ForMaskedLM, ids: Tensor, labels: Tensor) -> Tensor:
        return cast(Tensor, model(ids, torch.ones_like(ids), labels=labels).loss)


class StockEncoder(Stock):
    """The encoder of transformers' model; the head is not computed."""

    def _loss(self, model: DebertaV2ForMaskedLM, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = model.deberta(ids, torch.ones_like(ids)).last_hidden_state
        return cast(Tensor, hidden[..., 0].float().square().mean())
