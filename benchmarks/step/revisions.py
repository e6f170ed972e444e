"""Speed and peak memory of this checkout on a CPU compared with another revision's.

Four cases: an optimizer step of pretraining and the encoder alone (``benchmarks/step/compare.py``),
epochs of fine-tuning (``benchmarks/step/finetune.py``), and fine-tuning of the stock model with
fast attention (``benchmarks/step/accelerate.py``). The two revisions are processes of their own,
with the same batches, and take turns; a ratio is the median over the pairs of turns.

    git worktree add ../before REVISION
    python -m benchmarks.step.revisions --before ../before --data tasks --tokenizer tokenizer \
        --output benchmarks/results/cpu/revisions.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.step.batch import make_batch
from benchmarks.step.compare import cases, sides
from benchmarks.step.finetune import Contender
from benchmarks.step.finetune_sides import CPU, Turns
from benchmarks.step.measure import Contender as Training

STEPS = {"step": ("huggingface", "4 layers, 128K"), "encoder": ("encoder", "4 layers, N=512")}
"""Case of ``benchmarks.step.compare`` by name of the case here."""
CASES = (*STEPS, "finetuning", "fast_attention")


def take_steps(name: str, turns: int) -> None:
    """Take part in a comparison of steps, in this process: two steps per turn."""
    comparison, wanted = STEPS[name]
    case = next(case for case in cases(comparison, CPU) if case.name == wanted)
    torch.manual_seed(1)
    batch = make_batch(case.model, case.tokens, case.length, CPU)
    training = Training(sides(case, CPU)["ours"](), batch)
    clock = Turns()
    for _ in range(turns):
        clock.wait()
        for _ in range(2):
            training.step()
        clock.report()


def start(name: str, root: Path, args: argparse.Namespace) -> Contender:
    """Start the process of a revision.

    Args:
        name: the case.
        root: checkout of the revision.
        args: of this program.
    """
    threads = f"--threads={args.threads}"
    if name in STEPS:
        # This file, because the other revision may lack it; what it imports is the other's.
        program = str(Path(__file__).resolve())
        # Not as a script: this folder has modules with the names of packages.
        run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
        arguments = ["-c", run, program, f"--turns={args.turns}", threads]
        return Contender(arguments, name, root=root)
    common = [f"--data={args.data.resolve()}", f"--tokenizer={args.tokenizer}", threads]
    if name == "finetuning":
        arguments = ["sst2", f"--epochs={args.turns}", "--examples=160", *common]
        return Contender(["-m", "benchmarks.step.finetune", *arguments], "ours", root=root)
    arguments = ["--case=train_spread", f"--turns={args.turns}", *common]
    return Contender(["-m", "benchmarks.step.accelerate", *arguments], "accelerated", root=root)


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Let both revisions take turns; return the case's row of results."""
    revisions = {"now": start(name, ROOT, args), "before": start(name, args.before, args)}
    try:
        for turn in range(args.turns):
            # In alternating order, so that a drift of the machine's speed has no effect.
            for key in sorted(revisions, reverse=bool(turn % 2)):
                revisions[key].turn()
    finally:
        for contender in revisions.values():
            contender.close()
    now, before = (revisions[key].turns[1:] for key in ("now", "before"))

    def ratio(key: str) -> dict[str, float]:
        found = [a[key] / b[key] for a, b in zip(now, before, strict=True)]
        low, middle, high = statistics.quantiles(found, n=4)
        return {"quartile_1": low, "median": middle, "quartile_3": high}

    return {
        "name": name,
        "before": subprocess.check_output(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=args.before, text=True
        ).strip(),
        "threads": args.threads,
        "pairs": len(now),
        "seconds_ratio": ratio("seconds"),
        "cpu_seconds_ratio": ratio("cpu_seconds"),
        "memory_ratio": now[-1]["peak_bytes"] / before[-1]["peak_bytes"],
        "seconds": statistics.median(turn["seconds"] for turn in now),
    }


def main() -> None:
    """Compare the chosen cases, or take part in one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="checkout of the revision to compare with")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--data", type=Path, help="folder of the tasks' folders")
    parser.add_argument("--tokenizer", help="of at most 32,128 tokens")
    parser.add_argument("--turns", type=int, default=16, help="the first is not counted")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--output", type=Path, default=Path("revisions.json"))
    parser.add_argument("--side", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.side:
        take_steps(args.side, args.turns)
        return
    if args.before is None or args.data is None or args.tokenizer is None:
        parser.error("give --before, --data and --tokenizer")
    args.before = args.before.resolve()
    kept = {row["name"]: row for row in read_json(args.output, {"results": []})["results"]}
    for name in args.case or CASES:
        kept[name] = compare(name, args) | provenance()
        write_json(args.output, {"results": [kept[key] for key in CASES if key in kept]})
        ratios = kept[name]["seconds_ratio"], kept[name]["cpu_seconds_ratio"]
        print(name, *(f"{ratio['median']:.3f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    sys.exit(main())
