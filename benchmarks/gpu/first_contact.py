"""First contact with a GPU: correctness, speed of attention, and whole steps.

    launch/gpu_first_contact.sh                          on a machine with a GPU
    launch/gpu_first_contact.sh --device cpu --small     a rehearsal on a CPU

Every stage is a process with a time limit of its own; a stage that fails or takes too long does
not stop the next one. A start ends after nine minutes; the next one goes on where it ended. Results
are written to --out after every stage:

    stages.jsonl      one line per stage: state, seconds, items, what was wrong
    summary.txt       the stages, and the goals with what was measured
    logs.tar.xz       output of the stages
    trace.json.gz     torch's profile of one 1.5B step
    triton.tar.xz     the compiled kernels, which a later start on a new machine can use

A second start repeats only stages that failed, that were not started, or whose code changed since:
it reads --previous, or the last results in --work. If the kernels' results are wrong, they are
compiled again with another ptxas, then with one pipeline stage; if they stay wrong, the stages
after that run without them, with the backend `chunked`.

Exit code: 0 if all stages passed, 1 if one failed, 75 if time ran out, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Item, Options, Record, result_path
from benchmarks.gpu.suite import missing_packages, refuse, run_restarting
from benchmarks.lib.measuring import read_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from benchmarks.lib.shards import prepare_shards
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.files import write_atomically

TOTAL_SECONDS = 540.0
CARRIED = Path(os.environ.get("CARRIED", ROOT / ".first_contact"))
"""Folder that ``launch/gpu_carry.sh`` makes."""
ONE_STAGE = "FIRST_CONTACT_ONE_STAGE"
"""Environment variable: ``1`` runs all attention kernels with one pipeline stage."""
MAX_FILE_BYTES = 16 * 2**20
LEAST_SECONDS = 8.0
"""A stage that would have less is not started."""
PACK_SECONDS = 10.0

_OPERATOR = (
    "megatron_deberta/ops",
    "benchmarks/attention",
    "benchmarks/gpu/kernel_checks.py",
    "benchmarks/gpu/operator_stages.py",
)
_TRAINING = ("megatron_deberta", "benchmarks/gpu", "benchmarks/step", "configs")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: of the function in ``module``.
        seconds: time limit on a GPU.
        covers: files and folders whose change makes the stage run again.
        module: with the stage's function.
        reads_shards: the stage needs the shards that are prepared beside the first stages.
        interpreted: on a CPU, the stage runs kernels in Triton's interpreter.
    """

    name: str
    seconds: float
    covers: tuple[str, ...]
    module: str = "operator_stages"
    reads_shards: bool = False
    interpreted: bool = False


# Without what a stage does not need, so that a package that is missing fails only these stages.
_STEPS = "step_stages"
STAGES = (
    Stage("machine", 35, ("benchmarks/gpu/operator_stages.py",)),
    Stage("numerics", 75, _OPERATOR, interpreted=True),
    Stage("attention", 75, _OPERATOR),
    Stage("launch_settings", 40, _OPERATOR, interpreted=True),
    Stage("layers", 70, _TRAINING, _STEPS, reads_shards=True),
    Stage("step", 150, _TRAINING, _STEPS, reads_shards=True),
    Stage("models", 110, _TRAINING, _STEPS),
    Stage("resume", 120, _TRAINING, _STEPS, reads_shards=True),
    Stage("extras", 100, _TRAINING, _STEPS),
)
# What is tried when the kernels' results are wrong, with the environment of each.
FALLBACKS = ("another ptxas", "one pipeline stage")
WITHOUT_KERNELS = {"MEGATRON_DEBERTA_ATTENTION": "chunked"}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "runs/first_contact")),
        help="folder of the results (default: the variable OUT, or runs/first_contact)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "megatron_deberta_first_contact",
        help="folder of shards, runs and logs (default: in the temporary folder)",
    )
    parser.add_argument(
        "--previous",
        type=Path,
        default=CARRIED / "stages.jsonl",
        help="stages.jsonl of an earlier start (default: %(default)s, if it exists)",
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", choices=[s.name for s in STAGES],
                        help="run these stages, also if they passed before")  # fmt: skip
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes that test the script")
    parser.add_argument("--total-seconds", type=float, default=TOTAL_SECONDS, metavar="S")
    parser.add_argument(
        "--limit-factor",
        type=float,
        metavar="F",
        help="multiplies the time limits of the stages (default: 1, with --small 10)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


class FirstContact:
    """The stages of one start.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out.resolve()
        self.work: Path = args.work.resolve()
        self.start = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.provenance = provenance(args.device)
        # Variables that fallbacks set for the stages after them.
        self.added: dict[str, str] = {}
        for folder in (self.out, self.work / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.earlier = {
            line["stage"]: line
            for path in (self.work / "stages.jsonl", args.previous)
            for line in read_stages(path)
        }
        self._unpack_cache()

    @property
    def seconds_left(self) -> float:
        """Return the time left for stages."""
        total: float = self.args.total_seconds
        return total - PACK_SECONDS - (time.monotonic() - self.start)

    def run(self) -> int:
        """Run the stages; return the exit code."""
        shards = self._prepare_shards()
        for stage in STAGES:
            if self.args.only is not None and stage.name not in self.args.only:
                continue
            if self._keep(stage):
                continue
            if stage.reads_shards:
                shards.wait()
            line = self._run_stage(stage)
            if stage.name == "numerics" and attention_is_wrong(line):
                self._fall_back(stage)
        shards.kill()
        self._pack()
        print(summary(self.lines), flush=True)
        states = {line["state"] for line in self.lines}
        if states & {"failed", "too long"}:
            return 1
        return EXIT_REQUEUE if "not started" in states else EXIT_DONE

    def _prepare_shards(self) -> subprocess.Popen[bytes]:
        """Start to make text, tokenizer and shards beside the first stages."""
        command = [sys.executable, "-m", "benchmarks.gpu.first_contact", "--worker", "shards"]
        command += ["--work", str(self.work)] + ["--small"] * self.args.small
        with (self.work / "logs" / "shards.log").open("wb") as log:
            return subprocess.Popen(
                command, env=program_environment(), stdout=log, stderr=log, cwd=ROOT
            )

    def _keep(self, stage: Stage) -> bool:
        """Take over the line of an earlier start if it passed with the same code and hardware."""
        line = self.earlier.get(stage.name)
        wanted = {"state": "passed", "covered": digest(stage.covers), "small": self.args.small}
        # Without what a fallback changed.
        wanted["variables"] = {}
        wanted["hardware"] = self.provenance["hardware"]
        if self.args.only is not None or line is None or not wanted.items() <= line.items():
            return False
        self._write({**line, "kept": True})
        return True

    def _run_stage(self, stage: Stage, name: str = "", **variables: str) -> dict[str, Any]:
        """Run a stage in a process; write its line.

        Args:
            stage: to run.
            name: of the line, if not the stage's.
            variables: environment variables for this run.
        """
        name = name or stage.name
        factor = self.args.limit_factor or (10.0 if self.args.small else 1.0)
        limit = min(stage.seconds * factor, self.seconds_left)
        options = Options(
            part=stage.name, out=self.work / "items", work=self.work, device=self.args.device,
            small=self.args.small, minutes=limit / 60,
        )  # fmt: skip
        result = result_path(options)
        result.unlink(missing_ok=True)
        start = time.monotonic()
        error: str | None = "not started"
        if limit >= LEAST_SECONDS:
            print(f"{start - self.start:5.0f} s  {name}", flush=True)
            command = [sys.executable, "-m", "benchmarks.gpu.first_contact", "--worker"]
            command += [stage.name, "--work", str(self.work), "--device", self.args.device]
            command += ["--small"] * self.args.small
            with (self.work / "logs" / f"{name.replace(' ', '_')}.log").open("wb") as log:
                error = run_restarting(
                    command, options, seconds=limit, grace=0.0, log=log,
                    environment=self._environment(stage, variables),
                )  # fmt: skip
        content = read_json(result, {"items": {}, "left": []})
        line = {
            "stage": name,
            "state": state_of(content, error),
            "seconds": round(time.monotonic() - start, 1),
            "limit_seconds": round(limit, 1),
            "at_seconds": round(start - self.start, 1),
            "small": self.args.small,
            "variables": {**self.added, **variables},
            "error": error,
            "wrong": problems(content["items"]),
            "left": content["left"],
            **self.provenance,
            "covered": digest(stage.covers),
            "items": content["items"],
        }
        self._write(line)
        return line

    def _environment(self, stage: Stage, variables: dict[str, str]) -> dict[str, str]:
        added = {
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self.added,
            **variables,
        }
        if self.args.device == "cpu":
            added |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            added |= {"TRITON_INTERPRET": "1"} if stage.interpreted else {}
        return program_environment(**added)

    def _fall_back(self, stage: Stage) -> None:
        """Look for a way in which the kernels give right results; else go on without them."""
        ptxas = self._other_ptxas()
        ways = {
            FALLBACKS[0]: {} if ptxas is None else {"TRITON_PTXAS_PATH": str(ptxas)},
            FALLBACKS[1]: {ONE_STAGE: "1"},
        }
        for name, variables in ways.items():
            if variables:
                cache = str(self.work / f"triton_{name.split()[0]}")
                chosen = {**variables, "TRITON_CACHE_DIR": cache}
                line = self._run_stage(stage, f"{stage.name}, {name}", **chosen)
                if not attention_is_wrong(line):
                    self.added = chosen
                    return
        self.added = WITHOUT_KERNELS

    def _other_ptxas(self) -> Path | None:
        """Unpack the carried ptxas; return its path, or None without one."""
        packed, target = CARRIED / "ptxas.xz", self.work / "ptxas"
        if not packed.exists():
            return None
        with lzma.open(packed) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
        target.chmod(0o755)
        return target

    def _unpack_cache(self) -> None:
        packed = CARRIED / "triton.tar.xz"
        if packed.exists() and not (self.work / "triton").exists():
            with tarfile.open(packed) as archive:
                archive.extractall(self.work, filter="data")

    def _write(self, line: dict[str, Any]) -> None:
        """Add the line of a stage to the results."""
        self.lines.append(line)
        text = "".join(json.dumps(one) + "\n" for one in self.lines)
        write_atomically(self.out / "stages.jsonl", text.encode())
        done = {one["stage"]: one for one in (*self.earlier.values(), *self.lines)}
        kept = "".join(json.dumps(one) + "\n" for one in done.values())
        write_atomically(self.work / "stages.jsonl", kept.encode())
        write_atomically(self.out / "summary.txt", (summary(self.lines) + "\n").encode())

    def _pack(self) -> None:
        """Copy logs, trace and compiled kernels to the results, if they fit."""
        for log in self.work.glob("*.log"):  # of the runs that stages start
            shutil.copyfile(log, self.work / "logs" / log.name)
        pack(self.work / "logs", self.out / "logs.tar.xz")
        if (self.work / "triton").exists():
            pack(self.work / "triton", self.out / "triton.tar.xz")
        trace = self.work / "trace.json.gz"
        if trace.exists() and trace.stat().st_size <= MAX_FILE_BYTES:
            shutil.copyfile(trace, self.out / trace.name)


def pack(folder: Path, target: Path) -> None:
    """Pack a folder; leave the file out if it is larger than a result may be."""
    with tarfile.open(target, "w:xz", preset=1) as archive:
        archive.add(folder, folder.name)
    if target.stat().st_size > MAX_FILE_BYTES:
        target.unlink()


def read_stages(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``stages.jsonl``; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest(covers: Iterable[str]) -> str:
    """Return a digest of files, and of the code and configs in folders."""
    total = hashlib.sha256()
    for place in covers:
        for path in sorted(_files(ROOT / place)):
            total.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for kind in ("*.py", "*.cpp", "*.yaml"):
        yield from place.rglob(kind)


def problems(items: dict[str, Item]) -> list[str]:
    """Return the failed checks and errors of a stage's items."""
    found = [f"{name}: {item['error'].splitlines()[0]}" for name, item in items.items()
             if "error" in item]  # fmt: skip
    return found + [f"{name}: {text}" for name, item in items.items()
                    for text in item.get("wrong", [])]  # fmt: skip


def attention_is_wrong(numerics: dict[str, Any]) -> bool:
    """Return whether an attention kernel gave a wrong result, or the stage failed without results.

    Slow kernels and kernels of other operators do not count.
    """
    wrong = numerics["wrong"]
    ended = numerics["state"] == "failed" and not wrong
    return ended or any(problem.startswith(("compile", "attention")) for problem in wrong)


def state_of(content: dict[str, Any], error: str | None) -> str:
    """Return ``passed``, ``failed``, ``too long`` or ``not started``."""
    if error == "not started":
        return error
    if error == "took too long" or (error is None and content["left"]):
        return "too long"
    return "failed" if error or problems(content["items"]) or not content["items"] else "passed"


def goals(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return goal, measured value and whether it is met, for what was measured."""
    from benchmarks.gpu.attention import targets

    items = {line["stage"]: line["items"] for line in lines}
    found: list[tuple[str, str, str]] = []
    for text in targets({k: v for k, v in items.get("attention", {}).items() if "variants" in v}):
        name, _, rest = text.strip().rpartition(": at ")
        found.append((name.rpartition(" (")[0], f"at {rest.rpartition(')')[0]}",
                      rest.rpartition(" ")[2]))  # fmt: skip
    layers = {n: i["seconds_per_step"] for n, i in items.get("layers", {}).items()
              if "seconds_per_step" in i}  # fmt: skip
    depths = sorted({int(name.split()[0]) for name in layers})
    slopes = {}
    for kind in ("", ", plain attention"):
        ends = [layers.get(f"{depth} layers{kind}") for depth in depths]
        if len(ends) == 2 and None not in ends:
            slopes[kind] = (ends[1] - ends[0]) / (depths[1] - depths[0])
            found.append((f"milliseconds per layer{kind}: {1e3 * slopes[kind]:.2f}", "", ""))
    if len(slopes) == 2:
        cost = slopes[""] / slopes[", plain attention"] - 1
        found.append((f"cost of position terms per layer: {cost:.1%}", "at most 15 %, then 7 %",
                      "met" if cost <= 0.15 else "MISSED"))  # fmt: skip
    for name, item in items.get("step", {}).items():
        if "mfu" in item:
            text = f"step, {name}: {item['tokens_per_second']:,.0f} tokens/s, {item['mfu']:.1%}"
            is_goal = "plain" not in name
            met = "met" if item["mfu"] >= 0.52 else "MISSED"
            found.append((text, "at least 52 %, then 60 %" if is_goal else "",
                          met if is_goal else ""))  # fmt: skip
    for stage, peer, factor in (("models", "modernbert", 1.0), ("extras", "stock", 3.0)):
        for name, item in items.get(stage, {}).items():
            if peer in (sides := item.get("sides", {})):
                ratio = sides[peer]["seconds"] / sides["ours"]["seconds"]
                speed = sides["ours"]["tokens_per_second"]
                text = f"{name}: {speed:,.0f} tokens/s, {ratio:.2f} times {peer}"
                found.append((text, f"at least {factor}", "met" if ratio >= factor else "MISSED"))
    return found


def summary(lines: list[dict[str, Any]]) -> str:
    """Return the stages and the goals as text."""
    text = [f"{lines[0]['hardware']}, revision {lines[0]['revision']}"] if lines else []
    for line in lines:
        state = line["state"] + " (earlier)" * ("kept" in line)
        text.append(f"  {line['stage']:32} {state:18} {line['seconds']:6.1f} of "
                    f"{line['limit_seconds']:.0f} s, {len(line['items'])} items")  # fmt: skip
        text += [f"      {wrong}" for wrong in line["wrong"]]
        if line["state"] == "failed" and line["error"]:
            text.append(f"      {line['error']}")
    try:
        found = goals(lines)
    except Exception as failure:  # such as a package that is missing: the stages go on
        found = [(f"cannot be computed: {type(failure).__name__}: {failure}", "", "")]
    text += ["", "goals", *("  " + "  ".join(filter(None, goal)) for goal in found)]
    return "\n".join(text)


def work_on(args: argparse.Namespace) -> None:
    """Run a stage in this process."""
    if args.worker == "shards":
        prepare_shards(args.work, *((0.6, 500) if args.small else (8.0, 8192)))
        return
    import torch

    from benchmarks.gpu import operator_stages

    stage = next(stage for stage in STAGES if stage.name == args.worker)
    if args.device == "cpu":
        torch.set_num_threads(1)
    operator_stages.apply_environment()
    record = Record(
        Options(part=args.worker, out=args.work / "items", work=args.work, device=args.device,
                small=args.small, minutes=args.minutes)
    )  # fmt: skip
    getattr(importlib.import_module(f"benchmarks.gpu.{stage.module}"), stage.name)(record)
    record.finish()


def main() -> int:
    """Run the stages in order."""
    args = parse_arguments()
    if args.worker:
        work_on(args)
        return EXIT_DONE
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return refuse("no GPU found; test the script with --device cpu --small")
    if missing := missing_packages():
        print(f"first contact: not installed: {', '.join(missing)}; see launch/gpu_carry.sh",
              file=sys.stderr)  # fmt: skip
    return FirstContact(args).run()


if __name__ == "__main__":
    sys.exit(main())
