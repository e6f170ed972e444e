"""Run all fault campaigns, resumably: results about the present code are not repeated.

  python -m tests.faults                   everything; takes hours
  python -m tests.faults --seconds 3600    as much as fits
  python -m tests.faults chaos hangs       some of the campaigns

Keep the machine idle and the code unchanged meanwhile. Tables are then written with
``python -m benchmarks.tables --write``.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time

from benchmarks.lib.provenance import ROOT

CAMPAIGNS = {
    "text_kills": "--cases 100",
    "search_kills": "",
    "finetune_faults": "",
    "convert_kills": "",
    "thread_calls": "",
    "lost_nodes": "",
    "chaos": "",
    "hangs": "--cases 70 --deaths 10 --clean 10 --slow 6",
    "slurm_campaign": "node-kill=10 chain=1 cut-off=1 double-launch=50",
    "layout_moves": "",
    "frozen_disks": "--cases 30",
    "hostile_files": "",
    "mutants": "",
    "random_mutants": "",
}
"""Arguments by campaign, in the order in which they run."""
TIMED = (
    "search_kills", "finetune_faults", "convert_kills", "thread_calls", "lost_nodes", "chaos",
    "hangs", "slurm_campaign", "frozen_disks",
)  # fmt: skip
"""Campaigns with ``--seconds``; the others are interrupted and repeat the case in progress."""
GRACE_SECONDS = 60.0


def run(name: str, seconds: float) -> str:
    """Run a campaign for some time; return how it ended."""
    if seconds <= 0:
        return "not started"
    command = [sys.executable, "-m", f"tests.faults.{name}", *CAMPAIGNS[name].split()]
    if name in TIMED and seconds < math.inf:
        command += ["--seconds", str(seconds)]
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            limit = None if name in TIMED or seconds == math.inf else seconds
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return "interrupted; the same command continues"
    if process.returncode:
        return f"failed with exit code {process.returncode}"
    is_over = time.monotonic() - begin >= seconds
    return "stopped; the same command continues" if is_over else "passed"


def main() -> int:
    """Run the campaigns; return 1 if one failed or was not finished."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start nothing after this time"
    )
    args = parser.parse_args()
    for name in args.names:
        if name not in CAMPAIGNS:
            parser.error(f"unknown campaign {name!r}; choose from {', '.join(CAMPAIGNS)}")
    end = time.monotonic() + args.seconds
    ended: dict[str, str] = {}
    for name in args.names or CAMPAIGNS:
        print(f"=== {name}", flush=True)
        ended[name] = run(name, end - time.monotonic())
    for name, state in ended.items():
        print(f"{name}: {state}")
    return int(any(state != "passed" for state in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
