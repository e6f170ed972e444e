"""Validation of config values, and the batch arithmetic. Types and names: ``loader.py``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
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
    ClusterConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RTDConfig,
    RunConfig,
    check_ranges,
    head_of,
    refuse,
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
    refuse(config, _broken_rules(config))


def _broken_rules(config: RunConfig) -> Iterator[str]:
    """Yield the messages of broken rules, as for ``refuse``."""
    yield from _architecture_rules(config.model)
    yield from _data_rules(config.model, config.data)
    yield from _head_rules(config)
    yield from _adapter_rules(config)
    yield from _objective_rules(config)
    yield from _replaced_token_rules(config.model, config.rtd)
    yield from _parallel_rules(config)
    yield from _schedule_rules(config)
    yield from _record_rules(config)
    yield from _notification_rules(config.cluster)


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
        problem = (
            "$train.micro_batch_size divides the batch, whose texts are each other's negatives "
            f"with $model.head; set train.micro_batch_size={whole} (parallel.recompute=full saves "
            "memory), or objective.positive_similarity=null"
        )
        refuse(config, [problem])
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
    refuse(RunConfig(model=model), _architecture_rules(model))


def _architecture_rules(model: ModelConfig) -> Iterator[str]:
    buckets, kernel = model.position_buckets, model.conv_kernel_size
    if model.hidden_size % model.num_heads:
        yield (
            "$model.num_heads does not divide $model.hidden_size; use "
            f"{_nearest_divisor(model.hidden_size, model.num_heads)} heads"
        )
    if buckets is not None:
        if not 4 <= buckets <= model.max_relative_positions:
            yield (
                "$model.position_buckets is not between 4 and $model.max_relative_positions; null "
                "means no buckets"
            )
        if buckets % 2:
            yield (
                "$model.position_buckets is odd, but half of the buckets are exact distances; use "
                f"{buckets + 1}"
            )
    if kernel is not None and kernel % 2 == 0:
        yield (
            f"$model.conv_kernel_size is even and has no center; use {kernel + 1}, or null for no "
            "convolution"
        )
    if model.absolute_positions == "decoder" and model.mask_decoder_passes == 0:
        yield (
            "$model.absolute_positions needs the mask decoder, but $model.mask_decoder_passes; "
            "use absolute_positions=none or =input"
        )


def _data_rules(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    length = data.sequence_length
    if length < 4:
        yield "$data.sequence_length leaves no room for text; use 4 or more"
    if model.absolute_positions != "none" and length > model.max_position_embeddings:
        yield (
            "$data.sequence_length exceeds $model.max_position_embeddings; lower the one or raise "
            "the other"
        )
    if data.short_steps and not 4 <= data.short_sequence_length < length:
        yield (
            "$data.short_sequence_length is not between 4 and $data.sequence_length, but "
            "$data.short_steps; lower it, or set data.short_steps=0"
        )
    if model.head not in PRETRAINING_HEADS:
        return
    pairs = data.packing in ("segment_pair", "sentence_pair")
    remedy = "set it to true" if pairs else "set it to false, or pack segment_pair"
    if pairs != model.next_sentence_head:
        yield f"$model.next_sentence_head is incompatible with $data.packing; {remedy}"
    if model.type_vocab_size == 1 or (pairs and model.type_vocab_size == 0):
        yield "$model.type_vocab_size with $data.packing; use 2 for pairs and 0 for other rows"
    if pairs and not data.attend_across_documents:
        yield (
            "$data.attend_across_documents would prevent attention between the segments of "
            "$data.packing; set it to true"
        )


def _head_rules(config: RunConfig) -> Iterator[str]:
    model, finetune, sift = config.model, config.finetune, config.objective.sift_weight
    head = head_of(config.objective.name)
    if model.head != head:
        yield (
            f"$objective.name does not fit $model.head; set model.head={head}, which is the "
            f"default, or objective.name={model.head}"
        )
    if model.head in CLASS_HEADS and len(model.labels) < 2:
        yield "$model.labels has fewer than two classes for $model.head; name the classes"
    if model.head == "discriminator":
        yield "$objective.name is no training task; use rtd for it and model.head"
    if model.head == "embed" and sift:
        yield (
            "$objective.sift_weight does not fit $model.head, which predicts no distribution; set "
            "it to 0"
        )
    is_pretraining = model.head in PRETRAINING_HEADS
    if is_pretraining and sift:
        yield "$objective.sift_weight needs a labelled task; set it to 0"
    if is_pretraining != (not finetune.task):
        yield (
            "$finetune.task does not fit $model.head; use megatron-deberta finetune, which sets "
            "both"
        )
    if finetune.pack_rows and sift:
        yield "$finetune.pack_rows does not fit $objective.sift_weight; use false, or no SiFT"
    for key in ("class_weights", "focal_gamma"):
        if getattr(finetune, key) and model.head not in CLASS_HEADS:
            yield (
                f"$finetune.{key} does not fit $model.head, which has no classes; only for "
                f"{', '.join(CLASS_HEADS)}"
            )
    if finetune.class_weights not in ((), BALANCED) and not _is_weighted(config):
        yield (
            f"$finetune.class_weights is not a positive number for each of the {len(model.labels)} "
            f"classes {', '.join(model.labels[:8])}; write as many, or balanced"
        )


def _is_weighted(config: RunConfig) -> bool:
    """Return whether ``finetune.class_weights`` has a positive number per class."""
    weights = config.finetune.class_weights
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        return False
    return len(numbers) == len(config.model.labels) and all(0 < each < math.inf for each in numbers)


def _adapter_rules(config: RunConfig) -> Iterator[str]:
    """Yield the rules of low-rank adapters."""
    rank, targets = config.finetune.lora_rank, config.finetune.lora_targets
    if rank is None:
        return
    if not config.finetune.task:
        yield "$finetune.lora_rank is for labelled tasks; set it to null for pretraining"
    if rank > config.model.hidden_size:
        yield "$finetune.lora_rank is above $model.hidden_size; use a small rank such as 8"
    if config.optimizer.freeze:
        yield (
            "$finetune.lora_rank freezes all weights but adapters and head; remove optimizer.freeze"
        )
    if not targets or set(targets) - set(LORA_TARGETS):
        yield f"$finetune.lora_targets must name one or more of {', '.join(LORA_TARGETS)}"
    if len(set(targets)) < len(targets):
        yield "$finetune.lora_targets names a projection twice; name it once"


def _objective_rules(config: RunConfig) -> Iterator[str]:
    objective, has_pairs = config.objective, config.model.next_sentence_head
    if objective.mask_probability == 0:
        yield "$objective.mask_probability masks no tokens; the paper uses 0.15"
    replaced = objective.mask_token_probability + objective.random_token_probability
    if replaced > 1 + 1e-9:
        yield (
            "$objective.mask_token_probability and $objective.random_token_probability add up to "
            f"{replaced:g}; the sum must not exceed 1"
        )
    is_retromae = objective.name == "retromae"
    if has_pairs and (causal_fraction(objective) or is_retromae):
        packing = "doc_sentences" if is_retromae else "full_sentences"
        yield (
            "$objective.name has no pairs of segments; set model.next_sentence_head=false and "
            f"data.packing={packing}"
        )
    fraction = objective.autoregressive_fraction
    if objective.name == "mlm+ar" and not 0 < fraction < 1:
        yield (
            "$objective.autoregressive_fraction has batches of one form only; use "
            "objective.name=mlm or =autoregressive"
        )
    share = min(fraction, 1 - fraction)
    stability = config.stability
    has_rare_form = objective.name == "mlm+ar" and share < 2 / stability.spike_warmup
    if stability.spike_sigmas and has_rare_form:
        yield (
            "$objective.autoregressive_fraction leaves the spike guard too few batches of one "
            "form among $stability.spike_warmup; set stability.spike_sigmas=null"
        )
    if is_retromae and objective.retromae_mask_probability == 0:
        yield (
            "$objective.retromae_mask_probability leaves the decoder nothing to predict; the "
            "paper uses 0.5 to 0.7"
        )
    if is_retromae and not config.data.attend_across_documents:
        yield (
            "$data.attend_across_documents would hide the embedding of a row from its later "
            "documents with $objective.name; set it to true, and data.packing=doc_sentences"
        )


def _replaced_token_rules(model: ModelConfig, rtd: RTDConfig) -> Iterator[str]:
    if model.head != "rtd":
        if model.generator_layers:
            yield "$model.generator_layers needs model.head=rtd; set it to null"
        return
    if model.type_vocab_size or model.next_sentence_head:
        yield (
            "$model.head has no segments; set model.type_vocab_size=0, "
            "model.next_sentence_head=false and data.packing=full_sentences"
        )
    if model.absolute_positions == "input" and model.embedding_sharing != "none":
        yield (
            "$model.embedding_sharing shares no absolute positions; use "
            "model.absolute_positions=decoder, or model.embedding_sharing=none"
        )
    if rtd.update == "alternating" and model.embedding_sharing == "es":
        yield (
            "$rtd.update cannot train the one table of $model.embedding_sharing with two "
            "optimizers; use gdes, none or rtd.update=joint"
        )
    if rtd.discriminator_learning_rate and rtd.update == "joint":
        yield "$rtd.discriminator_learning_rate needs rtd.update=alternating"


def check_stage(config: RunConfig) -> None:
    """Check that DeepSpeed's stage 0 is not used with a 16-bit format.

    It executes an Adam step with zero gradients at start-up, so that bias correction is off by one,
    and omits the other tensor-parallel ranks' shards from the gradient norm.

    Raises:
        ConfigError: stage 0 with a 16-bit format.
    """
    parallel, precision = config.parallel, config.precision
    is_half = precision.dtype in ("bf16", "fp16")
    if parallel.engine != "plain" and parallel.zero_stage == 0 and is_half:
        raise ConfigError(
            f"parallel.zero_stage=0 with precision.dtype={precision.dtype} computes wrong updates "
            "in DeepSpeed; use parallel.zero_stage=1, which has no overhead on one rank"
        )


def _parallel_rules(config: RunConfig) -> Iterator[str]:
    """Yield the rules of sizes that are divided among ranks, and of the engine."""
    model, parallel, ranks = config.model, config.parallel, config.cluster.ranks_per_node
    tp_size = parallel.tensor_parallel_size
    split = {"model.num_heads": model.num_heads, "model.ffn_hidden_size": model.ffn_hidden_size}
    if model.conv_kernel_size is not None:
        split["model.hidden_size"] = model.hidden_size
    check_tensor_parallel_divides(tp_size, split)
    if parallel.sequence_parallel:
        if tp_size == 1:
            yield (
                "$parallel.sequence_parallel needs parallel.tensor_parallel_size above 1; set it "
                "to false"
            )
        check_tensor_parallel_divides(
            tp_size,
            {"data.sequence_length": config.data.sequence_length},
            reason="under parallel.sequence_parallel=true",
        )
    check_tensor_parallel_divides(tp_size, {"cluster.ranks_per_node": ranks} if ranks else {})
    check_stage(config)
    if parallel.offload_optimizer and (parallel.engine == "plain" or not parallel.zero_stage):
        yield (
            "$parallel.offload_optimizer needs parallel.engine=deepspeed and "
            "parallel.zero_stage of 1 or more"
        )
    if config.precision.initial_loss_scale_power > 32:
        yield "$precision.initial_loss_scale_power overflows immediately; use 16"


def _schedule_rules(config: RunConfig) -> Iterator[str]:
    train, optimizer, finetune = config.train, config.optimizer, config.finetune
    steps, warmup_steps = train.steps, optimizer.warmup_steps
    if not train.run_dir:
        yield "train.run_dir is empty; set the run folder"
    # With ``finetune.epochs``, the number of steps is known with the data only.
    is_open = finetune.task is not None and finetune.epochs is not None
    if not is_open and optimizer.warmup_fraction is None and warmup_steps > steps:
        yield (
            "$optimizer.warmup_steps exceeds $train.steps, so the peak learning rate is never "
            f"reached; use {max(steps // 10, 1)}, or optimizer.warmup_fraction=0.1"
        )
    decay = round((optimizer.decay_fraction or 0) * steps) or optimizer.decay_steps
    left = steps - (round((optimizer.warmup_fraction or 0) * steps) or warmup_steps)
    is_wsd = optimizer.schedule == "wsd"
    if decay and not is_wsd:
        yield (
            f"optimizer.decay_steps={decay} with $optimizer.schedule, which has no such phase; use "
            "schedule=wsd, or null"
        )
    if is_wsd and (decay is None or not 1 <= decay <= left):
        yield (
            f"optimizer.decay_steps={decay} is not between 1 and the {left} steps after the "
            "warm-up; set decay_steps, decay_tokens or decay_fraction of optimizer.schedule=wsd"
        )
    if train.exit_step is not None and train.exit_step > steps:
        yield "$train.exit_step exceeds $train.steps; use null to run to the end"
    if optimizer.learning_rate > 1:
        yield "$optimizer.learning_rate is above 1; the paper uses 2e-4"


def _record_rules(config: RunConfig) -> Iterator[str]:
    """Yield the rules of the guard, of checkpoints and of minimal pairs."""
    stability, checkpoint, train = config.stability, config.checkpoint, config.train
    for key in ("spike_warmup", "max_skips"):
        if getattr(stability, key) > stability.spike_window:
            yield (
                f"$stability.{key} exceeds $stability.spike_window, so it is never reached; use "
                f"{stability.spike_window} or less"
            )
    if stability.spike_sigmas is not None and stability.spike_sigmas < 3:
        yield "$stability.spike_sigmas would skip ordinary steps; use 6, or null to disable it"
    every, kept = checkpoint.save_every, checkpoint.keep_every
    if every and kept and kept % every:
        yield (
            "$checkpoint.keep_every is not a multiple of $checkpoint.save_every, so most of those "
            f"steps have no checkpoint; use {kept // every * every + every}"
        )
    if checkpoint.local_every and not checkpoint.local_dir:
        yield (
            "$checkpoint.local_every without checkpoint.local_dir; name a folder on every node's "
            "own disk or memory, such as /dev/shm/megatron"
        )
    if train.blimp_every and not train.blimp_data:
        yield "$train.blimp_every needs train.blimp_data; set the folder of BLiMP's files"
    if train.blimp_every and config.model.head not in LANGUAGE_MODEL_HEADS:
        yield "$train.blimp_every needs a language model, but $model.head; set it to null"


def _notification_rules(cluster: ClusterConfig) -> Iterator[str]:
    for event in cluster.notify_events:
        if event not in NOTIFY_EVENTS:
            yield f"cluster.notify_events: no event {event!r}; use {', '.join(NOTIFY_EVENTS)}"
    for target in cluster.notify:
        if not re.fullmatch(r"https?://\S+|\w[\w.-]*", target):
            yield (
                f"cluster.notify={target!r} is neither a URL nor the name of a program; put the "
                "program into ~/.config/megatron_deberta/notify"
            )
    if not _is_time(cluster.deadline or "2026-01-01"):
        yield (
            f"cluster.deadline={cluster.deadline!r} is no date and time; write it as "
            "2026-12-31T18:00"
        )
    if cluster.prometheus_port is not None and cluster.prometheus_port > 65535:
        yield "$cluster.prometheus_port is no port; use 1024 to 65535"
    if cluster.prometheus_file and not cluster.prometheus_file.endswith(".prom"):
        yield "$cluster.prometheus_file: node_exporter reads only names that end with .prom"


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return False
    return True


def _nearest_divisor(number: int, target: int) -> int:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return min(divisors, key=lambda size: (abs(size - target), size))
