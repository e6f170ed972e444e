"""Write an HTML report of one run, or of several compared.

The page shows losses, learning rate, gradient norm, throughput, MFU, time by part, memory, restarts
and faults on the time axis, validation samples with what the model fills in, BLiMP and fine-tuning
scores, statistics of the data, and differences between configurations. It is one file that needs no
network. Runs are only read, and may be running. Damaged records are left out and named.

Examples:
  megatron-deberta report runs/base
  megatron-deberta report runs/base runs/large --output compared.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_deberta.cli.arguments import add_shared, prepare_output
from megatron_deberta.errors import printable
from megatron_deberta.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder (train.run_dir)")
    add_shared(
        parser, "--output", default="report.html", metavar="FILE.html",
        help="the page; it is replaced",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Write the page, and print damaged records and its name."""
    # Imported here because it imports matplotlib.
    from megatron_deberta.report.page import write_page

    output = Path(args.output)
    prepare_output("--output", args.output)
    page, problems = write_page([Path(run) for run in args.runs])
    write_atomically(output, page.encode())
    for problem in problems:
        print(printable(f"megatron-deberta: warning: {problem}"), file=sys.stderr)
    print(output)
