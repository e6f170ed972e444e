"""Config changes permitted when a run resumes from a checkpoint.

Keys in neither table may not change; a new key has to be added explicitly. Only the section
``cluster`` is unrestricted as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_deberta.checkpoint.layout import KINDS
from megatron_deberta.config import config_from_dict, config_to_dict
from megatron_deberta.config.phases import segment_at
from megatron_deberta.config.schema import (
    LANGUAGE_MODEL_HEADS,
    PHASE_KEYS,
    ClusterConfig,
    RunConfig,
)
from megatron_deberta.errors import CheckpointError

if TYPE_CHECKING:
    # Imports torch, which users of the tables do not need.
    from megatron_deberta.checkpoint.reader import CheckpointReader

FLAG = "--allow-config-change"


def _keys(**sections: str) -> frozenset[str]:
    """Return ``section.key`` of every key listed, separated by spaces, under its section."""
    return frozenset(
        f"{section}.{key}" for section in sections for key in sections[section].split()
    )


# Keys that may change freely: they affect rounding at most, or monitoring, retention and start-up.
# Shards and tokenizer are compared by content; data.validation is not trained on, and the
# fingerprint of data.train covers a split-off validation set. The initial convolution matters at
# step 0 only.
FREE = _keys(
    model="conv_init",
    parallel="engine zero_stage offload_optimizer tensor_parallel_size sequence_parallel recompute "
    "fuse attention_backend",
    optimizer="implementation",
    tokenizer="path",
    data="train validation index_cache num_workers sample_log verify_hashes",
    stability="max_rollbacks replica_check_every rerun",
    checkpoint="save_every keep_last keep_every asynchronous local_every local_dir on_failure "
    "resume load_from extend_positions continue_from verify",
    train="micro_batch_size device run_dir exit_step eval_every eval_batches "
    "blimp_every blimp_data blimp_pairs",
    log="every tensorboard wandb samples level",
    cluster=" ".join(field.name for field in fields(ClusterConfig)),
    finetune="task data validations_per_epoch patience keep_best cache",
)
# Keys that change the experiment; they need the flag.
WITH_FLAG = _keys(
    optimizer="learning_rate warmup_steps warmup_fraction warmup_tokens schedule decay_steps "
    "decay_fraction decay_tokens decay_shape weight_decay beta1 beta2 eps bias_correction "
    "layer_decay freeze clip_grad_norm ema_decay",
    stability="non_finite spike_sigmas spike_window spike_warmup max_skips",
    precision="dtype initial_loss_scale_power loss_scale_window min_loss_scale",
    train="steps tokens",
    rtd="discriminator_weight discriminator_learning_rate draw_special_tokens excluded_ids",
    objective="class_path",
    finetune="epochs class_weights focal_gamma",
)
# Keys that do not change what the weights mean.
_OF_TRAINING = _keys(model="hidden_dropout attention_dropout initializer_range conv_init")
# Keys of the head: another one than the checkpoint's starts from new weights.
_OF_HEADS = _keys(
    model="head labels head_dropout pooler_activation normalize_embeddings next_sentence_head "
    "mask_decoder_passes generator_layers embedding_sharing"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a run's tokenizer and training data.

    Attributes:
        tokenizer_path: folder or file of the tokenizer.
        tokenizer_fingerprint: hash of the tokenizer's content.
        data_fingerprint: hash of the training shards' content.
        validation_fingerprint: hash of the examples that select checkpoints; empty: none do.
    """

    tokenizer_path: str
    tokenizer_fingerprint: str
    data_fingerprint: str
    validation_fingerprint: str = ""


def check_resume(
    reader: CheckpointReader, config: RunConfig, identity: Identity, *, allow_change: bool = False
) -> list[str]:
    """Check that a run may resume from a checkpoint.

    Args:
        reader: the checkpoint.
        config: config of the run.
        identity: its tokenizer and training data.
        allow_change: permit changes of the keys in ``WITH_FLAG``.

    Returns:
        Log messages ``key: old -> new`` for all changes.

    Raises:
        CheckpointError: it has no optimizer state, or a change is not permitted.
    """
    saved = reader.metadata
    if reader.kinds[: len(KINDS)] != KINDS:
        raise CheckpointError(
            f"{reader.path} holds weights only and cannot be resumed; set checkpoint.load_from to "
            "it in a run with another train.run_dir"
        )
    before = _saved_config(reader)
    changed = changes(before, config)
    source = f"checkpoint of step {saved.step}"
    _check_same_kind(before, config)
    refused = [key for key in changed if not _is_permitted(key, changed[key], allow_change)]
    # Before the keys that follow from it, such as train.steps.
    refused.sort(key="finetune.epochs".__ne__)
    for key in refused[:1]:
        old, new = changed[key]
        # What is determined by another key, which the user has changed.
        from_epochs = config.finetune.task and key == "train.steps"
        cause = " (given, or of finetune.epochs and the examples)" if from_epochs else ""
        others = f" (also changed: {', '.join(refused[1:])})" if refused[1:] else ""
        has_flag = all(each in WITH_FLAG for each in refused)
        remedy = f"or pass {FLAG}" if has_flag else "or start a new train.run_dir"
        raise CheckpointError(
            f"{key}={new!r}{cause} but the {source} was trained with {old!r}{others}; change it "
            f"back {remedy}"
        )
    for what, old_hash, new_hash in (
        ("tokenizer", saved.tokenizer_fingerprint, identity.tokenizer_fingerprint),
        ("data.train, or splitting validation off it", saved.data_fingerprint,
         identity.data_fingerprint),
    ):  # fmt: skip
        if old_hash != new_hash:
            raise CheckpointError(
                f"{what}: fingerprint {new_hash[:16]} but the {source} was trained with "
                f"{old_hash[:16]}; use the same files or start a new train.run_dir"
            )
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items()]


def _is_permitted(key: str, change: tuple[Any, Any], allow_change: bool) -> bool:
    old, new = change
    if key == "precision.dtype" and (new == "auto" or (old, new) == ("auto", "fp32")):
        # The run keeps its own; see ``config.precision``. Unresolved, ``auto`` is fp32.
        return True
    return key in FREE or (key in WITH_FLAG and allow_change)


def _saved_config(reader: CheckpointReader) -> RunConfig:
    """Return the config of a checkpoint; keys that it lacks have their defaults.

    Raises:
        ConfigError: it has unknown keys, or breaks a rule.
    """
    return config_from_dict(reader.metadata.config, str(reader.path))


def _check_same_kind(saved: RunConfig, config: RunConfig) -> None:
    """Check that the run folder is not that of another kind of training.

    Raises:
        CheckpointError: it is of pretraining and not of a task, or of a task with another head.
    """
    runs = [
        f"a run of the task {one.finetune.task}"
        if one.finetune.task
        else f"a pretraining run with objective.name={one.objective.name}"
        for one in (saved, config)
    ]
    has_task = saved.finetune.task or config.finetune.task
    if has_task and saved.objective.name != config.objective.name:
        raise CheckpointError(
            f"train.run_dir={config.train.run_dir} holds {runs[0]}, and this is {runs[1]}; choose "
            "another train.run_dir"
        )


def changes(saved: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return keys whose values differ, with the old and the new value.

    Args:
        saved: config of a checkpoint.
        config: config of the run.
    """
    old_sections = config_to_dict(saved)
    return {
        f"{section}.{key}": (old_sections[section][key], new)
        for section, values in config_to_dict(config).items()
        for key, new in values.items()
        if old_sections[section][key] != new
    }


def check_continuation(
    reader: CheckpointReader, config: RunConfig, identity: Identity
) -> list[str]:
    """Check that a new run may continue a checkpoint of another run.

    Args:
        reader: ``checkpoint.continue_from``.
        config: the new run.
        identity: its tokenizer and training data.

    Returns:
        Log messages ``key: old -> new`` for all changes.

    Raises:
        CheckpointError: it has no optimizer state, a change is not permitted, or the new run would
            have read more samples by then.
    """
    saved = reader.metadata
    if reader.kinds[: len(KINDS)] != KINDS:
        raise CheckpointError(f"{reader.path} holds weights only; use checkpoint.load_from")
    changed = changes(_saved_config(reader), config)
    permitted = FREE | WITH_FLAG | PHASE_KEYS | {"train.phases"}
    for key, (old, new) in changed.items():
        if key not in permitted:
            raise CheckpointError(
                f"{key}={new!r} but checkpoint.continue_from was trained with {old!r}; change it "
                "back, or use checkpoint.load_from"
            )
    if saved.tokenizer_fingerprint != identity.tokenizer_fingerprint:
        raise CheckpointError(f"{reader.path} was trained with another tokenizer; use that one")
    part = segment_at(config, saved.step)
    before = saved.step - part.first_step
    planned = part.first_sample + before * part.config.train.global_batch_size
    if planned > saved.consumed_samples:
        raise CheckpointError(
            f"the first {saved.step} steps of this run would read {planned} samples, but "
            f"checkpoint.continue_from has read {saved.consumed_samples}; write these steps with "
            "their batch size as the first phase"
        )
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items()]


def check_same_architecture(reader: CheckpointReader, config: RunConfig) -> None:
    """Check that the weights of a checkpoint fit another run's model.

    Raises:
        CheckpointError: a key of the architecture differs.
    """
    may_differ = _OF_TRAINING
    if config.finetune.task:
        may_differ |= _OF_HEADS
        if config.model.absolute_positions == "none":
            may_differ |= {"model.absolute_positions"}
    for key, (old, new) in changes(_saved_config(reader), config).items():
        if key == "model.head" and {old, new} == set(LANGUAGE_MODEL_HEADS):
            # The same weights in another form
            continue
        if key == "model.max_position_embeddings" and _extends(config, old, new):
            continue
        if key.startswith("model.") and key not in may_differ:
            raise CheckpointError(
                f"{key}={new!r} but the model in checkpoint.load_from, {reader.path}, has {old!r}; "
                "use the model section of its config"
            )


def _extends(config: RunConfig, old: int, new: int) -> bool:
    """Return whether position tables grow by a named rule.

    Raises:
        CheckpointError: no rule is named.
    """
    if new < old or config.finetune.task:
        return False
    if config.checkpoint.extend_positions == "none":
        raise CheckpointError(
            f"model.max_position_embeddings={new!r} but the model in checkpoint.load_from has "
            f"{old!r}; set checkpoint.extend_positions=repeat or =interpolate"
        )
    return True
