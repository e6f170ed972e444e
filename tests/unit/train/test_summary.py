"""What rank 0 shows at the start and at the end of a run."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, forget_best, record_best, step_dir
from megatron_deberta.config.schema import ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.observe.metrics import MetricsWriter
from megatron_deberta.train.data import describe_tokens
from megatron_deberta.train.start import Start
from megatron_deberta.train.state import Ending, TrainState
from megatron_deberta.train.summary import describe_end, describe_nothing_left, describe_start

CORPORA: Any = SimpleNamespace(train=(SimpleNamespace(lengths=np.full(100, 640)),))


def config_of(run_dir: Path, **train: Any) -> RunConfig:
    values = {"steps": 500, "global_batch_size": 8, "micro_batch_size": 2, **train}
    config = RunConfig(train=TrainConfig(run_dir=str(run_dir), **values))
    return replace(config, data=replace(config.data, sequence_length=128))


def test_start_of_a_run(tmp_path: Path) -> None:
    groups = single_process_groups(torch.device("cpu"))
    config = replace(
        config_of(tmp_path),
        parallel=ParallelConfig(engine="deepspeed"),
        precision=PrecisionConfig(dtype="bf16"),
    )
    amount = describe_tokens(config, 1, CORPORA)
    text = describe_start(config, groups, amount, Start(TrainState(0, 0)), 1_234_567, 3 << 29)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["run"] == f"{tmp_path}, a new run"
    assert lines["model"].startswith("1,234,567 parameters: ")
    assert lines["batch"] == (
        "8 sequences of 128 = 1,024 tokens per step "
        "(2 per micro batch x 4 accumulated x 1 data-parallel)"
    )
    assert lines["training"] == "500 steps = 512,000 tokens = 8 epochs"
    layout = "1 rank = 1 tensor-parallel x 1 data-parallel"
    assert lines["layout"] == f"{layout}, deepspeed engine, ZeRO stage 1, bf16"
    plain = replace(
        config,
        parallel=ParallelConfig(engine="plain"),
        precision=PrecisionConfig(dtype="fp32"),
    )
    assert f"{layout}, plain engine, fp32\n" in describe_start(
        plain, groups, amount, Start(TrainState(0, 0)), 1, 0
    )
    assert lines["device"].startswith("CPU, ")
    assert lines["memory"] == "1.5 GiB per rank, predicted"
    assert len({line.index(line.split()[1]) for line in text.splitlines()}) == 1
    reader: Any = SimpleNamespace(path=tmp_path / "checkpoints" / "step_9")
    resumed = Start(TrainState(40, 320), reader=reader)
    assert "resuming from step 40\n" in describe_start(config, groups, amount, resumed, 1, 0)
    reader.path = Path("elsewhere/step_9")
    text = describe_start(config, groups, amount, resumed, 1, 0)
    assert "a new run that continues elsewhere/step_9\n" in text
    weights = replace(resumed, weights_only=True)
    text = describe_start(config, groups, amount, weights, 1, 0)
    assert "a new run with the weights of elsewhere/step_9\n" in text
    assert "memory" not in text


def commit(run_dir: Path, step: int) -> None:
    step_dir(run_dir, step).mkdir(parents=True)
    (step_dir(run_dir, step) / COMMITTED_FILE).touch()


def test_end_before_or_after_the_last_checkpoint(tmp_path: Path) -> None:
    """A process that is preempted completes the save in flight, which is of an earlier step."""
    MetricsWriter(tmp_path, tensorboard=False).close()
    text = describe_end(config_of(tmp_path), Ending.PREEMPTED, 23, 5, None)
    assert "checkpoint  none yet\n" in text
    assert text.endswith("start the same command again")
    for step in (14, 21, 28):
        commit(tmp_path, step)
    text = describe_end(config_of(tmp_path), Ending.PREEMPTED, 23, 5, None)
    assert f"checkpoint  {step_dir(tmp_path, 21)}\n" in text
    assert text.endswith("start the same command again: it resumes from this checkpoint")


def test_end_of_a_run(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"unigram_loss": 6.5}, kind="validation")
    for step, loss in ((200, 3.0), (400, 2.75), (500, 2.8)):
        writer.write(step, {"loss": loss - 0.1})
        writer.write(step, {"loss": loss}, kind="validation")
    writer.write(501, {"loss": float("nan")})
    writer.close()
    config = config_of(tmp_path)
    commit(tmp_path, 500)
    text = describe_end(config, Ending.FINISHED, 500, 3723.4, None)
    assert text.splitlines() == [
        "run         finished at step 500 of 500 after 1:02:03",
        "training    loss 2.7000",
        "validation  loss 2.8000 at step 500, best 2.7500 at step 400; unigram baseline 6.5000",
        f"checkpoint  {tmp_path}/checkpoints/step_00000500",
        f"log         {tmp_path}/metrics.jsonl",
        f'next        megatron-deberta fill-mask {tmp_path} "Paris is the [MASK] of France."',
        f"            megatron-deberta convert --checkpoint {tmp_path} --to hf"
        f" --output {tmp_path}/hf",
    ]


def test_end_of_a_fine_tuning_run_names_the_selected_checkpoint(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step, loss, f1 in ((280, 0.25, 0.80), (560, 0.1937, 0.85), (840, 0.1967, 0.9027)):
        writer.write(step, {"loss": loss, "f1": f1, "score": f1}, kind="validation")
    writer.close()
    config = config_of(tmp_path, steps=840)
    config = replace(
        config,
        finetune=replace(config.finetune, task="chunking", data=str(tmp_path)),
        objective=replace(config.objective, name="tokens"),
    )

    def validation() -> str:
        return describe_end(config, Ending.FINISHED, 840, 1, None).splitlines()[1]

    losses = "loss 0.1967 at step 840, best 0.1937 at step 560"
    record_best(tmp_path, 840, 0.9027)
    assert validation() == f"validation  f1 0.9027 at step 840 (selected); {losses}"
    record_best(tmp_path, 560, 0.85)
    assert validation() == (
        f"validation  f1 0.8500 at step 560 (selected), last 0.9027 at step 840; {losses}"
    )
    for step in (560, 840):
        commit(tmp_path, step)
    folder = f"{tmp_path}/checkpoints/step_00000"
    lines = describe_end(config, Ending.FINISHED, 840, 1, None).splitlines()
    assert lines[2:4] == [f"selected    {folder}560", f"last        {folder}840"]
    forget_best(tmp_path)
    assert validation() == f"validation  f1 0.9027 at step 840; {losses}"
    lines = describe_end(config, Ending.FINISHED, 840, 1, None).splitlines()
    assert lines[2] == f"checkpoint  {folder}840"
    config = replace(config, finetune=replace(config.finetune, task=str(tmp_path / "gone.yaml")))
    assert validation() == f"validation  {losses}"


def test_an_early_end_has_its_own_reason(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config = replace(config, finetune=replace(config.finetune, patience=3))
    MetricsWriter(tmp_path, tensorboard=False).close()
    text = describe_end(config, Ending.FINISHED, 40, 1, None)
    assert "ended early by finetune.patience=3 at step 40 of 500" in text
    config = replace(config, train=replace(config.train, exit_step=40))
    text = describe_end(config, Ending.FINISHED, 40, 1, None)
    assert "reached train.exit_step at step 40 of 500" in text


@pytest.mark.parametrize(
    ("name", "training", "validation"),
    [
        ("rtd", "generator loss 7.5000", "generator loss 7.2500 at step 500"),
        ("mlm+ar", "loss 7.5000", "masked loss 7.2500 at step 500"),
    ],
)
def test_end_names_the_model_or_form_of_a_loss(
    name: Any, training: str, validation: str, tmp_path: Path
) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(500, {"loss": 7.5})
    writer.write(500, {"loss": 7.25, "discriminator_loss": 0.5}, kind="validation")
    writer.close()
    config = config_of(tmp_path)
    config = replace(config, objective=replace(config.objective, name=name))
    lines = describe_end(config, Ending.FINISHED, 500, 1, None).splitlines()
    assert lines[1:3] == [f"training    {training}", f"validation  {validation}"]


@pytest.mark.parametrize(
    ("ending", "received", "job", "how", "follows"),
    [
        (Ending.INTERRUPTED, signal.SIGINT, True, "Ctrl-C", "start the same command again"),
        (Ending.STOPPED, None, False, "the file stop", "start the same command again"),
        (Ending.PREEMPTED, signal.SIGTERM, False, "SIGTERM", "start the same command again"),
        (Ending.PREEMPTED, None, True, "a signal", "the next attempt of the job"),
    ],
)
def test_only_a_slurm_job_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending, received: Any, job: bool,
    how: str, follows: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    MetricsWriter(tmp_path, tensorboard=False).close()
    text = describe_end(config_of(tmp_path), ending, 23, 5, received)
    assert f"run         stopped by {how} at step 23 of 500 after 0:00:05\n" in text
    assert text.splitlines()[-1].startswith(f"next        {follows}")


@pytest.mark.parametrize(
    ("train", "reached", "remedy"),
    [
        ({}, "train.steps=500", "raise train.steps and pass --allow-config-change to train on"),
        ({"exit_step": 90}, "train.exit_step=90", "raise train.exit_step to train on"),
    ],
)
def test_a_finished_run_names_the_key_to_raise(
    tmp_path: Path, train: dict[str, int], reached: str, remedy: str
) -> None:
    text = describe_nothing_left(config_of(tmp_path, **train))
    assert f"nothing left to train: {tmp_path} has reached {reached}\n" in text
    assert remedy in text
