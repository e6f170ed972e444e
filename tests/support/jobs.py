"""Complete ``pretrain`` runs in one process per rank, on English text from this machine."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics

RANK_IMPORTS = (
    "deepspeed", "megatron_deberta.cli.pretrain", "megatron_deberta.engine.deepspeed_runtime",
    "megatron_deberta.train.run",
    # The compiler, which DeepSpeed's optimizers and deterministic algorithms import: most of a
    # rank's start-up time.
    "deepspeed.runtime.zero.muon.muon_optimizer", "torch._inductor.compile_fx",
)  # fmt: skip
"""Modules that a rank imports, to import before forking ranks."""
ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str]]
"""Runs ``pretrain`` in this process; returns its exit code and standard error."""
TIMEOUT = 240.0
"""Maximum seconds of a run; on a busy machine the start alone may take half a minute."""

RUN = """
model: {{num_layers: 2, hidden_size: 32, num_heads: 4, ffn_hidden_size: 64, vocab_size: 600,
  max_position_embeddings: 48, max_relative_positions: 32, position_buckets: 8,
  conv_kernel_size: 3}}
tokenizer: {{path: {folder}/tokenizer}}
data: {{train: [{folder}/docs_text_document], sequence_length: 48, num_workers: 1,
  sample_log: true}}
optimizer: {{learning_rate: 5.0e-3, warmup_steps: 5}}
checkpoint: {{save_every: 7}}
train: {{steps: 60, global_batch_size: 8, micro_batch_size: 2, eval_every: 25, eval_steps: 2,
  device: cpu}}
log: {{every: 1, tensorboard: false}}
"""


def prepare(folder: Path, *, sentences: bool = False) -> Path:
    """Make a tokenizer, a shard and ``run.yaml`` from Python's documentation topics.

    Args:
        folder: for the files.
        sentences: write a shard of sentences.
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
    run.write_text(RUN.format(folder=folder).replace("_text_document", f"_text_{suffix}"))
    return run


@dataclass
class Job:
    """The ranks of one run."""

    ranks: list[subprocess.Popen[str]]
    run_dir: Path

    def wait(self) -> list[int]:
        """Return the exit codes by rank."""
        deadline = time.monotonic() + TIMEOUT
        try:
            return [rank.wait(max(1.0, deadline - time.monotonic())) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()

    def wait_for_step(self, step: int) -> None:
        """Return once a step is in the metrics."""
        deadline = time.monotonic() + TIMEOUT
        path = self.run_dir / FILE_NAME
        while time.monotonic() < deadline:
            if path.exists() and any(record["step"] >= step for record in read_metrics(path)):
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


def start(run: Path, run_dir: Path, world_size: int, *overrides: str) -> Job:
    """Start the ranks of a run like a launcher; each has a log beside the run folder."""
    port = free_port()
    arguments = ["pretrain", str(run), f"train.run_dir={run_dir}", *overrides]
    command = [sys.executable, "-m", "megatron_deberta", *arguments]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(world_size):
        environment = os.environ | rank_variables(rank, world_size, port)
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (run_dir.parent / f"{run_dir.name}.{rank}.log").open("a") as log:
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
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


def without_launcher(names: Sequence[str] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")) -> dict[str, str]:
    """Return the environment without a launcher's variables."""
    return {key: value for key, value in os.environ.items() if key not in names}
