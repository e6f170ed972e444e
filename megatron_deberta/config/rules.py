"""Validation of config values, and the batch arithmetic. Types and names: ``loader.py``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from megatron_deberta.config.phases import check_durations, segments
from megatron_deberta.config.schema import (
    AUTO,
    BALANCED,
    CLASS_HEADS,
    LANGUAGE_MODEL_HEADS,
    LORA_TARGETS,
    NOTIFY_EVENTS,
    PRETRAINING_HEADS,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    GuardConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RTDConfig,
    RunConfig,
    check_ranges,
    head_of,
)
from megatron_deberta.errors import ConfigError, MegatronDebertaError, TopologyError


class BatchArithmetic(NamedTuple):
    """Distribution of one optimizer step's sequences over ranks and micro batches."""

    dp_size: int
    micro_batch_size: int
    accumulation_steps: int
    tokens_per_step: int
    """Tokens per optimizer step, padding included."""


def validate(config: RunConfig) -> None:
    """Check everything that does not depend on the number of ranks.

    Raises:
        ConfigError: names the first wrong key, its value and a remedy.
    """
    _validate_alone(config)
    check_durations(config)
    _check_phases(config)


def _validate_alone(config: RunConfig) -> None:
    """Check a config without its phases, or that of a segment."""
    check_ranges(config)
    _check_architecture(config.model)
    _check_lengths(config.model, config.data)
    _check_pairs(config.model, config.data)
    _check_objective(config)
    _check_parallel(config.model, config.data, config.parallel)
    _check_precision(config.precision)
    _check_schedule(config)
    _check_guard(config.guard)
    _check_checkpoint(config.checkpoint)
    _check_minimal_pairs(config)
    _check_cluster(config)


def validate_for_world(config: RunConfig, world_size: int) -> BatchArithmetic:
    """Check that the config runs on this many ranks.

    Args:
        config: the run.
        world_size: number of ranks; tensor-parallel times data-parallel size.

    Returns:
        The batch arithmetic on those ranks, of the first steps where it changes.

    Raises:
        ConfigError: a batch does not divide, or ``validate`` fails.
        TopologyError: the ranks do not divide into tensor-parallel groups.
    """
    validate(config)
    tp_size = config.parallel.tensor_parallel_size
    # The model's sizes are divisible already; they only limit the choices in the message.
    check_tensor_parallel_divides(
        tp_size,
        {"world_size": world_size, "model.num_heads": config.model.num_heads},
        error=TopologyError,
    )
    dp_size = world_size // tp_size
    found = [batch_arithmetic(part.config, dp_size) for part in segments(config)]
    if uses_whole_batch(config) and any(each.accumulation_steps > 1 for each in found):
        whole = config.train.global_batch_size // dp_size
        raise ConfigError(
            f"train.micro_batch_size={config.train.micro_batch_size} divides the batch, whose "
            "texts are each other's negatives with model.head=embed; set "
            f"train.micro_batch_size={whole} (parallel.recompute=full saves memory), or "
            "objective.positive_similarity=null"
        )
    return found[0]


def uses_whole_batch(config: RunConfig) -> bool:
    """Return whether the loss of a sample depends on the others of the global batch."""
    return config.model.head == "embed" and config.objective.positive_similarity is not None


def batch_arithmetic(config: RunConfig, dp_size: int) -> BatchArithmetic:
    """Divide the global batch over data-parallel ranks and micro batches.

    global_batch_size = micro_batch_size x accumulation_steps x dp_size.

    Args:
        config: the run.
        dp_size: number of data-parallel ranks.

    Raises:
        ConfigError: it does not divide; names the nearest batch sizes that do.
    """
    total = config.train.global_batch_size
    micro = config.train.micro_batch_size
    unit = micro * dp_size
    if total % unit:
        below = total // unit * unit
        near = ", ".join(str(size) for size in (below, below + unit) if size > 0)
        remedy = f"nearest train.global_batch_size: {near}"
        if total % dp_size == 0:
            remedy += f"; or train.micro_batch_size={_nearest_divisor(total // dp_size, micro)}"
        raise ConfigError(
            f"train.global_batch_size={total} is not a multiple of train.micro_batch_size={micro} "
            f"x {dp_size} data-parallel ranks = {unit}; {remedy}"
        )
    return BatchArithmetic(
        dp_size=dp_size,
        micro_batch_size=micro,
        accumulation_steps=total // unit,
        tokens_per_step=total * config.data.sequence_length,
    )


def _check_phases(config: RunConfig) -> None:
    parts = segments(config)
    if len(parts) == 1 and not config.train.phases:
        return
    for part in parts:
        try:
            _validate_alone(part.config)
        except ConfigError as error:
            where = "data.short_sequence_length" if part.stage.is_short else f"phase {part.phase}"
            raise ConfigError(f"{where}: {error}") from error
        data = part.config.data
        if data.train != config.data.train and data.validation_fraction and not data.validation:
            raise ConfigError(
                f"phase {part.phase} changes data.train, but validation is split off it "
                f"(data.validation_fraction={data.validation_fraction:g}), so that documents held "
                "out in one phase could be trained on in another; set data.validation"
            )


def check_tensor_parallel_divides(
    tp_size: int,
    sizes: Mapping[str, int],
    *,
    reason: str = "",
    error: type[MegatronDebertaError] = ConfigError,
) -> None:
    """Check that the tensor-parallel size divides every one of ``sizes``.

    Args:
        tp_size: ``parallel.tensor_parallel_size``.
        sizes: what must be divisible: the name to show in the message -> the size.
        reason: clause appended to the message, such as "for sequence parallelism".
        error: type of the error to raise.

    Raises:
        ConfigError: (or ``error``) a size is not divisible.
    """
    for name, size in sizes.items():
        if tp_size < 1 or size % tp_size:
            common = math.gcd(*sizes.values())
            choices = [n for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise error(
                f"parallel.tensor_parallel_size={tp_size} does not divide {name}={size}"
                f"{reason and ' '}{reason}; choose one of {choices}"
            )


def causal_fraction(objective: ObjectiveConfig) -> float:
    """Return the fraction of the steps whose batch is autoregressive."""
    fractions = {"autoregressive": 1.0, "mlm+ar": objective.autoregressive_fraction}
    return fractions.get(objective.name, 0.0)


def decoder_masking(objective: ObjectiveConfig) -> ObjectiveConfig | None:
    """Return how rows are masked for a decoder beside the encoder; None: there is no decoder.

    Everything to predict becomes [MASK]: no later use of the decoder has to resemble training.
    """
    if objective.name != "retromae":
        return None
    return replace(
        objective,
        mask_probability=objective.retromae_mask_probability,
        mask_token_probability=1.0,
        random_token_probability=0.0,
        masking="uniform",
    )


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


def check_model(model: ModelConfig) -> None:
    """Check that a model of this architecture can be built.

    Raises:
        ConfigError: its values contradict each other, or the vocabulary's size is not known yet.
    """
    if model.vocab_size == AUTO:
        raise ConfigError("model.vocab_size=auto needs a tokenizer; set the number of rows")
    _check_architecture(model)


def _check_architecture(model: ModelConfig) -> None:
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads} does not divide model.hidden_size="
            f"{model.hidden_size}; use {_nearest_divisor(model.hidden_size, model.num_heads)} heads"
        )
    buckets, kernel = model.position_buckets, model.conv_kernel_size
    if buckets is not None and not 4 <= buckets <= model.max_relative_positions:
        raise ConfigError(
            f"model.position_buckets={buckets} is not between 4 and "
            f"model.max_relative_positions={model.max_relative_positions}; null means no buckets"
        )
    if buckets is not None and buckets % 2:
        raise ConfigError(
            f"model.position_buckets={buckets} is odd, but half of the buckets are "
            f"exact distances; use {buckets + 1}"
        )
    if kernel is not None and kernel % 2 == 0:
        raise ConfigError(
            f"model.conv_kernel_size={kernel} is even and has no center; use {kernel + 1}, or null "
            "for no convolution"
        )
    if model.absolute_positions == "decoder" and model.mask_decoder_passes == 0:
        raise ConfigError(
            "model.absolute_positions=decoder needs the mask decoder, but "
            "model.mask_decoder_passes=0; use absolute_positions=none or =input"
        )


def _check_lengths(model: ModelConfig, data: DataConfig) -> None:
    length = data.sequence_length
    if length < 4:
        raise ConfigError(f"data.sequence_length={length} leaves no room for text; use 4 or more")
    if model.absolute_positions != "none" and length > model.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={length} exceeds model.max_position_embeddings="
            f"{model.max_position_embeddings}; lower the one or raise the other"
        )
    if data.short_steps and not 4 <= data.short_sequence_length < length:
        raise ConfigError(
            f"data.short_sequence_length={data.short_sequence_length} is not between 4 and "
            f"data.sequence_length={length}, but data.short_steps={data.short_steps}; lower it, "
            "or set data.short_steps=0"
        )


def _check_pairs(model: ModelConfig, data: DataConfig) -> None:
    if model.head not in PRETRAINING_HEADS:
        return
    pairs = data.packing in ("segment_pair", "sentence_pair")
    if pairs != model.next_sentence_head:
        raise ConfigError(
            f"model.next_sentence_head={str(model.next_sentence_head).lower()} is "
            f"incompatible with data.packing={data.packing}; "
            + ("set it to true" if pairs else "set it to false, or pack segment_pair")
        )
    if model.type_vocab_size == 1 or (pairs and model.type_vocab_size == 0):
        raise ConfigError(
            f"model.type_vocab_size={model.type_vocab_size} with data.packing={data.packing}; "
            "use 2 for pairs and 0 for other rows"
        )
    if pairs and not data.attend_across_documents:
        raise ConfigError(
            f"data.attend_across_documents=false would prevent attention between the segments of "
            f"data.packing={data.packing}; set it to true"
        )


def _check_objective(config: RunConfig) -> None:
    """Check objective and head, and the keys of single objectives."""
    _check_masking(config.objective)
    _check_head(config)
    _check_forms(config)
    _check_replaced_tokens(config.model, config.rtd)
    _check_retromae(config)


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
    head = head_of(objective.name)
    if model.head != head:
        raise ConfigError(
            f"objective.name={objective.name} does not fit model.head={model.head}; set "
            f"model.head={head}, which is the default, or objective.name={model.head}"
        )
    if model.head in CLASS_HEADS and len(model.labels) < 2:
        raise ConfigError(
            f"model.labels={list(model.labels)} has fewer than two classes for model.head="
            f"{model.head}; name the classes"
        )
    if model.head == "discriminator":
        raise ConfigError(
            "objective.name=discriminator is no training task; use rtd for it and model.head"
        )
    if model.head == "embed" and objective.sift_weight:
        raise ConfigError(
            f"objective.sift_weight={objective.sift_weight:g} does not fit model.head=embed, which "
            "predicts no distribution; set it to 0"
        )
    is_pretraining = model.head in PRETRAINING_HEADS
    if is_pretraining and objective.sift_weight:
        raise ConfigError(
            f"objective.sift_weight={objective.sift_weight:g} needs a labelled task; set it to 0"
        )
    if is_pretraining != (not config.finetune.task):
        raise ConfigError(
            f"finetune.task={config.finetune.task} does not fit model.head={model.head}; use "
            "megatron-deberta finetune, which sets both"
        )
    if config.finetune.pack_rows and objective.sift_weight:
        raise ConfigError(
            f"finetune.pack_rows=true does not fit objective.sift_weight="
            f"{objective.sift_weight:g}; use false, or no SiFT"
        )
    _check_class_weights(config)
    _check_adapters(config)


def _check_adapters(config: RunConfig) -> None:
    """Check the keys of low-rank adapters."""
    rank, targets = config.finetune.lora_rank, config.finetune.lora_targets
    if rank is None:
        return
    if not config.finetune.task:
        raise ConfigError(
            f"finetune.lora_rank={rank} is for labelled tasks; set it to null for pretraining"
        )
    if rank > config.model.hidden_size:
        raise ConfigError(
            f"finetune.lora_rank={rank} is above model.hidden_size={config.model.hidden_size}; "
            "use a small rank such as 8"
        )
    if config.optimizer.freeze:
        raise ConfigError(
            f"finetune.lora_rank={rank} freezes all weights but adapters and head; remove "
            "optimizer.freeze"
        )
    unknown = [target for target in targets if target not in LORA_TARGETS]
    if unknown or not targets:
        raise ConfigError(
            f"finetune.lora_targets=[{','.join(targets)}] must name one or more of "
            f"{', '.join(LORA_TARGETS)}"
        )
    if len(set(targets)) < len(targets):
        raise ConfigError(
            f"finetune.lora_targets=[{','.join(targets)}] names a projection twice; name it once"
        )


def _check_class_weights(config: RunConfig) -> None:
    """Check ``finetune.class_weights`` and ``finetune.focal_gamma``."""
    weights, labels, head = config.finetune.class_weights, config.model.labels, config.model.head
    for key in ("class_weights", "focal_gamma"):
        if (value := getattr(config.finetune, key)) and head not in CLASS_HEADS:
            raise ConfigError(
                f"finetune.{key}={value} does not fit model.head={head}, which has no classes; "
                f"only for {', '.join(CLASS_HEADS)}"
            )
    if weights in ((), BALANCED):
        return
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        numbers = []
    if len(numbers) != len(labels) or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(
            f"finetune.class_weights=[{','.join(map(str, weights))}] is not a positive number for "
            f"each of the {len(labels)} classes {', '.join(labels[:8])}; write as many, or balanced"
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
            "guard.spike_sigmas=null"
        )


def _check_replaced_tokens(model: ModelConfig, rtd: RTDConfig) -> None:
    if model.head != "rtd":
        if model.generator_layers:
            raise ConfigError(
                f"model.generator_layers={model.generator_layers} needs model.head=rtd; set it to "
                "null"
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


def _check_retromae(config: RunConfig) -> None:
    if config.objective.name != "retromae":
        return
    if config.objective.retromae_mask_probability == 0:
        raise ConfigError(
            "objective.retromae_mask_probability=0 leaves the decoder nothing to predict; the "
            "paper uses 0.5 to 0.7"
        )
    if config.model.next_sentence_head:
        raise ConfigError(
            "objective.name=retromae has no pairs of segments; set model.next_sentence_head=false "
            "and data.packing=doc_sentences"
        )
    if not config.data.attend_across_documents:
        raise ConfigError(
            "data.attend_across_documents=false would hide the embedding of a row from its later "
            "documents with objective.name=retromae; set it to true, and data.packing=doc_sentences"
        )


def _check_parallel(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> None:
    tp_size = parallel.tensor_parallel_size
    split = {
        "model.num_heads": model.num_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
    }
    if model.conv_kernel_size is not None:
        split["model.hidden_size"] = model.hidden_size
    check_tensor_parallel_divides(tp_size, split)
    if not parallel.sequence_parallel:
        return
    if tp_size == 1:
        raise ConfigError(
            "parallel.sequence_parallel=true needs parallel.tensor_parallel_size above 1; "
            "set it to false"
        )
    check_tensor_parallel_divides(
        tp_size,
        {"data.sequence_length": data.sequence_length},
        reason="under parallel.sequence_parallel=true",
    )


def check_stage(precision: PrecisionConfig) -> None:
    """Check that DeepSpeed's stage 0 is not used with a 16-bit format.

    It executes an Adam step with zero gradients at start-up, so that bias correction is off by one,
    and omits the other tensor-parallel ranks' shards from the gradient norm.

    Raises:
        ConfigError: stage 0 with a 16-bit format.
    """
    is_half = precision.dtype in ("bf16", "fp16")
    if precision.engine != "plain" and precision.zero_stage == 0 and is_half:
        raise ConfigError(
            f"precision.zero_stage=0 with precision.dtype={precision.dtype} computes wrong updates "
            "in DeepSpeed; use precision.zero_stage=1, which has no overhead on one rank"
        )


def _check_precision(precision: PrecisionConfig) -> None:
    sharded = precision.engine != "plain" and precision.zero_stage > 0
    check_stage(precision)
    if precision.offload_optimizer and not sharded:
        raise ConfigError(
            "precision.offload_optimizer=true needs precision.engine=deepspeed and "
            "precision.zero_stage of 1 or more"
        )
    if precision.initial_loss_scale_power > 32:
        raise ConfigError(
            f"precision.initial_loss_scale_power={precision.initial_loss_scale_power} "
            "overflows immediately; use 16"
        )


def _check_schedule(config: RunConfig) -> None:
    steps, optimizer = config.train.steps, config.optimizer
    if not config.train.run_dir:
        raise ConfigError("train.run_dir is empty; set the run folder")
    # With ``finetune.epochs``, the number of steps is known with the data only.
    is_open = config.finetune.task is not None and config.finetune.epochs is not None
    if not is_open and optimizer.warmup_fraction is None and optimizer.warmup_steps > steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} exceeds train.steps={steps}, so the "
            f"peak learning rate is never reached; use {max(steps // 10, 1)}, or "
            "optimizer.warmup_fraction=0.1"
        )
    _check_decay(optimizer, steps)
    if config.train.exit_step is not None and config.train.exit_step > steps:
        raise ConfigError(
            f"train.exit_step={config.train.exit_step} exceeds train.steps={steps}; "
            "use null to run to the end"
        )
    if optimizer.learning_rate > 1:
        raise ConfigError(
            f"optimizer.learning_rate={optimizer.learning_rate:g} is above 1; the paper uses 2e-4"
        )


def _check_decay(optimizer: OptimizerConfig, steps: int) -> None:
    decay = round((optimizer.decay_fraction or 0) * steps) or optimizer.decay_steps
    if optimizer.schedule != "wsd":
        if decay:
            raise ConfigError(
                f"optimizer.decay_steps={decay} with optimizer.schedule={optimizer.schedule}, "
                "which has no such phase; use schedule=wsd, or null"
            )
        return
    warmup = round((optimizer.warmup_fraction or 0) * steps) or optimizer.warmup_steps
    if decay is None or not 1 <= decay <= steps - warmup:
        raise ConfigError(
            f"optimizer.decay_steps={decay} is not between 1 and the {steps - warmup} steps after "
            "the warm-up; set decay_steps, decay_tokens or decay_fraction of optimizer.schedule=wsd"
        )


def _check_guard(guard: GuardConfig) -> None:
    for name, value in (("spike_warmup", guard.spike_warmup), ("max_skips", guard.max_skips)):
        if value > guard.spike_window:
            raise ConfigError(
                f"guard.{name}={value} exceeds guard.spike_window={guard.spike_window}, so it is "
                f"never reached; use {guard.spike_window} or less"
            )
    if guard.spike_sigmas is not None and guard.spike_sigmas < 3:
        raise ConfigError(
            f"guard.spike_sigmas={guard.spike_sigmas:g} would skip ordinary steps; use 6, or null "
            "to disable it"
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    every, kept = checkpoint.save_every, checkpoint.keep_every
    if every is not None and kept is not None and kept % every:
        raise ConfigError(
            f"checkpoint.keep_every={kept} is not a multiple of checkpoint.save_every={every}, so "
            f"most of those steps have no checkpoint; use {kept // every * every + every}"
        )
    if checkpoint.local_every and not checkpoint.local_dir:
        raise ConfigError(
            f"checkpoint.local_every={checkpoint.local_every} without checkpoint.local_dir; name a "
            "folder on every node's own disk or memory, such as /dev/shm/megatron"
        )


def _check_minimal_pairs(config: RunConfig) -> None:
    every, data = config.train.blimp_every, config.train.blimp_data
    if every and not data:
        raise ConfigError(
            f"train.blimp_every={every} needs train.blimp_data; set the folder of BLiMP's files"
        )
    if every and config.model.head not in LANGUAGE_MODEL_HEADS:
        raise ConfigError(
            f"train.blimp_every={every} needs a language model, but model.head="
            f"{config.model.head}; set it to null"
        )


def _check_cluster(config: RunConfig) -> None:
    ranks = config.cluster.ranks_per_node
    if ranks:
        check_tensor_parallel_divides(
            config.parallel.tensor_parallel_size, {"cluster.ranks_per_node": ranks}
        )
    _check_notifications(config.cluster)


def _check_notifications(cluster: ClusterConfig) -> None:
    for event in cluster.notify_events:
        if event not in NOTIFY_EVENTS:
            known = ", ".join(NOTIFY_EVENTS)
            raise ConfigError(f"cluster.notify_events: no event {event!r}; use {known}")
    for target in cluster.notify:
        if not re.fullmatch(r"https?://\S+|\w[\w.-]*", target):
            raise ConfigError(
                f"cluster.notify={target!r} is neither a URL nor the name of a program; put the "
                "program into ~/.config/megatron_deberta/notify"
            )
    try:
        datetime.fromisoformat(cluster.deadline or "2026-01-01").timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"cluster.deadline={cluster.deadline!r} is no date and time; write it as "
            "2026-12-31T18:00"
        ) from None
    if cluster.prometheus_port is not None and cluster.prometheus_port > 65535:
        raise ConfigError(
            f"cluster.prometheus_port={cluster.prometheus_port} is no port; use 1024 to 65535"
        )
    if cluster.prometheus_file and not cluster.prometheus_file.endswith(".prom"):
        raise ConfigError(
            f"cluster.prometheus_file={cluster.prometheus_file}: node_exporter reads only names "
            "that end with .prom"
        )


def _nearest_divisor(number: int, target: int) -> int:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return min(divisors, key=lambda size: (abs(size - target), size))
