"""Status, logs and cancel of a run, with simulated answers of SLURM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cli.main import main
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.cluster.run_lock import Holder, RunLock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import BadNodes, JobHistory
from megatron_deberta.cluster.slurm.status import gather
from megatron_deberta.cluster.slurm.submit import make_spec
from megatron_deberta.cluster.watchdog.detection import RankView
from megatron_deberta.cluster.watchdog.reports import NodeReport, ReportStore
from megatron_deberta.observe.metrics import FILE_NAME
from megatron_deberta.observe.progress import Section

Show = Callable[..., str]
Condition = Callable[[Path], tuple[str, str]]


class Slurm:
    """Simulated SLURM: fixed answers per program; records its calls."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str]) -> str:
        self.calls.append(list(command))
        answer = self.answers.get(command[0], "")
        if answer.startswith("error"):
            raise slurm.SlurmError(answer)
        return answer


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """SLURM without jobs, of which tests change the answers."""
    simulated = Slurm()
    monkeypatch.setattr(slurm, "call", simulated)
    return simulated


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Return what ``status`` prints about a folder."""

    def run(folder: Path, *options: str) -> str:
        assert main(["status", *options, str(folder)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def condition(show: Show) -> Condition:
    """Return the condition of a run and its reason."""

    def read(folder: Path) -> tuple[str, str]:
        shown = show(folder, "--json")
        status = json.loads(shown)
        # One line, for grep.
        assert f' "condition": "{status["condition"]}",\n' in shown
        return status["condition"], status["reason"]

    return read


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three job attempts, the last of which runs: 300 of 1,000 steps in 600 s."""
    history = JobHistory(tmp_path)
    clock = iter((0.0, 1.0, 10.0, 290.0, 310.0, 610.0))
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: next(clock))
        history.append("submit", links=1)
        history.append("jobs", jobs=["7"])
        history.append("start", link="7.0", step=0, nodes="node[1-2]")
        history.append("end", link="7.0", step=140, code=75, goes_on=True, reason="stopped")
        history.append("start", link="7.1", step=140, nodes="node[1-2]")
        history.append("start", link="7.2", step=300, nodes="node[3-4]")
    folder = step_dir(tmp_path, 300)
    folder.mkdir(parents=True)
    (folder / COMMITTED_FILE).touch()
    (tmp_path / "config.yaml").write_text("train: {steps: 1000, exit_step: 0}\n")
    record = {"step": 320, "kind": "train", "loss": 2.5, "tokens_per_second": 1e4}
    (tmp_path / FILE_NAME).write_text(json.dumps({**record, "seconds_left": 5.0}) + "\n")
    for restarts in range(3):
        logs = tmp_path / "logs" / f"7.{restarts}"
        logs.mkdir(parents=True)
        (logs / "rank_0.log").write_text(f"attempt {restarts}\n")
    return tmp_path


def test_status(run_dir: Path, queue: Slurm, show: Show) -> None:
    queue.answers["squeue"] = "RUNNING None\n"
    shown = show(run_dir)
    assert "queue:          RUNNING, job 7\n" in shown
    assert "step:           320 of 1,000 (32.0%); checkpoint at 300\n" in shown
    # 600 s from the first start to the last one's checkpoint of step 300: 2 s a step.
    assert "ETA:            0:22:40\n" in shown
    assert "restarts:       2\n" in shown
    assert "7.0          node[1-2]            step 0 to 140, 0:04:40: stopped" in shown
    assert "7.1          node[1-2]            step 140: lost: the node or the job" in shown
    assert "7.2          node[3-4]            step 300: running" in shown


def test_attempts_of_earlier_submissions_are_listed(run_dir: Path, show: Show) -> None:
    history = JobHistory(run_dir)
    history.append("submit", links=1)
    shown = show(run_dir)
    earlier, _, now = shown.partition("attempts of earlier submissions:\n")[2].partition("attempts")
    assert [line.split()[0] for line in earlier.splitlines()] == ["7.0", "7.1", "7.2"]
    assert earlier.count("lost: the node or the job was killed") == 2
    assert now == " of the last submission: none yet\n"
    assert "restarts:       0\n" in shown
    history.append("start", link="8.0", step=300, nodes="node1")
    assert show(run_dir).splitlines()[-1].endswith("step 300: running")


def test_the_end_of_a_process_without_supervisor_has_a_reason(
    tmp_path: Path, show: Show, condition: Condition
) -> None:
    with RunLock(tmp_path, lambda: signal.SIGTERM):
        pass
    assert condition(tmp_path) == ("stopped", "stopped by SIGTERM")
    assert " ended: SIGTERM\n" in show(tmp_path)
    with pytest.raises(ValueError, match="one"), RunLock(tmp_path):
        raise ValueError("one\ntwo")
    assert condition(tmp_path) == ("failed", "ValueError: one two")
    with RunLock(tmp_path):
        pass
    assert condition(tmp_path) == ("stopped", "")


def test_worst_case_of_a_stop_is_shown(run_dir: Path, show: Show) -> None:
    position = {"step": 320, "samples": 2560}
    JobHistory(run_dir).append("checkpoint", **position, save_seconds=20.5, step_seconds=1.25)
    line = "stop takes:     up to 31.8 s (longest step 1.2 s, save 20.5 s, exit 10.0 s)\n"
    assert line in show(run_dir)
    shown = json.loads(show(run_dir, "--json"))
    assert shown["stop_time"] == {"step": 1.25, "save": 20.5, "exit": 10.0}


def test_slow_ranks_and_bad_nodes_are_shown(run_dir: Path, queue: Slurm, show: Show) -> None:
    queue.answers["squeue"] = "RUNNING None\n"
    slow = {
        "rank": 3, "host": "node4", "part": "forward", "factor": 1.5, "lost_seconds": 0.25,
        "at_step": 310,
    }  # fmt: skip
    JobHistory(run_dir).append("slow", link="7.1", ranks=[{**slow, "rank": 1}])
    assert "straggler" not in show(run_dir)
    JobHistory(run_dir).append("slow", link="7.2", ranks=[slow])
    BadNodes(run_dir, 24).add("node2", "rank 1 on node2 hangs in data at step 7", certain=True)
    shown = show(run_dir)
    assert (
        "straggler:      rank 3 on node4: forward, 1.50 times the median's own time, 0.250" in shown
    )
    assert "excluded nodes: node2, since " in shown
    assert "rank 1 on node2 hangs in data at step 7\n" in shown


def test_a_finished_run_has_no_eta(run_dir: Path, show: Show) -> None:
    shown = show(run_dir)
    assert "ETA:" in shown
    assert "running:        no\n" in shown
    JobHistory(run_dir).append(
        "end", link="7.2", step=300, code=0, goes_on=False, reason="finished"
    )
    assert "ended:          stopped by the file `stop`\n" in show(run_dir)
    (run_dir / "config.yaml").write_text("train: {steps: 1000}\nfinetune: {patience: 3}\n")
    assert "ended:          finished\n" in show(run_dir)
    (run_dir / "config.yaml").write_text("train: {steps: 320}\n")
    shown = show(run_dir)
    assert "ETA" not in shown
    assert "ended:          finished\n" in shown
    assert json.loads(show(run_dir, "--json"))["seconds_left"] is None


def test_a_run_at_its_last_step_has_no_eta(tmp_path: Path, show: Show) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 60}\n")
    record = {"step": 60, "kind": "train", "loss": 2.5, "seconds_left": 5.0}
    (tmp_path / FILE_NAME).write_text(json.dumps(record) + "\n")
    assert "ETA" not in show(tmp_path)
    # Nor has one that was stopped, and does not go on by itself.
    (tmp_path / "config.yaml").write_text("train: {steps: 90}\n")
    assert "ETA" not in show(tmp_path)
    with RunLock(tmp_path):
        assert "ETA:            0:00:05\n" in show(tmp_path)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("PENDING BeginTime\n", "PENDING (BeginTime)"),
        ("", "not queued"),
        ("error: Invalid job id specified", "not queued"),
        ("error: squeue is not installed", "unknown (error: squeue is not installed)"),
    ],
)
def test_queue_state(run_dir: Path, answer: str, state: str, queue: Slurm, show: Show) -> None:
    queue.answers["squeue"] = answer
    assert json.loads(show(run_dir, "--json"))["state"] == state


def test_status_before_the_first_step(tmp_path: Path, show: Show) -> None:
    (tmp_path / "config.yaml").write_text("train: {}\n")
    shown = show(tmp_path)
    assert "step:           0 of 0; no checkpoint" in shown
    assert "last event:     none\n" in shown


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_a_folder_without_a_run_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "rnu")]) == 2
    assert "rnu: no such folder; give the run folder" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 2
    assert "no run has begun in this folder" in capsys.readouterr().err


def test_a_table_of_many_runs(
    run_dir: Path,
    condition: Condition,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without SLURM; what is no run is left out, and a damaged run is named."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "notes.txt").touch()
    (runs / "b").symlink_to(run_dir)
    metrics = run_dir / FILE_NAME
    os.utime(metrics, (time.time() - 3723, time.time() - 3723))
    (runs / "a" / "checkpoints").mkdir(parents=True)
    words = ["status", *map(str, sorted(runs.iterdir()))]
    assert main(words) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run", "state", "step", "tokens/s", "loss", "ETA", "last", "record", "attempts",
    ]  # fmt: skip
    assert first.split() == [str(runs / "a"), "stopped", "0/0", "-", "-", "-", "-", "-"]
    name, state, step, speed, loss, eta, age, ago, attempts = second.split()
    assert (name, state, step, speed) == (str(runs / "b"), "running", "320/1,000", "10,000")
    assert (loss, eta, age[:6], ago, attempts) == ("2.5000", "0:22:40", "1:02:0", "ago", "3")
    assert len({len(line) for line in (header, first, second)}) == 1
    assert main([*words, "--json"]) == 0
    statuses = json.loads(capsys.readouterr().out)
    assert [status["run_dir"] for status in statuses] == [str(runs / "a"), str(runs / "b")]
    assert (statuses[1]["condition"], statuses[1]["reason"]) == condition(run_dir)
    assert statuses[1]["record_time"] == metrics.stat().st_mtime
    metrics.write_text("{]\n")
    assert main(words) == 1
    shown = capsys.readouterr()
    assert f"warning: {runs / 'b'}: " in shown.err
    assert len(shown.out.splitlines()) == 2
    assert main(["status", str(runs / "notes.txt"), str(runs / "none")]) == 2


def test_last_event_and_next_command(run_dir: Path, show: Show) -> None:
    history = JobHistory(run_dir)

    def last_rows() -> list[str]:
        shown = show(run_dir).splitlines()
        rows = [line for line in shown if line.startswith(("last event: ", "next: "))]
        return [line[16:] for line in rows]

    event, command = last_rows()
    assert event.endswith(": saved the checkpoint of step 300")
    assert command == f"megatron-deberta launch {run_dir}/config.yaml --ranks 1"
    history.append("start", link="7.3", step=300, nodes="node1")
    assert last_rows()[0].endswith(": restarted at step 300")
    with RunLock(run_dir):
        assert last_rows()[1] == f"megatron-deberta logs -f {run_dir}"
    event, command = last_rows()
    assert event.endswith(" ended")
    assert f": process {os.getpid()} on " in event
    failed = {"link": "7.3", "step": 300, "goes_on": False}
    history.append("end", **failed, code=1, reason="rank 1 on node1 was killed by signal 9")
    event, command = last_rows()
    assert event.endswith(": ended: rank 1 on node1 was killed by signal 9")
    assert command == f"megatron-deberta logs {run_dir} --rank 1"
    history.append("end", **failed, code=93, reason="3 consecutive job attempts made no progress")
    assert last_rows()[1] == f"megatron-deberta logs {run_dir}"
    history.append("end", **failed, code=75, reason="stopped with a checkpoint")
    assert last_rows()[1].startswith("megatron-deberta launch ")
    history.append("end", **failed, code=130, reason="stopped by Ctrl-C")
    assert last_rows()[1].startswith("megatron-deberta launch ")
    (run_dir / "submissions").mkdir()
    assert last_rows()[1] == f"megatron-deberta submit {run_dir}/config.yaml --cluster PROFILE"
    history.append("end", **failed, code=0, reason="finished")
    (run_dir / "config.yaml").write_text("train: {steps: 320}\n")
    export = f"--to hf --output {run_dir}/hf"
    assert last_rows()[1] == f"megatron-deberta convert --checkpoint {run_dir} {export}"


def test_a_killed_process_is_the_last_event(tmp_path: Path, show: Show) -> None:
    lock = tmp_path / "lock" / "00000001.json"
    lock.parent.mkdir()
    lock.write_bytes(Holder.this_process().to_json())
    os.utime(lock, (0, 0))
    shown = show(tmp_path)
    assert f"process {os.getpid()} on {socket.gethostname()} was killed or lost\n" in shown
    assert f"next:           megatron-deberta pretrain {tmp_path}/config.yaml\n" in shown


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ((), "attempt 2\n"),
        (("--all-attempts",), "attempt 0\n== {1}\nattempt 1\n== {2}\nattempt 2\n"),
    ],
)
def test_logs(
    run_dir: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], printed: str
) -> None:
    paths = [run_dir / "logs" / f"7.{restarts}" / "rank_0.log" for restarts in range(3)]
    assert main(["logs", str(run_dir), *options]) == 0
    assert capsys.readouterr().out == printed.format(*paths)
    assert main(["logs", str(run_dir), "--rank", "9"]) == 2
    assert "no log of rank 9; there are those of ranks 0 to " in capsys.readouterr().err


def test_logs_end_with_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    JobHistory(run_dir).path.open("a").write(
        '{"event": "end", "time": 1.0, "link": "7.2", "goes_on": false, "reason": "finished"}\n'
    )
    assert main(["logs", "-f", str(run_dir)]) == 0
    assert capsys.readouterr().out == "attempt 2\n"


@pytest.mark.parametrize(("options", "call"), [((), "--signal=USR1"), (("--now",), None)])
def test_cancel(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], call: str | None
) -> None:
    submission = run_dir / "submissions" / "20260101T000000"
    submission.mkdir(parents=True)
    spec = make_spec(
        load_profile("local"), nodes=1, run_dir=run_dir, job_name="run", submission=submission,
    )  # fmt: skip
    (submission / "job.json").write_bytes(spec.to_json())
    program = Slurm(scontrol="JobId=7 JobState=RUNNING Reason=None")
    monkeypatch.setattr(slurm, "call", program)
    assert main(["cancel", str(run_dir), *options]) == 0
    assert [*program.calls[0]] == ["scancel", "--state=PENDING", "7"]
    assert program.calls[-1] == ["scancel", *([call] if call else []), "7"]
    assert JobHistory(run_dir).end_reason() == "cancelled"


@contextmanager
def locked_long_ago(run_dir: Path) -> Iterator[None]:
    lock = run_dir / "lock" / "00000001.json"
    lock.parent.mkdir()
    holder = replace(Holder.this_process(), since="2026-01-01T00:00:00+00:00")
    lock.write_bytes(holder.to_json())
    yield
    lock.unlink()


@pytest.mark.parametrize(
    ("code", "reason", "word"),
    [
        (0, "finished", "finished"),
        (93, "3 consecutive job attempts made no new checkpoint", "failed"),
        (2, "configuration, data or checkpoint are refused", "failed"),
        (1, "rank 1 on node1 was killed by signal 9", "failed"),
        (130, "stopped by Ctrl-C (SIGINT)", "stopped"),
        (75, "stopped with a checkpoint", "stopped"),
        (-15, "cancelled by scancel", "stopped"),
    ],
)
def test_condition_of_a_run_that_ended(
    run_dir: Path, code: int, reason: str, word: str, show: Show, condition: Condition
) -> None:
    JobHistory(run_dir).append("end", link="7.2", step=300, code=code, goes_on=False, reason=reason)
    if word == "finished":
        assert condition(run_dir) == ("stopped", "stopped by the file `stop`")
        (run_dir / "config.yaml").write_text("train: {steps: 320}\n")
    shown = "" if word == "finished" else reason
    assert condition(run_dir) == (word, shown)
    line = next(row for row in show(run_dir).splitlines() if "condition:" in row)
    # Not "stopped: stopped by Ctrl-C".
    assert line.split(maxsplit=1)[1] == (reason if word in reason else f"{word}: {reason}")
    with locked_long_ago(run_dir):
        now = ("finished", "") if word == "finished" else ("running", "")
        os.utime(run_dir / FILE_NAME)
        assert condition(run_dir) == now


def test_condition_of_a_run_that_goes_on(run_dir: Path, queue: Slurm, condition: Condition) -> None:
    queue.answers["squeue"] = "RUNNING None\n"
    assert condition(run_dir) == ("running", "")
    queue.answers["squeue"] = "PENDING BeginTime\n"
    assert condition(run_dir) == ("queued", "PENDING (BeginTime)")
    queue.answers.clear()
    with locked_long_ago(run_dir):
        assert condition(run_dir) == ("running", "")
    # Its attempt has not recorded its end; soon, nobody can be starting it any more.
    for path in (run_dir / FILE_NAME, step_dir(run_dir, 300) / COMMITTED_FILE):
        os.utime(path, (700, 700))
    lost = "attempt 7.2 was killed or lost; nothing continues it"
    assert condition(run_dir) == ("stalled", lost)


def test_condition_between_two_attempts(run_dir: Path, condition: Condition) -> None:
    end = {"link": "7.2", "step": 300, "code": 75, "goes_on": True, "reason": "stopped"}
    JobHistory(run_dir).append("end", **end)
    assert condition(run_dir) == ("queued", "between two attempts")
    with JobHistory(run_dir).path.open("a") as stream:
        stream.write(json.dumps({"event": "end", "time": 700.0, **end}) + "\n")
    lost = "nothing continues it after attempt 7.2"
    assert condition(run_dir) == ("stalled", lost)
    assert gather(run_dir, ask_slurm=False).condition == "queued"


def test_condition_of_a_run_without_progress(
    run_dir: Path, queue: Slurm, condition: Condition
) -> None:
    queue.answers["squeue"] = "RUNNING None\n"
    for path in (run_dir / FILE_NAME, step_dir(run_dir, 300) / COMMITTED_FILE):
        os.utime(path, (700, 700))
    waiting = RankView(0, 0, "node3", Section.STEP, 321, 900, age=5.0)
    report = NodeReport(0, "node3", 1, (waiting,), (120.0,), ((9, 0, 0, 0),))
    store = ReportStore(run_dir, "7.2")
    store.publish(report)
    with locked_long_ago(run_dir):
        # Its supervisor knows that it progresses.
        assert condition(run_dir) == ("running", "")
        store.publish(replace(report, views=(replace(waiting, age=500.0),)))
        word, reason = condition(run_dir)
        assert word == "stalled"
        # The age is from the report; what the test itself takes is added to it.
        assert reason.startswith("no progress in step at step 321 for 5")
        # Without reports: after the longest time-out of any section.
        shutil.rmtree(store.folder)
        word, reason = condition(run_dir)
        assert word == "stalled"
        assert reason.startswith("no new record for ")
        os.utime(run_dir / FILE_NAME)
        assert condition(run_dir) == ("running", "")


def test_condition_without_supervisor(tmp_path: Path, condition: Condition) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 60}\n")
    assert condition(tmp_path) == ("stopped", "")
    with RunLock(tmp_path):
        assert condition(tmp_path) == ("running", "")
    assert condition(tmp_path) == ("stopped", "")
    lock = tmp_path / "lock" / "00000009.json"
    lock.write_bytes(Holder.this_process().to_json())
    os.utime(lock, (0, 0))
    assert condition(tmp_path) == ("failed", "its process was killed or lost")
    (tmp_path / FILE_NAME).write_text('{"step": 60, "kind": "train", "loss": 2.5}\n')
    assert condition(tmp_path) == ("failed", "its process was killed or lost")
    step_dir(tmp_path, 60).mkdir(parents=True)
    (step_dir(tmp_path, 60) / COMMITTED_FILE).touch()
    assert condition(tmp_path) == ("finished", "")
    # Of a run that validates, the last validation is missing.
    with (tmp_path / FILE_NAME).open("a") as metrics:
        metrics.write('{"step": 0, "kind": "validation", "unigram_loss": 2.5}\n')
    assert condition(tmp_path) == ("failed", "its process was killed or lost")
    with (tmp_path / FILE_NAME).open("a") as metrics:
        metrics.write('{"step": 60, "kind": "validation", "loss": 2.5}\n')
    assert condition(tmp_path) == ("finished", "")


def test_faults_are_counted(run_dir: Path) -> None:
    # 7.1 was lost.
    assert gather(run_dir, ask_slurm=False).faults == 1
    JobHistory(run_dir).append("end", link="7.2", step=300, code=1, goes_on=True, reason="hangs")
    assert gather(run_dir, ask_slurm=False).faults == 2


def test_control_characters_of_other_people_are_not_printed(run_dir: Path, show: Show) -> None:
    history = JobHistory(run_dir)
    history.path.unlink()
    history.append("start", link="7.0\x1b[2J", step=0, nodes="node\u202e1")
    history.append("end", link="7.0\x1b[2J", step=0, code=1, goes_on=False, reason="\x1b]0;x\x07")
    BadNodes(run_dir, 24).add("node1", "\x1b[31mhangs\ud800", certain=True)
    shown = show(run_dir)
    assert "]0;x" in shown
    assert shown.replace("\n", "").isprintable()


def test_odd_configuration_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "config.yaml").write_text("train: [steps]\n")
    assert main(["status", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "config.yaml: not the config of a run (train=['steps']" in error
