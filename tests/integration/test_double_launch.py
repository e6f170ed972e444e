"""Two jobs started at once in one folder: one trains, the other is refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.support.jobs import losses, start


def test_second_start_is_refused_with_the_holders_name(run_yaml: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    short = ("precision.engine=plain", "train.eval_every=0", "data.num_workers=0")
    first = start(run_yaml, run_dir, 1, *short)
    second = start(run_yaml, run_dir, 1, *short)
    began = time.monotonic()
    jobs = {job.ranks[0].pid: job.ranks[0] for job in (first, second)}
    while all(rank.poll() is None for rank in jobs.values()):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    loser, winner = sorted(jobs.values(), key=lambda rank: rank.poll() is None)
    assert loser.returncode == 2, first.output()
    assert re.search(rf"in use by process {winner.pid} on \S+, since", first.output())
    assert winner.wait(120) == 0, first.output()
    assert len(losses(run_dir)) == 60
