"""Two jobs started at once in one folder: one trains, the other is refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.support.jobs import TIMEOUT, losses, start


def test_second_start_is_refused_with_the_holders_name(run_yaml: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    short = ("parallel.engine=plain", "train.eval_every=null", "data.num_workers=0")
    # However late the second one starts, the first one still runs.
    endless = ("train.steps=1000000", "optimizer.schedule=constant", "checkpoint.save_every=null")
    first = start(run_yaml, run_dir, 1, *short, *endless)
    second = start(run_yaml, run_dir, 1, *short, *endless)
    began = time.monotonic()
    jobs = {job.ranks[0].pid: job.ranks[0] for job in (first, second)}
    try:
        while all(rank.poll() is None for rank in jobs.values()):
            assert time.monotonic() - began < TIMEOUT
            time.sleep(0.05)
        loser, winner = sorted(jobs.values(), key=lambda rank: rank.poll() is None)
        assert loser.returncode == 2, first.output()
        assert re.search(rf"in use by process {winner.pid} on \S+, since", first.output())
        (run_dir / "stop").touch()
        assert winner.wait(TIMEOUT) == 0, first.output()
    finally:
        for rank in jobs.values():
            rank.kill()
    assert losses(run_dir)
