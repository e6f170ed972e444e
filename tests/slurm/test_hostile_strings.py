"""Injection strings in every field that reaches a command line are rejected or passed verbatim.

Accepted strings pass through the real sbatch, the batch script, the job attempt and the real srun
to a script that records its arguments in place of the training program.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megatron_deberta.cli.main import main
from megatron_deberta.cluster.slurm.history import JobHistory
from tests.slurm.hostile import HOSTILE
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import ROOT
from tests.support.selection import every

RECORDER = """\
#!/bin/bash
# Runs job attempt and supervisor with Python; in place of a rank, records the arguments.
if [[ "$2" == megatron_deberta.cluster.* ]]; then exec {python} "$@"; fi
printf '%s\\0' "$@" > "$NCCL_RECORD_TO.arguments"
env -0 > "$NCCL_RECORD_TO.environment"
"""
PROFILE_FIELDS = (
    "partition", "account", "qos", "exclude", "rendezvous_interface", "container_image", "python",
    "gpu_architecture", "container_mounts", "torch_builds", "launcher", "container", "environment",
)  # fmt: skip
OPTIONS = ("--job-name", "--partition", "--account", "--qos", "--exclude", "--cluster")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: VirtualCluster) -> Path:
    """Return a folder to submit from, with the recorder in place of Python."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    recorder = tmp_path / "recorder"
    recorder.write_text(RECORDER.format(python=shlex.quote(sys.executable)))
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@contextmanager
def no_canary(place: Path) -> Iterator[Path]:
    """Assert that no string created its file, here or in the home folder."""
    canary = place / "canary"
    yield canary
    created = [path for path in place.rglob("*") if path.name.lower() == "canary"]
    assert not created
    assert not (Path.home() / "canary").exists()


def profile_of(place: Path, record: str = "recorded", **values: object) -> Path:
    """Write a cluster profile whose Python is the recorder, writing to files named ``record``."""
    settings = {
        "ranks_per_node": 1, "memory_gib_per_node": 1, "rendezvous_interface": "lo",
        "python": str(place / "recorder"),
        "environment": {"NCCL_RECORD_TO": str(place / record)}, **values,
    }  # fmt: skip
    path = place / "cluster.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def submit(place: Path, *arguments: str, **profile: object) -> int:
    cluster = [] if "--cluster" in arguments else ["--cluster", str(profile_of(place, **profile))]
    run_dir = [] if any("run_dir" in text for text in arguments) else [f"train.run_dir={place}/run"]
    run = str(ROOT / "configs" / "runs" / "small.yaml")
    options = ["--nodes", "1", "--trust-profile", "--no-check"]
    try:
        return main(["submit", run, *cluster, *options, *run_dir, *arguments])
    except (SystemExit, ValueError) as error:
        # From argparse, or for strings that are invalid in a command line or environment.
        return error.code if isinstance(error, SystemExit) else 2  # type: ignore[return-value]


def recorded(
    place: Path, run_dir: Path, record: str = "recorded"
) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of the rank once the run has ended."""
    wait_until(lambda: bool(JobHistory(run_dir).end_reason()), 240, f"the recorder of {run_dir}")
    arguments = (place / f"{record}.arguments").read_text().split("\0")[:-1]
    pairs = (place / f"{record}.environment").read_text().split("\0")[:-1]
    return arguments, dict(pair.split("=", 1) for pair in pairs)


def test_strings_are_distinct() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE) >= 60


@pytest.mark.parametrize("field", every(3, PROFILE_FIELDS, ["slow"]))
def test_cluster_profile(place: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with no_canary(place) as canary:
        for text in HOSTILE:
            hostile = text.replace("CANARY", str(canary))
            value: object = hostile
            if field in ("container_mounts", "torch_builds"):
                value = [hostile]
            elif field == "environment":
                value = {hostile: "x"}
            extra = {"container": "pyxis"} if field == "container_image" else {}
            assert submit(place, **{field: value}, **extra) == 2, hostile
            error = capsys.readouterr().err
            assert error.count("\n") == 1, error
            assert not (place / "run").exists()


@pytest.mark.parametrize("option", OPTIONS)
def test_options(place: Path, option: str) -> None:
    with no_canary(place) as canary:
        for text in HOSTILE:
            assert submit(place, f"{option}={text.replace('CANARY', str(canary))}") == 2, text
        assert not (place / "run").exists()


def test_environment_values_are_passed_verbatim(place: Path) -> None:
    with no_canary(place) as canary:
        texts = [text.replace("CANARY", str(canary)) for text in HOSTILE]
        rejected = [text for text in texts if any(ord(c) < 32 or ord(c) == 127 for c in text)]
        for text in rejected:
            assert submit(place, environment={"NCCL_A": text}) == 2, text
        expected = {
            f"NCCL_A{n}": text
            for n, text in enumerate(texts)
            if text not in rejected and "${" not in text
        }
        assert len(expected) >= 45
        target = {"NCCL_RECORD_TO": str(place / "recorded")}
        assert submit(place, environment={**expected, **target}, gpus_per_node=3) == 0
        _, environment = recorded(place, place / "run")
        assert {name: environment.get(name) for name in expected} == expected
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
        # --export=NONE: other variables of the submitting shell are not passed.
        assert not set(environment) & {"PYTEST_CURRENT_TEST", "VIRTUAL_ENV", "SLURM_EXPORT_ENV"}


@pytest.mark.slow
def test_run_folders_are_rejected_or_passed_verbatim(place: Path) -> None:
    accepted: dict[str, Path] = {}
    with no_canary(place) as canary:
        for number, text in enumerate(HOSTILE):
            # Without slashes, which would separate folders.
            name = text.replace("CANARY", "canary").replace("/", "")
            override = f"train.run_dir={json.dumps(f'{place}/{number}/{name}')}"
            code = submit(place, override, "--job-name=hostile", record=f"r{number}")
            if code == 2:
                assert not (place / str(number)).exists(), name
                continue
            assert code == 0, name
            (accepted[f"r{number}"],) = (place / str(number)).iterdir()
        assert len(accepted) >= 3
        for record, run_dir in accepted.items():
            assert_exact_arguments(place, run_dir, record)
        assert canary.parent == place


def assert_exact_arguments(place: Path, run_dir: Path, record: str) -> Path:
    """Assert that the only argument of the rank is its config."""
    (config,) = run_dir.glob("submissions/*/run.yaml")
    arguments, _ = recorded(place, run_dir, record)
    assert arguments == ["-m", "megatron_deberta", "pretrain", str(config)]
    return config


@pytest.mark.slow
def test_data_paths_are_passed_in_the_config_file(place: Path) -> None:
    with no_canary(place) as canary:
        texts = [text.replace("CANARY", str(canary)) for text in HOSTILE]
        # Interpolations, and control characters other than white space.
        rejected = [text for text in texts if "${" in text or set("\r\0\x1b") & set(text)]
        assert len(rejected) == 5
        for text in rejected:
            assert submit(place, f"tokenizer.path={json.dumps(text)}") == 2, text
        assert not (place / "run").exists()
        accepted = [text for text in texts if text not in rejected]
        assert len(accepted) >= 50
        one = f"tokenizer.path={json.dumps(accepted[0])}"
        assert submit(place, one, f"data.train={json.dumps(accepted)}") == 0
        config = yaml.safe_load(
            assert_exact_arguments(place, place / "run", "recorded").read_text()
        )
        assert config["tokenizer"]["path"] == os.path.abspath(accepted[0])
        assert config["data"]["train"] == [os.path.abspath(text) for text in accepted]
