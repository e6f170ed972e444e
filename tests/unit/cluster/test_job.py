"""A job attempt, with scripts in place of SLURM's programs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.cluster.run_lock import Holder, RunLock
from megatron_deberta.cluster.slurm import job
from megatron_deberta.cluster.slurm.history import BadNodes, JobHistory
from megatron_deberta.cluster.slurm.job import rank_environment
from megatron_deberta.cluster.slurm.submit import JobSpec, make_spec
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.cluster.watchdog.reports import NodeReport, ReportStore
from megatron_deberta.errors import ConfigError
from tests.support.jobs import ROOT
from tests.support.notify_program import NotifyProgram

JOB_MODULE = "megatron_deberta.cluster.slurm.job"
PROGRAM = """\
#!/bin/bash
printf '%s\\n' "${0##*/} $*" >> "$HOME/calls"
case "${0##*/}" in
  srun) env > "$HOME/environment"; eval "$(cat "$HOME/ranks")" ;;
  scontrol) cat "$HOME/job"; [[ "$1" != requeue ]] || kill -TERM $PPID ;;
  sinfo) cat "$HOME/nodes" ;;
  scancel) [[ ! -e "$HOME/srun.pid" ]] || kill -USR1 "$(cat "$HOME/srun.pid")" ;;
esac
"""


HUNG = Diagnosis("hang", (1,), ("n2",), "rank 1 on n2 hangs in step at step 7")


class Place:
    """A folder with programs, a job and its run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        for name in ("srun", "scontrol", "scancel", "sinfo"):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(PROGRAM)
            program.chmod(0o755)
        self.job("JobState=RUNNING Restarts=0")
        spec = make_spec(
            load_profile("local"), nodes=2, run_dir=self.run_dir, job_name="run",
            submission=self.run_dir,
        )  # fmt: skip
        (folder / "job.json").write_bytes(spec.to_json())
        JobHistory(self.run_dir).append("submit")
        JobHistory(self.run_dir).append("jobs", jobs=["7", "8"])

    def job(self, text: str) -> None:
        (self.folder / "job").write_text(text)

    def hang(self) -> None:
        """Report that a rank on n2 hung."""
        report = NodeReport(1, "n2", 1, (), (), (), diagnosis=HUNG, code=1)
        ReportStore(self.run_dir, "7.0").publish(report)

    def start(self, ranks: str, *prefix: str, **variables: str) -> subprocess.Popen[str]:
        (self.folder / "ranks").write_text(ranks)
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", JOB_MODULE, str(self.folder / "job.json")],
            env={
                "PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": str(self.folder),
                "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_EXPORT_ENV": "NONE",
                "SLURM_JOB_NODELIST": "n[1-2]", "SECRET": "x", **variables,
            },
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, ranks: str, *prefix: str, **variables: str) -> int:
        process = self.start(ranks, *prefix, **variables)
        _, self.errors = process.communicate(timeout=60)
        return process.returncode

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def ends(self) -> list[dict[str, object]]:
        return [record for record in JobHistory(self.run_dir).records() if record["event"] == "end"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_finished(place: Place) -> None:
    assert place.run("exit 0") == 0, place.errors
    srun, shown, cancelled = place.calls()
    assert srun.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1")
    assert f"--output={place.run_dir}/logs/7.0/node_%t.log" in srun
    assert shown == "scontrol --oneliner show job 7"
    assert cancelled == "scancel --state=PENDING 8"
    pairs = (place.folder / "environment").read_text().splitlines()
    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert not {"SECRET", "SLURM_EXPORT_ENV"} & set(environment)
    assert place.ends()[0]["reason"] == "finished"
    assert place.run("exit 1") == 0
    assert "nothing to do: finished" in place.errors


@pytest.mark.parametrize("code", [75, 1, 137])
def test_requeues_itself(place: Place, code: int) -> None:
    # SLURM answers a requeue by ending the batch script.
    assert place.run(f"exit {code}") == -signal.SIGTERM, place.errors
    assert place.calls()[-1] == "scontrol requeue 7"
    assert place.ends()[0]["goes_on"] is True


@pytest.mark.parametrize("part", ["history", "bad nodes", "logs"])
def test_requeues_itself_on_a_full_disk(place: Place, part: str) -> None:
    place.hang()
    if part == "logs":
        (place.run_dir / "logs").write_text("a file where the folder should be")
    else:
        # The process may not write beyond the first MiB of any file.
        path = place.run_dir / {"history": "chain.jsonl", "bad nodes": "bad_nodes.jsonl"}[part]
        with path.open("a") as stream:
            stream.write("x" * (1 << 20) + "\n")
    assert place.run("exit 1", "prlimit", f"--fsize={1 << 20}") in (-signal.SIGTERM, 75)
    assert "scontrol requeue 7" in place.calls(), place.errors
    if part == "logs":
        assert place.ends()[0]["reason"] == HUNG.reason
    else:
        assert "not recorded: " in place.errors


def test_requeue_excludes_a_node_that_hung(place: Place) -> None:
    place.hang()
    place.job("JobState=RUNNING Restarts=0 Partition=p")
    (place.folder / "nodes").write_text("n1 alloc\nn2 alloc\nn3 idle\nn4 down*\n")
    # It outlives the requeue, to exclude the node.
    assert place.run("exit 1") == 75, place.errors
    assert place.calls()[-2:] == [
        "scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n2",
    ]  # fmt: skip
    end = place.ends()[0]
    assert (end["goes_on"], end["reason"]) == (True, HUNG.reason)
    assert list(BadNodes(place.run_dir, 24).current()) == ["n2"]


def test_a_lost_attempt_a_hang_and_the_end_are_told(place: Place) -> None:
    program = NotifyProgram(place.folder)
    config = JobSpec.read(place.folder / "job.json").config
    file = place.folder / "run.prom"
    Path(config).write_text(f"cluster: {{notify: [append], prometheus_file: {file}}}\n")
    JobHistory(place.run_dir).start_attempt("6.0", "n[1-2]")
    place.hang()
    assert place.run("exit 93") == 93, place.errors
    told = program.messages()
    assert [message["event"] for message in told] == ["node_lost", "node_lost", "stalled", "ended"]
    assert "attempt 6.0 on n[1-2] was lost" in told[0]["text"]
    assert "n2 is excluded: rank 1 on n2 hangs" in told[1]["text"]
    assert told[3]["text"].endswith("see the logs (exit code 93)")
    assert file.exists() or "need prometheus_client" in place.errors


def test_bad_node_without_a_spare_is_used_again(place: Place) -> None:
    BadNodes(place.run_dir, 24).add("n1", "ECC", certain=True)
    BadNodes(place.run_dir, 24).add("n2", "hangs", certain=True)
    (place.folder / "nodes").write_text("n1 alloc\nn2 alloc\nn3 idle\n")
    assert place.run("exit 1") == 75
    assert place.calls()[-1] == "scontrol update JobId=7 ExcNodeList=n2"
    assert "n1 is bad, but there is no spare node for it" in place.errors


def test_continues_on_fewer_nodes(place: Place) -> None:
    file = place.folder / "job.json"
    spec = replace(JobSpec.read(file), least_nodes=1)
    file.write_bytes(spec.to_json())
    place.run_dir.mkdir(exist_ok=True)
    Path(spec.config).write_text("train: {global_batch_size: 8, micro_batch_size: 2}\n")
    assert place.run("exit 0", SLURM_JOB_NUM_NODES="1") == 0, place.errors
    assert "1 of 2 nodes: running on 1" in place.errors
    assert place.calls()[0].startswith("srun --nodes=1 --ntasks=1 ")
    # What the node's supervisor reads.
    used = place.run_dir / "logs" / "7.0" / "job.json"
    assert place.calls()[0].endswith(f" {used} 7.0")
    assert JobSpec.read(used) == replace(spec, nodes=1)
    # Both are bad and one node is enough: the one recorded last is excluded.
    for node in ("n1", "n2"):
        BadNodes(place.run_dir, 24).add(node, "hangs", certain=True)
    (place.folder / "nodes").write_text("n1 alloc\nn2 alloc\n")
    JobHistory(place.run_dir).append("submit")
    JobHistory(place.run_dir).append("jobs", jobs=["7"])
    assert place.run("exit 1") == 75
    assert place.calls()[-1] == "scontrol update JobId=7 ExcNodeList=n2"


@pytest.mark.parametrize("code", [2, 93])
def test_final_exit_codes_end_the_run(place: Place, code: int) -> None:
    assert place.run(f"exit {code}") == code
    assert place.calls()[-1] == "scancel --state=PENDING 8"


def test_run_ends_after_three_silent_attempts(place: Place) -> None:
    for restarts in range(3):
        JobHistory(place.run_dir).append("start", link=f"7.{restarts}", step=0, nodes="n")
    assert place.run("exit 0", SLURM_RESTART_COUNT="3") == 93
    assert not any(call.startswith("srun") for call in place.calls())


def test_folder_in_use(place: Place) -> None:
    with RunLock(place.run_dir):
        assert place.run("exit 0") == 2
    assert not any(call.startswith("srun") for call in place.calls())
    assert f"in use by process {os.getpid()}" in str(place.ends()[0]["reason"])


def test_dead_clients_flock_does_not_end_the_run(place: Place) -> None:
    """The file server keeps the lock of a node that has gone; SLURM knows that its job ended."""
    lock = place.run_dir / "lock" / "00000004.json"
    lock.parent.mkdir(parents=True)
    holder = replace(Holder.this_process(), host="n9", boot="other", job="6")
    lock.write_bytes(holder.to_json())
    # squeue knows no job 6.
    squeue = place.folder / "bin" / "squeue"
    squeue.write_text("#!/bin/bash\nexit 0\n")
    squeue.chmod(0o755)
    with lock.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert place.run("exit 0") == 0, place.errors
    assert place.ends()[0]["reason"] == "finished"


def test_attempt_whose_node_was_taken_for_dead_records_nothing(place: Place) -> None:
    """Also if SLURM does not answer: the history shows that another attempt has started."""
    (place.folder / "bin" / "scontrol").unlink()
    later = '\'{"event": "start", "link": "7.1", "step": 0, "nodes": "n3"}\''
    assert place.run(f"echo {later} >> {place.run_dir}/chain.jsonl; exit 93") == 1
    assert place.ends() == []
    assert not any(call.startswith("scancel") for call in place.calls())


@pytest.mark.parametrize("stopped", [True, False])
def test_preemptions_during_start_up_do_not_end_the_run(place: Place, stopped: bool) -> None:
    for restarts in range(5):
        link = f"7.{restarts}"
        JobHistory(place.run_dir).append("start", link=link, step=0, nodes="n")
        if stopped:
            JobHistory(place.run_dir).append("end", link=link, step=0, code=75, goes_on=True)
        else:
            JobHistory(place.run_dir).append("signal", link=link, signal="TERM", starting=True)
    assert place.run("exit 75", SLURM_RESTART_COUNT="5") == -signal.SIGTERM, place.errors
    assert place.ends()[-1]["goes_on"] is True
    assert place.ends()[-1]["reason"] == "stopped before the first step"


# SLURM shows COMPLETING from scancel until the batch script has ended.
@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_scancel_is_not_undone(place: Place, state: str) -> None:
    place.job(f"JobState={state} Reason=None Restarts=0")
    assert place.run("exit 75") == 0
    assert not any("requeue" in call for call in place.calls())
    assert place.ends()[0]["reason"] == "cancelled by scancel"


def test_job_past_its_time_limit_is_requeued(place: Place) -> None:
    place.job("JobState=COMPLETING Reason=TimeLimit Restarts=0")
    assert place.run("exit 1") == -signal.SIGTERM
    assert place.calls()[-1] == "scontrol requeue 7"


def test_superseded_attempt_records_nothing(place: Place) -> None:
    place.job("JobState=RUNNING Restarts=1")
    assert place.run("exit 1") == 1
    assert place.ends() == []
    assert not any("requeue" in call for call in place.calls())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_to_the_batch_script_reaches_the_ranks(place: Place, number: int) -> None:
    process = place.start(
        'echo $$ > "$HOME/srun.pid"; trap "exit 75" USR1; while :; do sleep 0.1; done'
    )
    deadline = time.monotonic() + 30
    while not (place.folder / "srun.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert "scancel --signal=USR1 7" in place.calls()
    assert place.ends()[0]["code"] == 75


def test_missing_interface(place: Place) -> None:
    file = place.folder / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "rendezvous_interface": "ib9"}))
    assert place.run("exit 0") == 2
    assert "rendezvous_interface=ib9 has no IPv4 address on" in place.errors


def test_environment_of_job_json_takes_precedence(place: Place) -> None:
    profile = load_profile("dgx2")
    spec = make_spec(
        profile, nodes=1, run_dir=Path("/r"), job_name="r", submission=Path("/r/s"),
        exported={"NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    seen = rank_environment(spec, {"NCCL_IB_HCA": "x", "NCCL_DEBUG": "WARN", "LC_ALL": "C"})
    assert (seen["NCCL_IB_HCA"], seen["NCCL_DEBUG"], seen["LC_ALL"]) == ("mlx5", "INFO", "C")


def test_odd_number_of_restarts_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "abc")
    assert job.main([str(place.folder / "job.json")]) == 2
    assert "SLURM_RESTART_COUNT='abc' is not a whole number" in caplog.text
    with pytest.raises(ConfigError, match="SLURM_RESTART_COUNT='abc'"):
        Holder.this_process()


def test_report_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    store, elsewhere = ReportStore(tmp_path, "7.0"), tmp_path / "mine"
    elsewhere.write_text("mine")
    store.folder.mkdir(parents=True)
    for name in ("node_1.json", f"node_1.json.{os.getpid()}.tmp"):
        (store.folder / name).symlink_to(elsewhere)
    store.publish(NodeReport(1, "n2", 1, (), (), ()))
    assert elsewhere.read_text() == "mine"
    assert not (store.folder / "node_1.json").is_symlink()
    assert store.read([1])[1].host == "n2"
