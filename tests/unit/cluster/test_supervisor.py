"""Supervisors of real processes: detection and diagnosis of hangs, deaths and stragglers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cluster.slurm.history import BadNodes, JobHistory
from megatron_deberta.cluster.watchdog.detection import RankView, diagnose_deaths
from megatron_deberta.cluster.watchdog.heartbeat import Beat
from megatron_deberta.cluster.watchdog.ranks import NodePlan, RankProcess
from megatron_deberta.cluster.watchdog.reports import NodeReport
from megatron_deberta.cluster.watchdog.supervisor import FROZEN_SECONDS, Supervisor
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.files import temporary_name
from megatron_deberta.observe.progress import Section
from tests.support.notify_program import NotifyProgram
from tests.support.selection import every
from tests.support.watched_ranks import ATTEMPT, STARTUP_EXIT_SECONDS, WatchedRanks

LIMIT = 1.0
HEALTHY_EXIT_SECONDS = 20
"""Wait for the other ranks where all end by themselves: on a busy machine, their exits differ."""
NO_HANG = 30.0
"""Time limit where nothing hangs: a busy machine may stop a rank for a second."""
# Far below every other time-out; twelve processes may share one processor meanwhile.
WITHIN = LIMIT + 15


@pytest.fixture
def ranks_of(tmp_path: Path) -> Iterator[Any]:
    made: list[WatchedRanks] = []

    def make(**values: Any) -> WatchedRanks:
        made.append(WatchedRanks(tmp_path, **({"limit": LIMIT} | values)))
        return made[-1]

    yield make
    for ranks in made:
        for process in ranks.supervisors:
            process.kill()
            process.communicate()
        assert ranks.processes() == []


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_clean_run_on_two_nodes(ranks_of: Any) -> None:
    ranks = ranks_of(nodes=2, steps=40, limit=NO_HANG)
    assert ranks.run() == [0, 0], ranks.logs
    assert ranks.diagnosis() is None
    assert ranks.log(3) == "rank 3 of 4 steps\n"
    # On a busy machine, a rank of such short steps may in fact be slow.
    events = {record["event"] for record in JobHistory(ranks.run_dir).records()}
    assert events <= {"slow"}


@pytest.mark.parametrize(
    ("rank", "place", "how", "words"),
    every(
        3,
        [
            (1, "step", "stop", "hangs in step at step 5, stopped by a signal"),
            (2, "data", "read", "hangs in data at step 5, reading "),
            (0, "save", "stop", "hangs in save at step 6, stopped by a signal"),
        ],
        ["slow"],
    ),
)
def test_hang_is_detected_and_its_rank_named(
    ranks_of: Any, rank: int, place: str, how: str, words: str
) -> None:
    ranks = ranks_of(nodes=2, rank=rank, place=place, step=5, how=how)
    assert ranks.run() == [1, 1], ranks.logs
    assert ranks.seconds_since_fault() < WITHIN
    diagnosis = ranks.diagnosis()
    host = f"node{rank // 2}"
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.hosts) == ("hang", (rank,), (host,))
    assert f"rank {rank} on {host} {words}" in diagnosis.reason
    # The rest may contain each node's own measurement of the delay.
    assert all(diagnosis.reason.partition(";")[0] in log for log in ranks.logs)
    waiting = (rank + 2) % 4
    stacks = ranks.run_dir / "supervision" / ATTEMPT / f"stacks_rank_{waiting}.txt"
    assert "torch/distributed/barrier_of_a_test.py" in stacks.read_text()


def test_killed_rank_is_named_and_the_others_end(ranks_of: Any) -> None:
    ranks = ranks_of(ranks_per_node=3, exit_wait=0, rank=2, place="step", step=4, how="kill")
    assert ranks.run() == [1]
    diagnosis = ranks.diagnosis()
    assert (diagnosis.kind, diagnosis.ranks) == ("death", (2,))
    assert "rank 2 on node0 was killed by signal 9" in diagnosis.reason
    assert ranks.seconds_since_fault() < WITHIN


@pytest.mark.parametrize("code", [2, 93, 1])
def test_node_has_the_exit_code_of_its_rank(ranks_of: Any, code: int) -> None:
    ranks = ranks_of(exit_wait=0, rank=0, place="startup", step=0, how=code)
    assert ranks.run() == [code]


@pytest.mark.parametrize("is_full", [False, True])
def test_error_of_a_rank_is_kept_without_its_log(ranks_of: Any, is_full: bool) -> None:
    words = "before\nOSError: [Errno 28] No space left on device: 'ledger'\nafter\n"
    ranks = ranks_of(exit_wait=0, rank=1, place="step", step=3, how=1, last_words=words)
    folder = ranks.run_dir / "logs" / ATTEMPT
    folder.mkdir(parents=True)
    if is_full:
        (folder / "rank_1.log").symlink_to("/dev/full")
    assert ranks.run() == [1]
    assert "rank 1 ended with exit code 1: OSError: [Errno 28] No space" in ranks.logs[0]
    problem = f"{folder}/rank_1.log is incomplete (No space left on device); its last lines:\n"
    assert (problem + f"rank 1 of 2 steps\n{words}" in ranks.logs[0]) == is_full
    if not is_full:
        assert ranks.log(1).endswith(words)


def test_after_a_failed_start_the_other_ranks_are_ended_soon(ranks_of: Any) -> None:
    # Rank 1 waits for rank 0 in the first step.
    ranks = ranks_of(exit_wait=60, limit=60, rank=0, place="startup", step=0, how=1)
    assert ranks.run() == [1]
    assert STARTUP_EXIT_SECONDS <= ranks.seconds_since_fault() < STARTUP_EXIT_SECONDS + 4


def test_final_exit_code_of_another_node_ends_the_job(ranks_of: Any) -> None:
    ranks = ranks_of(nodes=2, exit_wait=0, rank=0, place="startup", step=0, how=2)
    assert ranks.run() == [2, 2], ranks.logs


def started(ranks: WatchedRanks) -> WatchedRanks:
    ranks.start()
    wait_for(lambda: all((ranks.run_dir / "logs" / ATTEMPT / f"rank_{r}.log").exists()
                         and ranks.log(r) for r in range(2)))  # fmt: skip
    return ranks


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)],
)
def test_signals_reach_every_rank(ranks_of: Any, number: int, code: int) -> None:
    ranks = started(ranks_of(steps=100_000))
    ranks.supervisors[0].send_signal(number)
    assert ranks.end() == [code]
    assert stops(ranks) == [(ATTEMPT, signal.Signals(number).name, False)]
    # Some ranks may get it after the step at which all agree to stop.
    assert any(f"received {int(number)}" in ranks.log(rank) for rank in range(2))


def stops(ranks: WatchedRanks) -> list[tuple[str, str, bool]]:
    records = [r for r in JobHistory(ranks.run_dir).records() if r["event"] == "signal"]
    return [(record["link"], record["signal"], record["starting"]) for record in records]


def test_stop_signal_during_start_up_is_recorded_at_once(ranks_of: Any) -> None:
    ranks = ranks_of(steps=100_000, rank=1, place="startup", step=0, how="read", limit=60)
    ranks.start()
    wait_for((ranks.folder / "fault").exists)
    ranks.supervisors[0].send_signal(signal.SIGTERM)
    wait_for(lambda: stops(ranks) == [(ATTEMPT, "SIGTERM", True)])
    ranks.supervisors[0].kill()
    wait_for(lambda: ranks.processes() == [])


@pytest.mark.parametrize(
    ("number", "code"), every(2, [(signal.SIGUSR1, 75), (signal.SIGINT, 130)], ["slow"])
)
def test_rank_that_a_stop_signal_ends_before_it_handles_it(
    ranks_of: Any, number: int, code: int
) -> None:
    """Torch is being imported: neither a failure nor the fault of the node."""
    ranks = ranks_of(steps=100_000, rank=1, place="startup", step=0, how="import", limit=60)
    ranks.start()
    wait_for((ranks.folder / "fault").exists)
    time.sleep(0.2)
    ranks.supervisors[0].send_signal(number)
    assert ranks.end() == [code]
    assert ranks.diagnosis() is None


def test_second_ctrl_c_kills(ranks_of: Any) -> None:
    # Rank 1 does not answer, as one that waits in a collective.
    ranks = started(ranks_of(steps=100_000, rank=1, place="step", step=5, how="read", limit=60))
    wait_for((ranks.folder / "fault").exists)
    ranks.supervisors[0].send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.supervisors[0].wait(1)
    ranks.supervisors[0].send_signal(signal.SIGINT)
    assert ranks.end() == [130]


def test_ranks_do_not_outlive_their_supervisor(ranks_of: Any) -> None:
    ranks = ranks_of(steps=100_000)
    ranks.start()
    wait_for(lambda: len(ranks.processes()) == 2)
    os.kill(ranks.supervisors[0].pid, signal.SIGKILL)
    wait_for(lambda: ranks.processes() == [], 5)


@pytest.mark.slow
def test_silent_node_is_named(ranks_of: Any) -> None:
    ranks = ranks_of(nodes=2, steps=100_000, startup=5)
    ranks.start()
    wait_for(lambda: len(ranks.processes()) == 4)
    wait_for(lambda: len(list((ranks.run_dir / "supervision" / ATTEMPT).glob("node_?.json"))) == 2)
    os.kill(ranks.supervisors[1].pid, signal.SIGKILL)
    assert ranks.end()[0] == 1
    # Its ranks died with it; the others waited for them until their time-out.
    assert ranks.diagnosis().hosts == ("node1",)
    # Silence is no proof: nothing excludes the node.
    bad_nodes = BadNodes(ranks.run_dir, hours=24)
    bad_nodes.record_failure(ranks.diagnosis())
    assert bad_nodes.current() == {}


@pytest.mark.slow
def test_suspended_job_continues(ranks_of: Any) -> None:
    limit = 2 * LIMIT
    ranks = ranks_of(steps=200, limit=limit, exit_wait=HEALTHY_EXIT_SECONDS)
    ranks.start()
    wait_for(lambda: len(ranks.processes()) == 2 and (ranks.folder / "step5").exists())
    everyone = [ranks.supervisors[0].pid, *ranks.processes()]
    for number, seconds in ((signal.SIGSTOP, 2 * limit), (signal.SIGCONT, 0)):
        for process in everyone:
            os.kill(process, number)
        time.sleep(seconds)
    assert ranks.end() == [0], ranks.logs
    assert ranks.diagnosis() is None


@pytest.mark.slow
def test_straggler_is_reported_in_log_and_history(ranks_of: Any) -> None:
    ranks = ranks_of(
        nodes=2, steps=50, slow=3, slow_seconds=0.05, limit=NO_HANG, exit_wait=HEALTHY_EXIT_SECONDS
    )
    assert ranks.run() == [0, 0], ranks.logs
    assert "rank 3 on node1 is slow: forward takes" in ranks.logs[0]
    reports = [r for r in JobHistory(ranks.run_dir).records() if r["event"] == "slow"]
    assert [item["rank"] for item in reports[0]["ranks"]] == [3]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="waiting in a collective"),
        pytest.param({"ranks_per_node": 1}, id="one rank per node", marks=pytest.mark.slow),
        pytest.param(
            {"rank": 1, "place": "data", "step": 0, "how": "read"},
            id="a rank elsewhere",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_missing_node_is_diagnosed_and_no_other_rank(
    ranks_of: Any, tmp_path: Path, plan: dict[str, Any]
) -> None:
    ranks = ranks_of(nodes=2, **plan)
    (tmp_path / "run.yaml").write_text("cluster: {startup_timeout_seconds: 2}\n")
    ranks.nodes = 1
    assert ranks.run() == [1]
    assert "1 of 2 nodes have sent no report (by number in the job: 1)" in ranks.logs[0]
    report = json.loads((ranks.run_dir / "supervision" / ATTEMPT / "node_0.json").read_text())
    assert report["verdict"]["ranks"] == report["verdict"]["hosts"] == []


@pytest.mark.slow
def test_run_continues_if_reports_cannot_be_written(ranks_of: Any, tmp_path: Path) -> None:
    ranks = ranks_of(steps=500, exit_wait=HEALTHY_EXIT_SECONDS)
    # A busy machine needs seconds to start the ranks.
    (tmp_path / "run.yaml").write_text("cluster: {startup_timeout_seconds: 4}\n")
    ranks.run_dir.mkdir(parents=True)
    (ranks.run_dir / "supervision").write_text("a file where the folder should be")
    assert ranks.run() == [0], ranks.logs
    assert "supervision" in ranks.logs[0]


def stop_reports(ranks: WatchedRanks, node: int) -> None:
    """Stop a node's report from being replaced, by a folder with its temporary file's name."""
    report = ranks.run_dir / "supervision" / ATTEMPT / f"node_{node}.json"
    wait_for(report.exists)
    own = str(temporary_name(report))
    temporary = Path(own.replace(f".{os.getpid()}.", f".{ranks.supervisors[node].pid}."))
    while True:
        try:
            return temporary.mkdir()
        except FileExistsError:
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_frozen_report_of_a_healthy_node_ends_nothing(ranks_of: Any, node: int) -> None:
    limit = 2 * LIMIT
    ranks = ranks_of(nodes=2, steps=700, limit=limit, exit_wait=HEALTHY_EXIT_SECONDS)
    ranks.start()
    stop_reports(ranks, node)
    begin = time.monotonic()
    assert ranks.end() == [0, 0], ranks.logs
    assert time.monotonic() - begin > 2 * limit
    assert ranks.diagnosis() is None


@pytest.mark.nightly
def test_hang_is_named_although_another_node_is_silent(ranks_of: Any) -> None:
    fault = {"rank": 0, "place": "step", "step": 100, "how": "stop"}
    ranks = ranks_of(nodes=2, steps=100_000, startup=5, **fault)
    ranks.start()
    stop_reports(ranks, 1)
    assert ranks.end() == [1, 1]
    diagnosis = ranks.diagnosis()
    assert (diagnosis.ranks, diagnosis.hosts) == ((0,), ("node0",)), ranks.logs


def plan_of(tmp_path: Path, *command: str, **values: Any) -> NodePlan:
    known: dict[str, Any] = {
        "node": 0, "num_nodes": 1, "host": "node0", "ranks_per_node": 1, "exit_wait_seconds": 1,
        "environment": {}, "config": ClusterConfig(step_timeout_seconds=120), **values,
    }  # fmt: skip
    return NodePlan(run_dir=str(tmp_path), attempt=ATTEMPT, command=command, logs=tmp_path, **known)


@pytest.mark.parametrize("count", [1, 2])
def test_signal_while_ranks_are_started_reaches_all(tmp_path: Path, count: int) -> None:
    """It comes before the process of the first or of the second rank exists."""
    plan = plan_of(tmp_path, "sleep", "8", ranks_per_node=2)
    supervisor, started = Supervisor(plan), itertools.count(1)
    popen = supervisor._popen

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        if next(started) == count:
            os.kill(os.getpid(), signal.SIGTERM)
        return popen(*arguments)

    supervisor._popen = start  # type: ignore[method-assign]
    assert supervisor.run() == 75
    assert [rank.code for rank in supervisor._ranks] == [-signal.SIGTERM] * 2


@pytest.fixture
def supervisor_of(tmp_path: Path) -> Iterator[Any]:
    """Supervisors of one rank in a step, which has not progressed for ``age`` seconds."""
    made = []

    def make(nodes: int, age: float) -> Supervisor:
        supervisor = Supervisor(plan_of(tmp_path, "true", num_nodes=nodes))
        made.append(supervisor)
        last = time.monotonic_ns() - int(age * 1e9)
        beat = Beat(100, Section.STEP, 9, last, pid=1, steps_timed=9)
        supervisor._ranks = [RankProcess(0, subprocess.Popen(["sleep", "60"]), beat)]
        supervisor._started = supervisor._resumed = time.monotonic() - 10_000
        return supervisor

    yield make
    for supervisor in made:
        supervisor._kill()
        shutil.rmtree(supervisor._folder)


def test_disk_without_answer_does_not_block_the_supervisor(supervisor_of: Any) -> None:
    supervisor = supervisor_of(nodes=1, age=1)
    answers = threading.Event()
    # As a write on a frozen mount: without an end as far as the test goes.
    supervisor._store.publish = lambda report: answers.wait(20)
    rank = supervisor._ranks[0].process
    threading.Timer(1.0, rank.send_signal, [signal.SIGUSR1]).start()
    begin = time.monotonic()
    # The end of a rank is seen meanwhile.
    assert supervisor._watch() == 1
    assert supervisor._ranks[0].code == -signal.SIGUSR1
    assert time.monotonic() - begin < 10
    assert supervisor._exchange.blocked_seconds() > 0.5
    assert not supervisor._exchange.flush(0.1)
    answers.set()
    assert supervisor._exchange.flush(5)


def test_nothing_is_overdue_while_the_disk_does_not_answer(supervisor_of: Any) -> None:
    supervisor = supervisor_of(nodes=1, age=500)
    assert "no progress in step at step 9" in supervisor._overdue({})
    supervisor._exchange.blocked_seconds = lambda: FROZEN_SECONDS + 1
    supervisor._poll()
    assert supervisor._overdue({}) == ""


@pytest.mark.parametrize("is_full", [True, False])
def test_sigbus_on_a_full_memory_disk_blames_no_node(
    supervisor_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_full: bool
) -> None:
    monkeypatch.setattr(
        "megatron_deberta.cluster.watchdog.supervisor.is_memory_full", lambda: is_full
    )
    supervisor = supervisor_of(nodes=1, age=1)
    supervisor._ranks[0].process.send_signal(signal.SIGBUS)
    supervisor._ranks[0].process.wait()
    supervisor._poll()
    diagnosis = diagnose_deaths(supervisor._own_report().views)
    assert diagnosis is not None
    assert ("/dev/shm is full" in diagnosis.reason) == is_full
    bad_nodes = BadNodes(tmp_path, hours=24)
    for _ in range(2):
        bad_nodes.record_failure(diagnosis)
    assert bool(bad_nodes.current()) != is_full


@pytest.mark.parametrize(
    ("age", "other_age", "other_silence", "is_overdue"),
    [
        (1, 9000, 0, False),  # this node's rank progresses
        (500, 9000, 0, True),
        (500, 9000, 500, False),  # a silent node's rank may be in a save
        (4000, 9000, 500, True),
    ],
)
def test_other_nodes_are_judged_by_news_only(
    supervisor_of: Any, age: float, other_age: float, other_silence: float, is_overdue: bool
) -> None:
    supervisor = supervisor_of(nodes=2, age=age)
    other = RankView(1, 1, "node1", Section.STEP, 9, 99, other_age)
    report = NodeReport(1, "node1", 1, (other,), (120.0,), ((9, 0, 0, 0),))
    supervisor._store._seen[1] = (1, time.monotonic() - other_silence)
    assert bool(supervisor._overdue({1: report})) == is_overdue


def test_first_node_tells_that_the_run_will_be_late(
    ranks_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program = NotifyProgram(tmp_path)
    ranks = ranks_of(nodes=2, steps=10)
    (tmp_path / "run.yaml").write_text("cluster: {notify: [append], deadline: 2020-01-01}\n")
    ranks.run_dir.mkdir()
    JobHistory(ranks.run_dir).start_attempt(ATTEMPT, "node[0-1]")
    (ranks.run_dir / "config.yaml").write_text("train: {steps: 10}\n")
    record = {"step": 1, "kind": "train", "seconds_left": 90.0}
    (ranks.run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert ranks.run() == [0, 0], ranks.logs
    assert [message["event"] for message in program.messages()] == ["deadline"]
