"""Resume runs on another parallel layout, on real ranks.

Each case trains ten steps on real text with dropout, resumes on the other layout, and checks that

- the engine state after loading is bit-identical to the checkpoint, including moments;
- the next twenty losses are within 1e-5 of those of a single-process run;
- every step uses the samples of the uninterrupted run, in the same order.

Each case appends one JSON line to the output; cases that are there are skipped. Lines about other
code do not count.

  python -m tests.faults.layout_moves
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import provenance
from benchmarks.tables.faults import LAYOUT_MOVES_CODE
from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main as command
from megatron_deberta.config import load_config
from megatron_deberta.data.sample_log import read_sample_log
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import init_process_groups, shutdown
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.train.setup import build_rank_model
from tests.support.checkpoints import save_state
from tests.support.jobs import free_port, losses, prepare, rank_variables
from tests.support.ranks import RankPool
from tests.support.tolerances import LAYOUT_LOSS

OUTPUT = RESULTS / "layout_moves.jsonl"
BREAK, END = 10, 30


@dataclass(frozen=True, slots=True)
class Layout:
    """A parallel layout."""

    world_size: int
    tp_size: int
    zero_stage: int

    @property
    def name(self) -> str:
        """Return a readable name."""
        dp_size = self.world_size // self.tp_size
        return f"TP {self.tp_size} x DP {dp_size} ZeRO-{self.zero_stage}"

    def overrides(self) -> list[str]:
        """Return the overrides of this layout."""
        sequence = str(self.tp_size > 1).lower()
        return [
            f"parallel.tensor_parallel_size={self.tp_size}",
            f"parallel.sequence_parallel={sequence}",
            f"parallel.zero_stage={self.zero_stage}",
        ]


MOVES = [
    (Layout(1, 1, 0), Layout(4, 2, 1)),
    (Layout(4, 2, 1), Layout(1, 1, 0)),
    (Layout(2, 1, 1), Layout(4, 1, 2)),
    (Layout(4, 1, 2), Layout(2, 2, 1)),
    (Layout(2, 2, 0), Layout(4, 2, 2)),
    (Layout(4, 2, 2), Layout(2, 1, 0)),
    (Layout(1, 1, 1), Layout(2, 1, 2)),
    (Layout(2, 1, 2), Layout(1, 1, 1)),
    (Layout(4, 1, 0), Layout(4, 2, 1)),
    (Layout(4, 2, 0), Layout(4, 1, 1)),
    (Layout(2, 2, 2), Layout(2, 1, 1)),
    (Layout(2, 2, 1), Layout(4, 1, 0)),
    # ZeRO-3, and tensor parallelism over four ranks.
    (Layout(4, 2, 1), Layout(2, 1, 3)),
    (Layout(2, 1, 3), Layout(4, 4, 2)),
]


def join(rank: int, world_size: int, port: int) -> None:
    """Set this process's rank like a launcher."""
    os.environ.update(rank_variables(rank, world_size, port))
    # ZeRO-3 would not partition tensors of this size otherwise.
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0


def pretrain(rank: int, world_size: int, port: int, arguments: list[str]) -> int:
    """Run ``pretrain`` as one rank."""
    join(rank, world_size, port)
    return command(["pretrain", *arguments])


def load_and_save(
    rank: int, world_size: int, port: int, run: str, source: str, target: str, overrides: list[str]
) -> None:
    """Load a checkpoint into an engine and save the engine's state."""
    join(rank, world_size, port)
    config = load_config(run, overrides)
    try:
        groups = init_process_groups(
            config.parallel.tensor_parallel_size, torch.device("cpu"), 5, read_environment()
        )
        model = build_rank_model(config, groups)
        engine = build_engine(config, model.module, model.specs, groups)
        reader = store.choose_intact(source, groups)
        assert reader is not None
        store.load(reader, engine, model.specs)
        save_state(target, engine, model.specs, groups, reader.metadata)
        engine.destroy()
    finally:
        shutdown()


class Campaign:
    """Rank processes, corpus and reference run; a context manager.

    Args:
        folder: working folder.
        end: the last step.
    """

    def __init__(self, folder: Path, end: int = END) -> None:
        self._folder = folder
        self._end = end
        self._run = str(prepare(folder))
        sizes = sorted({layout.world_size for move in MOVES for layout in move})
        self._pools = {size: RankPool(size, start_distributed=False) for size in sizes}
        single = Layout(1, 1, 0)
        self._reference = self._train(single, "reference", end, "parallel.engine=plain")

    def __enter__(self) -> Campaign:
        """Return the campaign."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        for pool in self._pools.values():
            pool.close()

    def run_case(self, number: int) -> dict[str, Any]:
        """Resume on another layout; return the case's result."""
        start = time.monotonic()
        source, target = MOVES[number]
        run_dir = self._train(source, f"from{number}", BREAK)
        moved, copy = self._folder / f"moved{number}", f"run{number}"
        shutil.copytree(run_dir, self._folder / copy)
        self._call(target, load_and_save, self._run, str(run_dir), str(moved), target.overrides())
        actual, saved = (CheckpointReader(step_dir(folder, BREAK)) for folder in (moved, run_dir))
        pairs = [(name, kind) for name in saved.shapes for kind in saved.kinds]
        differing = [
            f"{kind} of {name}"
            for name, kind in pairs
            if not actual.tensor(name, kind).equal(saved.tensor(name, kind))
        ]
        resumed = self._train(target, copy, self._end)
        loss_pairs = zip(losses(resumed), losses(self._reference), strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in loss_pairs)
        sample_logs = [read_sample_log(run / "ledger") for run in (resumed, self._reference)]
        same_order = sample_logs[0] == sample_logs[1]
        same_scalars = actual.metadata.scalars == saved.metadata.scalars
        return {
            "case": number,
            "from": source.name,
            "to": target.name,
            "tensors": len(pairs),
            "differing": differing,
            "same_scalars": same_scalars,
            "loss_error": worst,
            "same_order": same_order,
            "seconds": round(time.monotonic() - start, 1),
            "ok": not differing and same_scalars and worst <= LAYOUT_LOSS and same_order,
        }

    def _train(self, layout: Layout, run_dir: str, exit_step: int, *overrides: str) -> Path:
        """Train on a layout up to a step."""
        arguments = [
            self._run, f"train.run_dir={self._folder / run_dir}", *layout.overrides(),
            f"train.exit_step={exit_step}", "train.eval_every=null", "data.num_workers=0",
            "checkpoint.save_every=null", "log.level=warning", *overrides,
        ]  # fmt: skip
        codes = self._call(layout, pretrain, arguments)
        assert codes == [0] * layout.world_size, f"{layout.name}: exit codes {codes}"
        return self._folder / run_dir

    def _call(self, layout: Layout, function: Any, *arguments: Any) -> Any:
        pool = self._pools[layout.world_size]
        return pool.run(function, layout.world_size, free_port(), *arguments, timeout=300)


def main() -> int:
    """Run the cases that are not in the output."""
    parser = argparse.ArgumentParser(description="Resume runs on other layouts.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output
    code = code_digest(LAYOUT_MOVES_CODE)
    known = [line for line in read_lines(output) if line["code_digest"] == code]
    missing = [number for number in range(len(MOVES)) if number not in {c["case"] for c in known}]
    if missing:
        with tempfile.TemporaryDirectory() as folder, Campaign(Path(folder)) as campaign:
            for number in missing:
                case = campaign.run_case(number) | {"code_digest": code} | provenance()
                known.append(case)
                append_line(output, case)
                print(f"{case['from']} -> {case['to']}: {case['ok']}", flush=True)
    print(f"{sum(case['ok'] for case in known)} of {len(known)} passed")
    return 0 if all(case["ok"] for case in known) else 1


if __name__ == "__main__":
    raise SystemExit(main())
