"""Complete ``pretrain`` runs in one process per rank, on English text from this machine.

Ranks are forked from a server process that has imported all modules, which saves start-up time.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import fcntl
import gc
import json
import multiprocessing
import os
import pydoc_data.topics
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.train import setup
from tests.support import pauses

RANK_IMPORTS = (
    "deepspeed", "megatron_deberta.cli.pretrain", "megatron_deberta.rank_process",
    "megatron_deberta.engine.deepspeed_patches",
    "megatron_deberta.train.run",
    # The compiler, which DeepSpeed's optimizers and deterministic algorithms import: most of a
    # rank's start-up time.
    "deepspeed.runtime.zero.muon.muon_optimizer", "torch._inductor.compile_fx",
    # What engines import when they are built.
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload",
    "torch._subclasses.schema_check_mode",
)  # fmt: skip
"""Modules that a rank imports, to import before forking ranks."""
ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str]]
"""Runs ``pretrain`` in this process; returns its exit code and standard error."""
TIMEOUT = 240.0
"""Maximum seconds of a run; on a busy machine the start alone may take half a minute."""
WITHOUT_FLOCK = "MEGATRON_DEBERTA_TEST_WITHOUT_FLOCK"
"""Environment variable that makes ``flock`` fail in forked ranks."""
LOCAL_DISK = "MEGATRON_DEBERTA_TEST_LOCAL_DISK"
"""Environment variable with a forked rank and how its writes of local checkpoints fail:
``1 hung`` or ``1 full``.
"""
OF_LAUNCHERS = re.compile(r"(RANK|LOCAL_|WORLD_SIZE|MASTER_|SLURM_|OMPI_|PMI)")
"""Environment variables that launchers set."""
STACK_SECONDS = 1.0
"""Time to dump the stacks of ranks that hang."""

RUN = """
model: {{num_layers: 2, hidden_size: 32, num_heads: 4, ffn_hidden_size: 64, vocab_size: 600,
  max_position_embeddings: 48, max_relative_positions: 32, position_buckets: 8,
  conv_kernel_size: 3}}
tokenizer: {{path: {folder}/tokenizer}}
data: {{train: [{folder}/docs_text_document], sequence_length: 48, num_workers: 1,
  sample_log: true}}
optimizer: {{learning_rate: 5.0e-3, warmup_steps: 5}}
checkpoint: {{save_every: 7}}
train: {{steps: 60, global_batch_size: 8, micro_batch_size: {micro_batch}, eval_every: 25,
  eval_batches: 2, device: cpu}}
log: {{every: 1, tensorboard: false}}
"""


def prepare(folder: Path, *, sentences: bool = False, micro_batch: int = 2) -> Path:
    """Make a tokenizer, a shard and ``run.yaml`` from Python's documentation topics.

    Args:
        folder: for the files.
        sentences: write a shard of sentences.
        micro_batch: samples of a micro batch; a global batch has eight.
    """
    text = folder / "docs.jsonl"
    with text.open("w") as stream:
        for topic in pydoc_data.topics.topics.values():
            stream.write(json.dumps({"text": topic}) + "\n")
    tokenizer, prefix = str(folder / "tokenizer"), str(folder / "docs")
    train = ["train-tokenizer", "--input", str(text), "--vocab-size", "500", "--output", tokenizer]
    assert main(train) == 0
    shards = ["preprocess", "--input", str(text), "--tokenizer", tokenizer, "--output", prefix]
    assert main([*shards, "--workers", "0", *(["--sentences"] if sentences else [])]) == 0
    run, suffix = folder / "run.yaml", "sentence" if sentences else "document"
    config = RUN.format(folder=folder, micro_batch=micro_batch)
    run.write_text(config.replace("_text_document", f"_text_{suffix}"))
    return run


def fork_server() -> ForkServerContext:
    """Return the context of the fork server, which starts with the first rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*RANK_IMPORTS, "tests.support.ranks"])
    return context


class ForkedRank:
    """A forked rank with the interface of ``subprocess.Popen``."""

    def __init__(self, environment: dict[str, str], arguments: list[str], log: Path) -> None:
        self._process = fork_server().Process(
            target=run_rank, args=(environment, arguments, str(log))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at the end of the rank.

        Raises:
            subprocess.TimeoutExpired: the rank still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pretrain", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal if the rank runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the rank runs."""
        self._process.kill()


def run_rank(environment: dict[str, str], arguments: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # DeepSpeed's full collections need not look at what was imported before the fork.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGQUIT)
    # The fork server ignores SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if WITHOUT_FLOCK in environment:
        fcntl.flock = _unsupported  # type: ignore[assignment]
    rank, _, failure = environment.get(LOCAL_DISK, "").partition(" ")
    if rank and rank == environment.get("RANK"):
        from megatron_deberta.checkpoint.local import parts

        parts.write_durably = _failing_write(failure, parts.write_durably)
    pauses.install(environment)
    setup.measure_matmul_rate = known_matmul_rate  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    code = 1
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # Like the exit of an interpreter: multiprocessing would wait for loader processes, which end in
    # functions registered with atexit.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def known_matmul_rate(*_: Any) -> float:
    """Stands for the measurement of MFU's denominator, which is longer than most of these runs."""
    return 1e10


def _failing_write(failure: str, original: Callable[..., None]) -> Callable[..., None]:
    def hang(*_: Any) -> None:
        """Block in a system call for good."""
        reader, _writer = os.pipe()
        os.read(reader, 1)

    def full(path: Path, content: bytes) -> None:
        original(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return {"hung": hang, "full": full}[failure]


def _unsupported(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@dataclass
class Job:
    """The ranks of one run."""

    ranks: Sequence[ForkedRank | subprocess.Popen[str]]
    run_dir: Path

    def wait(self) -> list[int | None]:
        """Return exit codes by rank; a forked rank that hangs dumps its stack and returns None."""
        deadline = time.monotonic() + TIMEOUT
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(1.0, deadline - time.monotonic()))
        codes = [rank.poll() for rank in self.ranks]
        if None in codes:
            for rank in self.ranks:
                rank.send_signal(signal.SIGQUIT)
            time.sleep(STACK_SECONDS)
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        return codes

    def is_running(self) -> bool:
        """Return whether any rank runs."""
        return any(rank.poll() is None for rank in self.ranks)

    def wait_for_step(self, step: int) -> None:
        """Return once a step is in the metrics."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if max(recorded_steps(self.run_dir), default=0) >= step:
                return
            assert all(rank.poll() is None for rank in self.ranks), f"{self.run_dir} died"
            time.sleep(0.02)
        raise AssertionError(f"{self.run_dir}: no step {step} in {TIMEOUT} s")

    def output(self) -> str:
        """Return the output of all ranks, including standard error."""
        return "".join(
            (self.run_dir.parent / f"{self.run_dir.name}.{rank}.log").read_text()
            for rank in range(len(self.ranks))
        )


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(
    run: Path,
    run_dir: Path,
    world_size: int,
    *overrides: str,
    forked: bool = True,
    ranks_per_node: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Start the ranks of a run like a launcher; each has a log beside the run folder.

    Args:
        run: config file.
        run_dir: run folder.
        world_size: number of ranks.
        overrides: of the config.
        forked: fork the ranks; False starts a new interpreter for each.
        ranks_per_node: ranks with the same node name; 0: the names are not set.
        variables: further environment variables of all ranks.
    """
    port = free_port()
    arguments = ["pretrain", str(run), f"train.run_dir={run_dir}", *overrides]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    ranks: list[ForkedRank | subprocess.Popen[str]] = []
    for rank in range(world_size):
        environment = os.environ | rank_variables(rank, world_size, port)
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
        if ranks_per_node:
            environment["SLURMD_NODENAME"] = f"node{rank // ranks_per_node}"
        log = run_dir.parent / f"{run_dir.name}.{rank}.log"
        if forked:
            ranks.append(ForkedRank(environment, arguments, log))
            continue
        command = [sys.executable, "-m", "megatron_deberta", *arguments]
        with log.open("a") as stream:
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, text=True)
            )
    return Job(ranks, run_dir)


def run_to_end(run: Path, run_dir: Path, world_size: int, *overrides: str) -> Job:
    """Run and assert that every rank exits with 0."""
    job = start(run, run_dir, world_size, *overrides)
    codes = job.wait()
    assert codes == [0] * world_size, job.output()
    return job


def records(run_dir: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Return metric records by step."""
    metrics = read_metrics(run_dir / FILE_NAME)
    return {record["step"]: record for record in metrics if record["kind"] == kind}


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the training steps in the metrics; none before the first is recorded."""
    path = run_dir / FILE_NAME
    metrics = read_metrics(path) if path.exists() else []
    return [record["step"] for record in metrics if record["kind"] == "train"]


def losses(run_dir: Path) -> list[float]:
    """Return training losses in step order, bit-exact."""
    steps = records(run_dir)
    assert list(steps) == list(range(1, len(steps) + 1))
    return [record["loss"] for record in steps.values()]


def assert_same_checkpoints(actual_run: Path, expected_run: Path, step: int) -> None:
    """Assert that weights and moments at a step are bit-identical."""
    actual, expected = (CheckpointReader(step_dir(run, step)) for run in (actual_run, expected_run))
    assert list(actual.shapes) == list(expected.shapes)
    for name in actual.shapes:
        for kind in actual.kinds:
            assert actual.tensor(name, kind).equal(expected.tensor(name, kind)), (name, kind)
    assert actual.metadata.scalars == expected.metadata.scalars


def bare_environment(**variables: str) -> dict[str, str]:
    """Return the environment of ranks without any launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if not OF_LAUNCHERS.match(key)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def run_mpi(*command: str) -> str:
    """Run two ranks of a command under mpirun to their end; return their output."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun is not None, "mpirun is missing; install requirements-dev.txt"
    done = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", *command],
        env=bare_environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_launcher(names: Sequence[str] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")) -> dict[str, str]:
    """Return the environment without a launcher's variables."""
    return {key: value for key, value in os.environ.items() if key not in names}
