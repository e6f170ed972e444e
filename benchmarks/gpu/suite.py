"""GPU benchmark suite: resumable parts that check correctness, then measure.

    python -m benchmarks.gpu.suite                          all parts on this machine's GPU
    python -m benchmarks.gpu.suite --part attention step    some of them
    python -m benchmarks.gpu.suite --device cpu --small     all of them, small, on a CPU

parts
    smoke       every kernel, a DeepSpeed step, save, resume and export, in three minutes
    attention   the operator against its peers, forward and backward (benchmarks.attention)
    parity      gradients and steps against the CPU in float32
    train       a small model: pretrain, kill, resume, export, fill masks
    step        the 1.5B model's training step with DeepSpeed ZeRO-1; checkpoint, export
    peers       training steps of transformers' DeBERTa, ModernBERT, RoBERTa, BERT
    learn       DeBERTa's ablations (benchmarks.learn.ablations)

Each part is a process that starts no item after --minutes; all parts end within --total-minutes.
Results are written to PART.json in --out after every item; a second start runs the missing items.
Items that the same source finished on the same hardware, or that crashed, are not repeated, unless
--force is given.

Exit code: 0 if everything ran and passed, 1 if a check failed or an item could not run, 75 if time
ran out: start it again. 2: no GPU, or a package of requirements.txt is missing; nothing is run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from packaging.requirements import Requirement

from benchmarks.gpu.record import Options, Record, note_crash, result_path
from benchmarks.lib.provenance import ROOT, program_environment, version
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USAGE

# By value: what broke, the step's speed, and so on.
PARTS = ("smoke", "step", "attention", "peers", "parity", "train", "learn")
# Time that the last item of a part may take after the part's time.
GRACE_MINUTES = 2.0
# A part that would have less is not started.
LEAST_MINUTES = 1.0
# Of the smoke part on a GPU, three minutes in all.
SMOKE_MINUTES, SMOKE_GRACE_MINUTES = 2.0, 1.0
MAX_CRASHES = 5  # per part


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "runs/gpu_suite")),
        help="folder of the results (default: the variable OUT, or runs/gpu_suite)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "megatron_deberta_suite",
        help="folder of shards, runs and exports; 50 GB for the step part",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes that test the script")
    parser.add_argument("--minutes", type=float, default=6.0, help="per part (default 6)")
    parser.add_argument(
        "--total-minutes",
        type=float,
        default=28.0,
        help="of all parts together; those after it are left for the next start (default 28)",
    )
    parser.add_argument("--force", action="store_true", help="repeat finished items")
    parser.add_argument(
        "--corpus",
        nargs=2,
        metavar=("PREFIX", "TOKENIZER"),
        help="shards and tokenizer for the learn part (default: from text of this machine)",
    )
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def options_of(args: argparse.Namespace, part: str) -> Options:
    """Return the options of a part."""
    return Options(
        part=part,
        out=args.out.resolve(),
        work=args.work.resolve(),
        device=args.device,
        small=args.small,
        minutes=minutes_of(args, part),
        force=args.force,
        corpus=None if args.corpus is None else tuple(args.corpus),
    )


def minutes_of(args: argparse.Namespace, part: str) -> float:
    """Return the minutes after which a part starts no item."""
    minutes: float = args.minutes
    return min(minutes, SMOKE_MINUTES) if part == "smoke" and args.device == "cuda" else minutes


def grace_of(options: Options) -> float:
    """Return the minutes after which a part is killed once its own have passed."""
    is_smoke = options.part == "smoke" and options.device == "cuda"
    return SMOKE_GRACE_MINUTES if is_smoke else GRACE_MINUTES


def run_parts(args: argparse.Namespace) -> dict[str, str | None]:
    """Run the parts in order within the time of all; return the error of each one that began."""
    end = time.monotonic() + 60 * args.total_minutes
    errors: dict[str, str | None] = {}
    for part in args.part:
        options = options_of(args, part)
        minutes = (end - time.monotonic()) / 60 - grace_of(options)
        if minutes >= min(LEAST_MINUTES, options.minutes):
            within = replace(options, minutes=min(options.minutes, minutes))
            errors[part] = run_part(args, within)
    return errors


def part_module(part: str) -> ModuleType:
    """Import a part's module."""
    return importlib.import_module(f"benchmarks.gpu.{part}")


def work_on(options: Options) -> None:
    """Run a part in this process."""
    import torch

    if options.device == "cpu":
        torch.set_num_threads(1)
    record = Record(options)
    part_module(options.part).run(record)
    record.finish()


def run_part(args: argparse.Namespace, options: Options) -> str | None:
    """Run a part's process, restarting it after crashes; return None or the error."""
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--worker", options.part]
    command += ["--out", str(options.out), "--work", str(options.work), "--device", options.device]
    command += ["--small"] * options.small
    command += [] if options.corpus is None else ["--corpus", *options.corpus]
    grace = grace_of(options)
    return run_restarting(
        command,
        options,
        seconds=60 * (options.minutes + grace),
        grace=60 * grace,
        environment=environment(args, options),
    )


def run_restarting(
    command: list[str],
    options: Options,
    *,
    seconds: float,
    grace: float,
    environment: dict[str, str],
    log: IO[bytes] | None = None,
) -> str | None:
    """Run a process that records its items, restarting it after crashes; kill it at the end.

    Args:
        command: to which ``--minutes``, in which items may start, is added.
        options: of the part that the process works on.
        seconds: after which it is killed.
        grace: the last seconds, in which no item may start.
        environment: of the process.
        log: receives its output; None: this process's.

    Returns:
        None, or the error.
    """
    deadline = time.monotonic() + seconds
    force = ["--force"] * options.force
    for _ in range(MAX_CRASHES):
        minutes = (deadline - time.monotonic() - grace) / 60
        process = subprocess.Popen(
            [*command, "--minutes", str(minutes), *force],
            env=environment,
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            note_crash(options, "took too long", lasting=False)
            return "took too long"
        if code == 0:
            return None
        if not note_crash(options, f"the process ended with {code}"):
            return f"the process ended with {code}"
        force = []  # keeps the items of this start
    return f"the process crashed {MAX_CRASHES} times"


def environment(args: argparse.Namespace, options: Options) -> dict[str, str]:
    """Return the environment of a part's process."""
    added = {
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(options.work / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if options.device == "cpu":
        added |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        added |= {"TRITON_INTERPRET": "1"} if options.part == "smoke" else {}
    return program_environment(**added)


def missing_packages() -> list[str]:
    """Return the packages of requirements.txt that are not installed."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    needed = [one.name for one in wanted if one.marker is None or one.marker.evaluate()]
    return [name for name in needed if version(name) is None]


def problems(content: dict[str, Any]) -> list[str]:
    """Return the failed checks and errors of a part."""
    messages = []
    for name, item in content["items"].items():
        if "error" in item:
            messages.append(f"{name}: {item['error'].splitlines()[0]}")
        messages += [f"{name}: {line}" for line in item.get("wrong", [])]
    return messages


def report(parts: list[str], args: argparse.Namespace, errors: dict[str, str | None]) -> int:
    """Print tables, then one line per part; return the exit code."""
    summary, code = [], EXIT_DONE
    for part in parts:
        path = result_path(options_of(args, part))
        content: dict[str, Any] = {"items": {}, "left": []}
        if path.exists():
            content = json.loads(path.read_text())
            print(f"\n{part} on {content['hardware']}")
            print("\n".join(part_module(part).table(content["items"])))
        wrong = problems(content) + [error for error in (errors.get(part),) if error]
        state = f"{len(content['items'])} done"
        if part not in errors:
            state += ", not run for lack of time: start again"
            code = code or EXIT_REQUEUE
        if content["left"]:
            state += f", {len(content['left'])} not started for lack of time: start again"
            code = code or EXIT_REQUEUE
        if wrong:
            code = 1
            state += "\n    ".join([", WRONG:", *wrong])
        summary.append(f"  {part:10} {state}")
    print("\n".join(["\nsummary", *summary]), flush=True)
    return code


def refuse(message: str) -> int:
    """Print an error message; return the exit code."""
    print(f"gpu_suite: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def main() -> int:
    """Run the parts in order."""
    args = parse_arguments()
    if args.worker:
        work_on(options_of(args, args.worker))
        return EXIT_DONE
    if missing := missing_packages():
        return refuse(
            f"not installed: {', '.join(missing)}; install requirements.txt, or on a machine "
            "without network the wheels of launch/wheelhouse.sh (docs/without-network.md)"
        )
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return refuse("no GPU found; test the script with --device cpu --small")
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    return report(args.part, args, run_parts(args))


if __name__ == "__main__":
    sys.exit(main())
