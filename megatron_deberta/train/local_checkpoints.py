"""Local checkpoints of a run: recovery at the start, saves after steps, and their records."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.checkpoint.local.parts import LISTING_SECONDS, within
from megatron_deberta.checkpoint.local.recovery import History, LocalRecovery
from megatron_deberta.checkpoint.local.saver import LocalSaver, Nodes, SaveSchedule
from megatron_deberta.checkpoint.writer import Fence
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import (
    broadcast_from_rank_zero,
    broadcast_text,
    raise_on_all_ranks,
)
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import CheckpointError
from megatron_deberta.observe.progress import Section
from megatron_deberta.train.state import StepResult
from megatron_deberta.train.trainer import Callback, Trainer

logger = logging.getLogger(__name__)

# Longest wait for a save in progress, also at the end of a process
WAIT_SECONDS = 20.0


@dataclass
class LocalCheckpoints(Callback):
    """Local checkpoints of one run on all nodes.

    As a callback it saves so that at most ``checkpoint.local_every`` steps are lost.

    Attributes:
        config: the run.
        groups: the rank grid.
        fence: lock of the run folder.
        nodes: the nodes.
        history: generations of the run.
    """

    section: ClassVar[Section] = Section.SAVE

    config: RunConfig
    groups: ProcessGroups
    fence: Fence
    nodes: Nodes
    history: History
    saver: LocalSaver | None = field(default=None, init=False)
    schedule: SaveSchedule | None = field(default=None, init=False)

    @classmethod
    def open(
        cls, config: RunConfig, groups: ProcessGroups, fence: Fence
    ) -> LocalCheckpoints | None:
        """Open the local checkpoints of a run. Collective: all ranks.

        The newest complete save is copied to the run folder, if it is newer than the checkpoints
        there.

        Args:
            config: the run.
            groups: the rank grid.
            fence: lock of the run folder.

        Returns:
            The run's local checkpoints; None: it saves none.

        Raises:
            CheckpointError: the history is damaged; or the save cannot be copied, and
                ``checkpoint.on_failure`` is ``stop``.
        """
        if not config.checkpoint.local_every:
            return None
        nodes = Nodes.connect(groups, config.cluster.collective_timeout_minutes)
        content = ""
        with raise_on_all_ranks(groups):
            if groups.rank == 0:
                known = None
                if config.checkpoint.resume != "never":
                    known = History.of_run(config.train.run_dir)
                content = (known or History.new()).to_json().decode()
        history = History.from_json(broadcast_text(content, groups))
        local = cls(config, groups, fence, nodes, history)
        if history.generation:
            local._recover()
        return local

    @property
    def folder(self) -> Path:
        """Folder of the run on this node."""
        node = self.nodes.names[self.nodes.rank]
        root = Path(self.config.checkpoint.local_dir or "").absolute() / node
        return root / f"{self._run_name}-{self.history.run}"

    @property
    def _run_name(self) -> str:
        path = str(Path(self.config.train.run_dir).absolute())
        return hashlib.sha256(path.encode()).hexdigest()[:12]

    def _recover(self) -> None:
        run_dir, groups = self.config.train.run_dir, self.groups
        newest = -1
        with raise_on_all_ranks(groups):
            if groups.rank == 0:
                newest = max(committed_steps(run_dir), default=-1)
        newest = broadcast_from_rank_zero(newest, groups)
        recovery = LocalRecovery(run_dir, self.folder, groups, self.nodes, self.fence)
        try:
            recovery.recover(self.history, newest)
        except CheckpointError as error:
            if self.config.checkpoint.on_failure == "stop":
                raise
            logger.error("%s; an older checkpoint is used", error)

    def begin(self, step: int) -> None:
        """Begin a generation at a step: later saves of earlier ones are void. Collective.

        Raises:
            OSError: the run folder cannot be written.
        """
        self.history = self.history.began(step)
        self.schedule = None
        with raise_on_all_ranks(self.groups):
            if self.groups.rank == 0:
                self.history.write(self.config.train.run_dir, self.fence.check)
        if self.saver is not None:
            self.saver.generation = self.history.generation

    def start_saving(self, step: int, engine: Engine, specs: Mapping[str, ParameterSpec]) -> None:
        """Begin the generation of this process and delete what earlier ones left. Collective.

        Args:
            step: step from which the run resumes; the run folder has its checkpoint, or it is 0.
            engine: engine whose state is saved.
            specs: this rank's part of every parameter.
        """
        self.begin(step)
        # No rank writes before every node is cleared.
        if num_hung := self.nodes.sum([int(not self._clear())])[0]:
            if self.groups.rank == 0:
                logger.warning(
                    "checkpoint.local_dir=%s hangs on %d nodes; no local checkpoints are saved "
                    "until the next start",
                    self.config.checkpoint.local_dir,
                    num_hung,
                )
            return
        self.saver = LocalSaver(
            self.folder, engine, specs, self.groups, self.nodes, self.history.generation
        )

    def close(self, *, is_finished: bool) -> None:
        """Wait for a save in progress; delete all saves of a finished run."""
        if self.saver is None:
            return
        hangs = self.schedule is not None and self.schedule.is_suspended and self.saver.in_progress
        self.saver.join(0.0 if hangs else WAIT_SECONDS)
        if is_finished:
            self._clear()

    def _clear(self) -> bool:
        """Delete the folders of this run, under any identity, from this node.

        Returns:
            False if the disk hangs.
        """
        if self.nodes.own_ranks[0] != self.nodes.rank:
            return True

        def clear() -> bool:
            # A disk that cannot be listed cannot be written either: saves count such failures.
            with contextlib.suppress(OSError):
                for path in self.folder.parent.glob(f"{self._run_name}-*"):
                    shutil.rmtree(path, ignore_errors=True)
            return True

        return within(LISTING_SECONDS, clear, False)

    def on_rollback(self, trainer: Trainer) -> None:
        """Begin a generation first: after a kill in between, no skipped step is resumed."""
        self.begin(0)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Save, if due, unless the process ends; record a save that has finished."""
        step, saver, every = trainer.state.step, self.saver, self.config.checkpoint.local_every
        if saver is None:
            # The disk hangs.
            return
        assert every is not None
        if self.schedule is None:
            self.schedule = SaveSchedule(every, step - 1)
        schedule = self.schedule
        self._poll(trainer, saver, schedule)
        if trainer.ending is not None or not (schedule.is_due(step) or schedule.must_wait(step)):
            return
        with trainer.meter.paused():
            self._wait_if_needed(trainer, saver, schedule)
            if schedule.is_due(step):
                schedule.started(step)
                began = time.monotonic()
                if trainer.sample_log is not None:
                    # Before the save, so that it contains every step of the checkpoint.
                    trainer.sample_log.sync()
                saver.start(trainer.checkpoint_metadata(), began)
            self._wait_if_needed(trainer, saver, schedule)

    def _wait_if_needed(self, trainer: Trainer, saver: LocalSaver, schedule: SaveSchedule) -> None:
        """Wait for a save in progress if more steps than allowed could be lost. Collective."""
        step = trainer.state.step
        if not saver.in_progress or not schedule.must_wait(step):
            return
        saver.join(WAIT_SECONDS)
        if self._poll(trainer, saver, schedule):
            return
        schedule.give_up()
        if trainer.groups.rank == 0:
            logger.warning(
                "a local checkpoint takes longer than %g s after step %d; training continues, and "
                "a failure may lose more than checkpoint.local_every=%d steps",
                WAIT_SECONDS,
                step,
                schedule.every,
            )

    def _poll(self, trainer: Trainer, saver: LocalSaver, schedule: SaveSchedule) -> bool:
        """Record a save that has finished; return whether one has. Collective."""
        saved, step = saver.poll(), trainer.state.step
        if saved is None:
            return False
        is_valid = saved.save.generation == saver.generation
        schedule.finished(step, saved.save.step, is_complete=saved.is_complete and is_valid)
        if trainer.records is not None:
            values = asdict(saved)
            values["checkpoint_step"] = values.pop("save")["step"]
            trainer.records.writer.write(step, values, kind="local_checkpoint")
        return True
