"""What a run may change when it continues from a checkpoint.

Owns the table of keys and the comparison. Refuses files and tensors. A key that is in no table
is refused, so that a new one has to be thought about; only ``cluster`` is free as a whole.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_deberta.checkpoint.layout import KINDS
from megatron_deberta.config import config_from_dict, config_to_dict
from megatron_deberta.config.schema import ClusterConfig, RunConfig
from megatron_deberta.errors import CheckpointError

if TYPE_CHECKING:
    # Brings torch, which whoever only wants the table need not wait for.
    from megatron_deberta.checkpoint.reader import CheckpointReader

FLAG = "--allow-config-change"

FREE = frozenset(
    {
        # Where ranks and memory go; the numbers stay the same up to rounding.
        "parallel.tensor_parallel_size",
        "parallel.sequence_parallel",
        "parallel.recompute",
        "parallel.fuse",
        "parallel.attention_backend",
        "precision.engine",
        "precision.zero_stage",
        "precision.offload_optimizer",
        "train.micro_batch_size",
        "train.device",
        # Compared by content, as fingerprints.
        "tokenizer.path",
        "data.train",
        # Nothing is trained on it; data.train's fingerprint tells whether it is split off that.
        "data.validation",
        # What is watched, kept and shown, and how the job is started.
        "data.index_cache",
        "data.num_workers",
        "data.sample_log",
        "data.verify_hashes",
        "guard.max_rollbacks",
        "guard.replica_check_every",
        "checkpoint.save_every",
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "checkpoint.asynchronous",
        "checkpoint.on_failure",
        "checkpoint.resume",
        "checkpoint.load_from",
        "checkpoint.verify",
        "train.run_dir",
        "train.exit_step",
        "train.eval_every",
        "train.eval_steps",
        "log.every",
        "log.tensorboard",
        "log.level",
        # Where ranks run and when they are given up; no number depends on it.
        *(f"cluster.{field.name}" for field in fields(ClusterConfig)),
    }
)
"""Keys that may change."""

WITH_FLAG = frozenset(
    {
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "optimizer.schedule",
        "optimizer.weight_decay",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.bias_correction",
        "optimizer.clip_grad_norm",
        # Which updates are skipped.
        "guard.non_finite",
        "guard.spike_sigmas",
        "guard.spike_window",
        "guard.spike_warmup",
        "guard.max_skips",
        "precision.dtype",
        "precision.initial_loss_scale_power",
        "precision.loss_scale_window",
        "precision.min_loss_scale",
        "train.steps",
    }
)
"""Keys that make it another experiment, which one may want to be."""


def policy_table() -> str:
    """What may change, as the Markdown table of docs/checkpoint-format.md."""
    lines = [f"| section | freely | with `{FLAG}` | not |", "|---|---|---|---|"]
    for section, values in config_to_dict(RunConfig()).items():
        cells: list[list[str]] = [[], [], []]
        for key in values:
            name = f"{section}.{key}"
            cells[0 if name in FREE else 1 if name in WITH_FLAG else 2].append(f"`{key}`")
        lines.append(f"| `{section}` | " + " | ".join(", ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def check_resume(
    reader: CheckpointReader,
    config: RunConfig,
    *,
    tokenizer_fingerprint: str,
    data_fingerprint: str,
    allow_change: bool = False,
) -> list[str]:
    """Compare a run with the checkpoint it continues from.

    Args:
        reader: the checkpoint.
        config: the run's.
        tokenizer_fingerprint: of the run's tokenizer.
        data_fingerprint: of the run's training shards.
        allow_change: let the keys of ``WITH_FLAG`` change.

    Returns:
        What changed, ``key: old -> new``, in words for the log.

    Raises:
        CheckpointError: it has no optimizer state, or something changed that may not, which is
            named with both values.
    """
    saved = reader.metadata
    if reader.kinds != KINDS:
        raise CheckpointError(
            f"{reader.path} holds weights only and cannot be resumed; name it in "
            "checkpoint.load_from of a run with another train.run_dir"
        )
    changed = changes(saved.config, config)
    source = f"checkpoint of step {saved.step}"
    for key, (old, new) in changed.items():
        if key in FREE or (key in WITH_FLAG and allow_change):
            continue
        remedy = f"or pass {FLAG}" if key in WITH_FLAG else "or start a new train.run_dir"
        raise CheckpointError(
            f"{key}={new!r} but the {source} was trained with {old!r}; change it back {remedy}"
        )
    for what, old_hash, new_hash in (
        ("tokenizer", saved.tokenizer_fingerprint, tokenizer_fingerprint),
        ("data.train, or splitting validation off it", saved.data_fingerprint, data_fingerprint),
    ):
        if old_hash != new_hash:
            raise CheckpointError(
                f"{what}: fingerprint {new_hash[:16]} but the {source} was trained with "
                f"{old_hash[:16]}; use the same files or start a new train.run_dir"
            )
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items()]


def changes(saved: dict[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with the old and the new value.

    Args:
        saved: a checkpoint's config; keys it lacks had their default.
        config: the run's.
    """
    old_sections = config_to_dict(config_from_dict(saved, "checkpoint"))
    return {
        f"{section}.{key}": (old_sections[section][key], new)
        for section, values in config_to_dict(config).items()
        for key, new in values.items()
        if old_sections[section][key] != new
    }


def check_same_architecture(reader: CheckpointReader, config: RunConfig) -> None:
    """See that weights of a checkpoint mean the same in another run's model.

    Raises:
        CheckpointError: a key of the architecture differs; it is named with both values.
    """
    of_training = {"model.hidden_dropout", "model.attention_dropout", "model.initializer_range"}
    for key, (old, new) in changes(reader.metadata.config, config).items():
        if key.startswith("model.") and key not in of_training:
            raise CheckpointError(
                f"{key}={new!r} but checkpoint.load_from, {reader.path}, is a model "
                f"with {old!r}; take the model section of its config"
            )
