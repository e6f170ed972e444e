"""Renamed config keys and values. Old ones still load, with a warning that names the new one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_deberta.errors import ConfigError

logger = logging.getLogger(__name__)

RENAMED_KEYS = {
    "cluster.timeout_minutes": "cluster.collective_timeout_minutes",
    "data.ledger": "data.sample_log",
    "guard.drift_every": "guard.replica_check_every",
    "train.eval_batches": "train.eval_steps",
    "train.stop_after": "train.exit_step",
}
"""Old to new name; both are keys of the same section."""
RENAMED_VALUES = {
    "model.conv_init": ("release", "microsoft"),
    "model.p2c_index": ("released", "microsoft"),
    "objective.masking": ("released", "microsoft"),
    "optimizer.schedule": ("release", "microsoft"),
}
"""Old and new value of a key."""


def use_new_names(section: str, values: Mapping[Any, Any], source: str) -> dict[Any, Any]:
    """Replace old names and values of one section by the new ones.

    Args:
        section: the section's name.
        values: its keys and values.
        source: where they come from, for messages.

    Raises:
        ConfigError: a key is given under its old and its new name.
    """
    renamed = {}
    for key, value in values.items():
        old = f"{section}.{key}"
        new = RENAMED_KEYS.get(old, old)
        new_key = new.partition(".")[2] if new != old else key
        if new != old:
            if new_key in values:
                raise ConfigError(f"{source}: {old} is the old name of {new}; remove {old}")
            logger.warning("%s: %s was renamed to %s; use the new name", source, old, new)
        old_value, new_value = RENAMED_VALUES.get(new, (None, None))
        if old_value is not None and value == old_value:
            logger.warning(
                "%s: %s=%s was renamed to %s; use the new value", source, new, value, new_value
            )
            value = new_value
        renamed[new_key] = value
    return renamed
