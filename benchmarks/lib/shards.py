"""Text, vocabulary and shards for a run, made on the spot from what every Python ships."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.provenance import ROOT


@dataclass(frozen=True)
class Shards:
    """What a run is trained on."""

    tokenizer: Path
    prefix: Path

    @property
    def overrides(self) -> list[str]:
        """As arguments of ``megatron-deberta pretrain``."""
        return [f"tokenizer.path={self.tokenizer}", f"data.train=[{self.prefix}]"]

    def step_overrides(self, device: str, rows: int) -> list[str]:
        """Return the settings of a run whose single steps are measured."""
        return [
            *self.overrides,
            f"train.device={device}",
            f"precision.dtype={'fp32' if device == 'cpu' else 'bf16'}",
            f"train.global_batch_size={rows}",
            *("data.validation_fraction=0", "parallel.recompute=none"),
            *("cluster.nodes=0", "cluster.ranks_per_node=0"),
        ]


def prepare_shards(work: Path, megabytes: float, vocabulary: int) -> Shards:
    """Gather text, learn a vocabulary and tokenize; nothing is done twice.

    Args:
        work: folder to keep them in.
        megabytes: of text.
        vocabulary: pieces.

    Raises:
        subprocess.CalledProcessError: a step failed; its output says why.
    """
    folder = work / f"shards_{megabytes:g}mb_{vocabulary}"
    folder.mkdir(parents=True, exist_ok=True)
    text, tokenizer, output = folder / "text.jsonl", folder / "tokenizer", folder / "text"
    shards = Shards(tokenizer, Path(f"{output}_text_document"))
    if not text.exists():
        gather = [sys.executable, str(ROOT / "tools" / "gather_machine_text.py")]
        gather += ["--output", str(text), "--max-mb", str(megabytes)]
        subprocess.run(gather, check=True)
    source = ["--input", str(text)]
    size = ["--vocab-size", str(vocabulary)]
    if not tokenizer.exists():
        _command("train-tokenizer", *source, *size, "--output", str(tokenizer))
    if not Path(f"{shards.prefix}.idx").exists():
        _command("preprocess", *source, "--tokenizer", str(tokenizer), "--output", str(output))
    return shards


def _command(*arguments: str) -> None:
    # Not in this process: preprocess forks, and a process that holds a GPU should not.
    subprocess.run([sys.executable, "-m", "megatron_deberta", *arguments], cwd=ROOT, check=True)
