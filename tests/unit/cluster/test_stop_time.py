"""The worst case of a stop, from the job history, and the clusters on which it is too long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.stop_time import StopTime, check_stop_time, measured_stop_time
from megatron_deberta.errors import EXIT_USAGE, ConfigError


def checkpoint(time: float, save: float, step: float) -> dict[str, Any]:
    return {"event": "checkpoint", "time": time, "save_seconds": save, "step_seconds": step}


def end(time: float, code: int) -> dict[str, Any]:
    return {"event": "end", "time": time, "code": code}


def test_longest_parts_of_all_attempts() -> None:
    start = {"event": "start", "time": 0.0}
    events = [start, checkpoint(100, 4, 1), checkpoint(200, 3, 2.5), end(206, 75)]
    assert measured_stop_time(events) == StopTime(step=2.5, save=4, exit=6)
    # Neither a failure nor a stop during start-up shows how long an exit takes.
    events += [start, checkpoint(300, 3, 1), end(399, 1), start, end(500, 75)]
    events += [start, checkpoint(600, 3, 1), end(608, 75)]
    measured = measured_stop_time(events)
    assert str(measured) == "14.5 s (longest step 2.5 s, save 4.0 s, exit 8.0 s)"
    assert measured_stop_time([start, end(500, 75)]) is None
    assert measured_stop_time([start, checkpoint(1, 4, 1)]) == StopTime(1, 4, 10)


@pytest.mark.parametrize("key", ["signal_seconds", "preemption_grace_seconds"])
def test_too_little_time_is_refused(key: str) -> None:
    profile = replace(load_profile("dgx2"), **{key: 30})
    check_stop_time(profile, None)
    check_stop_time(profile, StopTime(5, 20, 5))
    with pytest.raises(ConfigError, match=rf"^{key}=30 of .* less than the 30.5 s \(longest step"):
        check_stop_time(profile, StopTime(5.5, 20, 5))


def test_submit_checks_what_the_run_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text(f"train: {{run_dir: {run_dir}}}\nprecision: {{dtype: fp32}}\n")
    arguments = [
        "submit",
        str(config),
        "--cluster",
        "local",
        "--nodes",
        "1",
        "--dry-run",
        "--no-check",
    ]
    assert main(arguments) == 0
    JobHistory(run_dir).append(
        "checkpoint", step=7, samples=56, save_seconds=55.0, step_seconds=1.5
    )
    assert main(arguments) == EXIT_USAGE
    assert "signal_seconds=60 of the cluster profile" in capsys.readouterr().err
