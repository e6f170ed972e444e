"""Validation of the keys of objectives and of the heads that they train."""

from __future__ import annotations

from dataclasses import replace

from megatron_deberta.config.schema import (
    PRETRAINING_HEADS,
    ModelConfig,
    ObjectiveConfig,
    RTDConfig,
    RunConfig,
)
from megatron_deberta.errors import ConfigError


def causal_fraction(objective: ObjectiveConfig) -> float:
    """Return the fraction of the steps whose batch is autoregressive."""
    fractions = {"autoregressive": 1.0, "mlm+ar": objective.autoregressive_fraction}
    return fractions.get(objective.name, 0.0)


def trained_forms(objective: ObjectiveConfig) -> tuple[str, ...]:
    """Return the forms that an objective trains a language model in."""
    fraction = causal_fraction(objective)
    return ("masked",) * (fraction < 1) + ("autoregressive",) * (fraction > 0)


def single_forms(objective: ObjectiveConfig) -> list[tuple[float, ObjectiveConfig]]:
    """Return the objectives whose batches an objective mixes, each with its fraction of the steps.

    Returns:
        The objective itself if all its batches have the same form.
    """
    if objective.name != "mlm+ar":
        return [(1.0, objective)]
    fraction = causal_fraction(objective)
    masked, causal = replace(objective, name="mlm"), replace(objective, name="autoregressive")
    return [(1 - fraction, masked), (fraction, causal)]


def check_objective(config: RunConfig) -> None:
    """Check objective and head, and the keys of single objectives.

    Raises:
        ConfigError: names the first wrong key, its value and a remedy.
    """
    _check_masking(config.objective)
    _check_head(config)
    _check_forms(config)
    _check_replaced_tokens(config.model, config.rtd)


def _check_masking(objective: ObjectiveConfig) -> None:
    if objective.mask_probability == 0:
        raise ConfigError("objective.mask_probability=0 masks no tokens; the paper uses 0.15")
    replaced = objective.mask_token_probability + objective.random_token_probability
    if replaced > 1 + 1e-9:
        raise ConfigError(
            f"objective.mask_token_probability={objective.mask_token_probability} and "
            f"objective.random_token_probability={objective.random_token_probability} add up to "
            f"{replaced:g}; the sum must not exceed 1"
        )


def _check_head(config: RunConfig) -> None:
    model, objective = config.model, config.objective
    if model.head != ("mlm" if objective.name == "mlm+ar" else objective.name):
        raise ConfigError(
            f"objective.name={objective.name} does not fit model.head={model.head}; use the same "
            "for both, or objective.name=mlm+ar with model.head=mlm"
        )
    if model.head in ("classification", "tokens") and len(model.labels) < 2:
        raise ConfigError(
            f"model.labels={list(model.labels)} has fewer than two classes for model.head="
            f"{model.head}; name the classes"
        )
    if model.head == "discriminator":
        raise ConfigError(
            "objective.name=discriminator is no training task; use rtd for it and model.head"
        )
    is_pretraining = model.head in PRETRAINING_HEADS
    if is_pretraining and objective.sift_weight:
        raise ConfigError(
            f"objective.sift_weight={objective.sift_weight:g} needs a labelled task; set it to 0"
        )
    if is_pretraining != (not config.finetune.task):
        raise ConfigError(
            f"finetune.task={config.finetune.task!r} does not fit model.head={model.head}; use "
            "megatron-deberta finetune, which sets both"
        )
    if config.finetune.pack_rows and objective.sift_weight:
        raise ConfigError(
            f"finetune.pack_rows=true does not fit objective.sift_weight="
            f"{objective.sift_weight:g}; use false, or no SiFT"
        )


def _check_forms(config: RunConfig) -> None:
    objective, guard, model = config.objective, config.guard, config.model
    if causal_fraction(objective) and model.next_sentence_head:
        raise ConfigError(
            f"objective.name={objective.name} has no pairs of segments; set "
            "model.next_sentence_head=false and data.packing=full_sentences"
        )
    if objective.name != "mlm+ar":
        return
    fraction = objective.autoregressive_fraction
    if not 0 < fraction < 1:
        raise ConfigError(
            f"objective.autoregressive_fraction={fraction:g} has batches of one form only; use "
            "objective.name=mlm or =autoregressive"
        )
    if guard.spike_sigmas and min(fraction, 1 - fraction) < 2 / guard.spike_warmup:
        raise ConfigError(
            f"objective.autoregressive_fraction={fraction:g} leaves the spike guard too few "
            f"batches of one form among guard.spike_warmup={guard.spike_warmup}; set "
            "guard.spike_sigmas=0"
        )


def _check_replaced_tokens(model: ModelConfig, rtd: RTDConfig) -> None:
    if model.head != "rtd":
        if model.generator_layers:
            raise ConfigError(
                f"model.generator_layers={model.generator_layers} needs model.head=rtd; set it to 0"
            )
        return
    if model.type_vocab_size or model.next_sentence_head:
        raise ConfigError(
            "model.head=rtd has no segments; set model.type_vocab_size=0, "
            "model.next_sentence_head=false and data.packing=full_sentences"
        )
    if model.absolute_positions == "input" and model.embedding_sharing != "none":
        raise ConfigError(
            f"model.embedding_sharing={model.embedding_sharing} shares no absolute positions; use "
            "model.absolute_positions=decoder, or model.embedding_sharing=none"
        )
    if rtd.update == "alternating" and model.embedding_sharing == "es":
        raise ConfigError(
            "rtd.update=alternating cannot train the one table of model.embedding_sharing=es with "
            "two optimizers; use gdes, none or rtd.update=joint"
        )
    rate = rtd.discriminator_learning_rate
    if rate and rtd.update == "joint":
        raise ConfigError(f"rtd.discriminator_learning_rate={rate:g} needs rtd.update=alternating")
