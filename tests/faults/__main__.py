"""Run all fault campaigns, resumably: results about the present code are not repeated.

  python -m tests.faults                   everything; takes hours
  python -m tests.faults --seconds 3600    as much as fits
  python -m tests.faults chaos hangs       some of the campaigns

Keep the machine idle and the code unchanged meanwhile. Tables are then written with
``python -m benchmarks.tables --write``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.lib.provenance import ROOT

CAMPAIGNS = {
    "text_kills": "--cases 100",
    "lost_nodes": "",
    "chaos": "",
    "hangs": "--cases 70 --deaths 10 --clean 10 --slow 6",
    "slurm_campaign": "node-kill=10 chain=1 cut-off=1 double-launch=50",
    "layout_moves": "",
    "frozen_disks": "--cases 30",
    "hostile_files": "",
    "mutants": "",
}
"""Arguments by campaign, in the order in which they run."""


def main() -> int:
    """Run the campaigns; return 1 if one failed or was not finished."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time")
    args = parser.parse_args()
    for name in args.names:
        if name not in CAMPAIGNS:
            parser.error(f"unknown campaign {name!r}; choose from {', '.join(CAMPAIGNS)}")
    end = None if args.seconds is None else time.monotonic() + args.seconds
    ended: dict[str, str] = {}
    for name in args.names or CAMPAIGNS:
        command = [sys.executable, "-m", f"tests.faults.{name}", *CAMPAIGNS[name].split()]
        print(f"=== {name}", flush=True)
        left = None if end is None else max(0.0, end - time.monotonic())
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=left, check=False).returncode
            ended[name] = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended[name] = "not finished; the same command continues"
    for name, state in ended.items():
        print(f"{name}: {state}")
    return int(any(state != "passed" for state in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
