"""Text, tokenizer and shards for a benchmark run, made from text files on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.provenance import ROOT


@dataclass(frozen=True)
class Shards:
    """Tokenizer and shard prefix of a run."""

    tokenizer: Path
    prefix: Path

    @property
    def overrides(self) -> list[str]:
        """Return the arguments of ``megatron-deberta pretrain``."""
        return [f"tokenizer.path={self.tokenizer}", f"data.train=[{self.prefix}]"]

    def step_overrides(self, device: str, rows: int) -> list[str]:
        """Return the settings of a run whose steps are measured."""
        return [
            *self.overrides,
            f"train.device={device}",
            f"precision.dtype={'fp32' if device == 'cpu' else 'bf16'}",
            f"train.global_batch_size={rows}",
            *("data.validation_fraction=0", "parallel.recompute=none"),
            *("cluster.nodes=null", "cluster.ranks_per_node=null"),
        ]


def prepare_shards(work: Path, megabytes: float, vocabulary: int) -> Shards:
    """Gather text, train a tokenizer and preprocess; existing files are kept.

    Args:
        work: folder of the files.
        megabytes: of text.
        vocabulary: size of the vocabulary.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    folder = work / f"shards_{megabytes:g}mb_{vocabulary}"
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    if not text.exists():
        gather = [sys.executable, str(ROOT / "tools" / "gather_machine_text.py")]
        gather += ["--output", str(text), "--max-mb", str(megabytes)]
        subprocess.run(gather, check=True)
    return shards_of(folder, [text], vocabulary)


def shards_of(folder: Path, texts: Sequence[Path], vocabulary: int) -> Shards:
    """Train a tokenizer on text files and preprocess them; existing files are kept.

    Args:
        folder: of the tokenizer and the shards.
        texts: JSON Lines or plain text, also compressed.
        vocabulary: size of the vocabulary.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    tokenizer, output = folder / "tokenizer", folder / "text"
    shards = Shards(tokenizer, Path(f"{output}_text_document"))
    source = ["--input", *map(str, texts)]
    size = ["--vocab-size", str(vocabulary)]
    if not tokenizer.exists():
        _command("train-tokenizer", *source, *size, "--output", str(tokenizer))
    if not Path(f"{shards.prefix}.idx").exists():
        _command("preprocess", *source, "--tokenizer", str(tokenizer), "--output", str(output))
    return shards


def _command(*arguments: str) -> None:
    # In a new process: preprocess forks, which is unsafe in a process that uses a GPU.
    subprocess.run([sys.executable, "-m", "megatron_deberta", *arguments], cwd=ROOT, check=True)
