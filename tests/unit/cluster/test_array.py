"""Job arrays: files, commands and numbers of their elements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.cluster.slurm import array
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import JobSpec
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError

PROFILE = ClusterProfile(ranks_per_node=8, gpus_per_node=8, memory_gib_per_node=100, exclusive=True)


@pytest.fixture
def configs(tmp_path: Path) -> list[RunConfig]:
    config = load_config(None)
    sized = replace(config, cluster=replace(config.cluster, nodes=1, ranks_per_node=2))
    return [
        replace(sized, train=replace(sized.train, run_dir=str(tmp_path / f"run_{number}")))
        for number in range(3)
    ]


def test_runs_are_queued_once(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[str]] = []
    queue = ""

    def call(command: Sequence[str]) -> str:
        calls.append(command)
        return queue if command[0] == "squeue" else "77;cluster\n"

    monkeypatch.setattr(slurm, "call", call)
    profile, nodes = array.profile_of_ranks(PROFILE, 2)
    assert nodes == 1
    assert array.submit(profile, configs, tmp_path / "out", 2) == (["77"], 0)
    command = calls[-1]
    assert "--array=0-2%2" in command
    assert "--gres=gpu:2" in command
    assert "--mem=25G" in command
    assert "--exclusive" not in command
    (jobs_file,) = (tmp_path / "out" / "submissions").glob("*/jobs_0.json")
    assert command[-1] == str(jobs_file)
    assert f"--output={jobs_file.parent}/job_%A_%a.log" in command
    for index, config in enumerate(configs):
        found = array.job_file(str(jobs_file), {"SLURM_ARRAY_TASK_ID": str(index)})
        spec = JobSpec.read(found)
        assert (spec.run_dir, spec.ranks_per_node) == (config.train.run_dir, 2)
        assert load_config(spec.config).train == config.train
        assert JobHistory(spec.run_dir).submitted_jobs() == [f"77_{index}"]
    with pytest.raises(ConfigError, match="no job 3; submit the search again"):
        array.job_file(str(jobs_file), {"SLURM_ARRAY_TASK_ID": "3"})
    assert array.job_file("job.json", {"SLURM_JOB_ID": "5"}) == "job.json"

    queue = "77_0\n77_2\n12\n"
    monkeypatch.setattr(time, "strftime", lambda _: "later")
    assert array.submit(profile, configs, tmp_path / "out") == (["77"], 2)
    assert "--array=0-0" in calls[-1]


def test_a_large_search_becomes_several_arrays(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array, "MAX_SIZE", 2)
    lines = array.describe(PROFILE, configs, tmp_path / "out").splitlines()
    assert [line.partition("--array=")[2].split()[0] for line in lines] == ["0-1", "0-0"]
    assert not (tmp_path / "out").exists()


def test_an_element_is_named_by_its_array() -> None:
    # The array's number alone would stand for all elements in scancel and scontrol.
    assert slurm.current_job({"SLURM_JOB_ID": "77"}) == "77"
    assert slurm.current_job({"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "76"}) == "77"
    empty = {"SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": ""}
    assert slurm.current_job({"SLURM_JOB_ID": "77", **empty}) == "77"
    assert array.job_file("job.json", {"SLURM_ARRAY_TASK_ID": ""}) == "job.json"
    element = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"}
    assert slurm.current_job(element) == "77_4"
    assert slurm.current_job({}) == ""


def test_runs_of_several_nodes_keep_the_profile() -> None:
    assert array.profile_of_ranks(PROFILE, 16) == (PROFILE, 2)
    assert array.profile_of_ranks(PROFILE, 8) == (PROFILE, 1)
