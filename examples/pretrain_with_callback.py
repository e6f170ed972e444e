"""Pretrain a run file from Python, with a callback that writes one more number.

Usage: python examples/pretrain_with_callback.py RUN.yaml [KEY=VALUE ...]

Under torchrun every rank calls the callback; rank 0 writes. Like the command, it resumes from the
newest checkpoint of train.run_dir and ends with the command's exit codes.
"""

import sys
from pathlib import Path

import torch

from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.config import load_config
from megatron_deberta.train.preemption import StopSignal
from megatron_deberta.train.run import pretrain
from megatron_deberta.train.state import StepResult
from megatron_deberta.train.trainer import Callback, Trainer


class NormOfEmbeddings(Callback):
    """Writes the norm of the token embeddings to a file of its own, every ten steps."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Write the step, its loss and the norm."""
        step = trainer.state.step
        if trainer.groups.rank == 0 and step % 10 == 0:
            weight = trainer.engine.module.get_parameter("embeddings.token.weight")
            norm = torch.linalg.vector_norm(weight.detach().float()).item()
            with (Path(trainer.config.train.run_dir) / "norms.csv").open("a") as file:
                file.write(f"{step},{result.loss:.4f},{norm:.4f}\n")


if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    with StopSignal() as stop:
        lock = RunLock(config.train.run_dir, lambda: stop.received)
        sys.exit(pretrain(config, stop, lock, callbacks=[NormOfEmbeddings()]))
