"""One rank's process of a run: its heartbeat, the run folder's lock, signals and the exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from megatron_deberta.cluster import installation
from megatron_deberta.cluster.run_lock import RunLock, raise_if_locked
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_REQUEUE
from megatron_deberta.processes import raise_open_file_limit

if TYPE_CHECKING:
    from megatron_deberta.train.trainer import Callback


def pretrain(
    config: RunConfig,
    allow_config_change: bool = False,
    callbacks: Sequence[Callback] = (),
    *,
    ends_process: bool = False,
) -> int:
    """Train as one rank of a run; of a fine-tuning run if it has a task.

    Like the command ``megatron-deberta pretrain`` it resumes from the newest checkpoint of
    ``train.run_dir``, and signals that ask the run to stop end it with a checkpoint. Under
    torchrun, srun or mpirun every rank calls it.

    Args:
        config: the run.
        allow_config_change: resume with other optimizer settings than the checkpoint's.
        callbacks: called beside the run's own; see ``train.trainer.Callback``.
        ends_process: ignore the signals that ask a run to stop from the end of a stopped run, or of
            each run under a launcher, on. False: their handlers are restored.

    Returns:
        The command's exit code: 0 done, 75 stopped by a signal, 130 by Ctrl-C.

    Raises:
        MegatronDebertaError: see ``errors``.
    """
    raise_open_file_limit()
    environment = read_environment()
    if environment.rank == 0 and environment.launcher != "srun":
        # Before torch is imported, which is slow; under srun the other ranks would be left waiting.
        raise_if_locked(config.train.run_dir)
    with Heartbeat.of_this_rank(environment.rank) as heartbeat:
        import torch

        from megatron_deberta.planning.plan import predict_rank_bytes
        from megatron_deberta.train.preemption import PREEMPTION_SIGNALS, SignalRecorder
        from megatron_deberta.train.run import train_rank

        installation.check_torch_version(torch.__version__)
        if config.train.device != "cpu":
            installation.check_devices()
        with ExitStack() as stack:
            signals = stack.enter_context(SignalRecorder(announces=environment.rank == 0))
            code = EXIT_FAILURE
            try:
                code = train_rank(
                    config,
                    signals,
                    RunLock(config.train.run_dir, lambda: signals.received),
                    heartbeat,
                    callbacks=callbacks,
                    allow_config_change=allow_config_change,
                    predict_bytes=predict_rank_bytes,
                    **_task_functions(config),
                )
            except InterruptedError as error:
                # While it waited for the other ranks: there is nothing to save.
                sys.stderr.write(f"megatron-deberta: {error}\n")
                is_interrupt = signals.received is signal.SIGINT
                code = EXIT_INTERRUPTED if is_interrupt else EXIT_REQUEUE
            finally:
                launched = environment.launcher != "none"
                is_stopped = bool(signals.received) or code == EXIT_REQUEUE
                if ends_process and (is_stopped or (code == EXIT_DONE and launched)):
                    # SLURM and the supervisor may signal at any time; a signal while this process
                    # ends would kill it and change its exit code.
                    for number in PREEMPTION_SIGNALS:
                        signal.signal(number, signal.SIG_IGN)
                    stack.pop_all()
            return code


def _task_functions(config: RunConfig) -> dict[str, Any]:
    """Return the functions that open data and initial weights of a fine-tuning run."""
    if not config.finetune.task:
        return {}
    from megatron_deberta.evaluate.models import open_release_weights
    from megatron_deberta.finetune.data import open_task_data

    return {"open_data": open_task_data, "open_weights": open_release_weights}
