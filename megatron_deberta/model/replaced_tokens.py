"""Generator and discriminator of replaced-token detection (DeBERTaV3)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.deberta import DebertaBackbone, DebertaForPretraining, RuntimeOptions
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.model.embeddings import SharedTokenEmbedding
from megatron_deberta.model.heads import ReplacedTokenHead
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.weight_init import init_parameters

GENERATOR, DISCRIMINATOR = "generator.", "discriminator."
"""Prefixes of the canonical parameter names of the two models."""
TOKENS, DELTA = "embeddings.token.weight", "embeddings.token.delta.weight"
"""Names of the token embeddings, and of the discriminator's delta."""


def generator_config(model: ModelConfig) -> ModelConfig:
    """Return the generator's architecture: a pretraining model with a mask decoder.

    Args:
        model: with ``head: rtd``; ``generator_layers`` of None stands for half of ``num_layers``.
    """
    layers = model.generator_layers or max(1, model.num_layers // 2)
    return replace(
        model, head="mlm", num_layers=layers, generator_layers=None, embedding_sharing="gdes"
    )


def discriminator_config(model: ModelConfig) -> ModelConfig:
    """Return the discriminator's architecture: an encoder without the mask decoder."""
    at_input = model.absolute_positions == "input"
    return replace(
        model,
        head="discriminator",
        mask_decoder_passes=0,
        absolute_positions="input" if at_input else "none",
        generator_layers=None,
        embedding_sharing="gdes",
    )


def single_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Return the architectures that a model consists of: two for ``head: rtd``, else one."""
    if model.head == "rtd":
        return generator_config(model), discriminator_config(model)
    return (model,)


class DebertaDiscriminator(DebertaBackbone):
    """Encoder with the head that detects replaced tokens."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add the head."""
        self.head = ReplacedTokenHead(config)

    def logits(self, inputs: ModelInputs, seeds: DropoutSeeds | None = None) -> Tensor:
        """Compute the logits ``[B, N]`` of being replaced; arguments as in `encode`."""
        out: Tensor = self.head(self.encode(inputs, seeds))
        return out

    forward = logits


class DebertaForReplacedTokens(nn.Module):
    """Generator and discriminator, without a ``forward``.

    Source: He et al. 2021, arXiv:2111.09543, sections 3.2 and 3.3, with the released code's head.

    Args:
        config: the discriminator's architecture, with ``head: rtd``.
        options: how both run.
        seed: of the initial weights; None: drawn from torch's default generator.
    """

    generator_class: ClassVar[type[DebertaForPretraining]] = DebertaForPretraining

    def __init__(
        self,
        config: ModelConfig,
        options: RuntimeOptions | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.generator = self.generator_class(generator_config(config), options, seed=0)
        self.discriminator = DebertaDiscriminator(discriminator_config(config), options, seed=0)
        if config.embedding_sharing != "none":
            self.discriminator.embeddings.token = SharedTokenEmbedding(
                self.generator.embeddings, config, disentangled=config.embedding_sharing == "gdes"
            )
        self.init_weights(seed)

    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter by its name, which includes the model's prefix."""
        init_parameters(self, self.config, seed)
