"""Pretrain a run file from Python, with a callback that writes a file of its own.

Usage: python examples/pretrain_with_callback.py RUN.yaml [KEY=VALUE ...]

Under torchrun every rank calls the callback; rank 0 writes. Like the command, it resumes from the
newest checkpoint of train.run_dir and ends with the command's exit codes. After a kill, the steps
since that checkpoint are repeated and written again.
"""

import sys
from pathlib import Path

from megatron_deberta import load_config, pretrain
from megatron_deberta.train.state import StepResult
from megatron_deberta.train.trainer import Callback, Trainer


class EveryStep(Callback):
    """Write loss, gradient norm and seconds of every step, whatever ``log.every`` is."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Append a line to ``steps.csv`` in the run folder."""
        if trainer.groups.rank == 0:
            numbers = (result.loss, result.outcome.grad_norm, trainer.step_seconds)
            line = ",".join(f"{number:.5f}" for number in numbers)
            with (Path(trainer.config.train.run_dir) / "steps.csv").open("a") as file:
                file.write(f"{trainer.state.step},{line}\n")


if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    sys.exit(pretrain(config, callbacks=[EveryStep()]))
