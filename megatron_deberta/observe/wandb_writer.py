"""Weights & Biases as a further writer of metrics; its failures never end a run."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically

logger = logging.getLogger(__name__)

ID_FILE = "wandb_id"
"""In the run folder: identifier under which restarts continue the same W&B run."""
_STEP = "step"


class WandbWriter:
    """Sends numbers to a W&B project, or with ``WANDB_MODE=offline`` to ``wandb/`` in the folder.

    Args:
        run_dir: run folder.
        project: name of the project.
        config: shown as the run's configuration.

    Raises:
        ConfigError: the package is not installed, or W&B refuses the start, such as without login.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb={project} needs the package wandb, which is not installed; install it, "
                "or leave log.wandb empty"
            ) from error
        identifier = run_dir / ID_FILE
        if not identifier.exists():
            write_atomically(identifier, secrets.token_hex(8).encode())
        try:
            self._run = wandb.init(
                project=project,
                id=identifier.read_text().strip(),
                name=run_dir.name,
                dir=run_dir,
                config=dict(config),
                resume="allow",
            )
            # Not W&B's own counter, which ignores the steps that a resumed run repeats.
            self._run.define_metric("*", step_metric=_STEP)
        except Exception as error:
            # Its own exceptions and those of its service process have no common base.
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"log.wandb={project}: {reason}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        self._has_warned = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers by name; a failure is a warning."""
        try:
            self._run.log({_STEP: step, **values})
        except Exception as error:
            self._warn(error)

    def close(self) -> None:
        """Send what is left; a failure is a warning."""
        try:
            self._run.finish()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            logger.warning("W&B: %s; training goes on", error)
        self._has_warned = True
