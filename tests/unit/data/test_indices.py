"""Indices that are built ahead are those that the run reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import DataConfig, Phase, RunConfig, TrainConfig
from megatron_deberta.data import build as build_module
from megatron_deberta.data.build import (
    build_index,
    list_indices,
    open_corpora,
    training_rows,
    validation_rows,
)
from megatron_deberta.data.dataset import index_cache
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.train import data as train_data
from tests.support.commands import Command

PHASES = (
    Phase(steps=9, overrides=(("data.sequence_length", 16),)),
    Phase(
        steps=21,
        overrides=(("train.ramp_from", 4), ("train.ramp_increment", 4), ("train.ramp_steps", 6)),
    ),
)


@pytest.fixture(autouse=True)
def _keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (index_cache, build_module):
        monkeypatch.setattr(module, "WORTH_KEEPING", 10)


@pytest.fixture
def config(
    write_shard: Any, random_documents: Any, write_sentences: Any, tmp_path: Path
) -> Callable[..., RunConfig]:
    def build(kind: str) -> RunConfig:
        train: tuple[str, ...] = (write_shard(random_documents(60)),)
        packing = {"best_fit": "best_fit", "pairs": "segment_pair"}.get(kind, "full_sentences")
        if kind == "pairs":
            train = (write_sentences(40),)
        elif kind == "blend":
            train = ("0.3", train[0], "0.7", write_shard(random_documents(50, 1), name="other"))
        data = DataConfig(
            train=train, validation_fraction=0.2, sequence_length=32, packing=packing,
            index_cache=str(tmp_path / "index"), num_workers=0,
        )  # fmt: skip
        phases = PHASES if kind == "phases" else ()
        return RunConfig(
            data=replace(data, short_sequence_length=16, short_steps=5 * (kind == "short")),
            train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=30, phases=phases),
        )

    return build


def folders(config: RunConfig) -> set[str]:
    return {path.name for path in Path(config.data.index_cache).iterdir()}


def read_whole_run(config: RunConfig, vocabulary: Vocabulary) -> None:
    for part in segments(config):
        corpora = open_corpora(part.config, vocabulary, hashes=False)
        held_out = validation_rows(part.config, vocabulary, corpora)
        assert held_out is not None
        held_out.rows(np.arange(3))
        end = part.first_sample + part.steps * part.config.train.global_batch_size
        rows = training_rows(part.config, vocabulary, corpora, part.stage)
        for sample in range(part.first_sample, end):
            rows.rows(np.array([sample]))


@pytest.mark.parametrize("kind", ["plain", "best_fit", "pairs", "blend", "short", "phases"])
def test_the_run_builds_nothing_itself(
    kind: str,
    config: Callable[[str], RunConfig],
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config(kind)
    count = len(list_indices(run, vocabulary))
    assert count > 3
    for number in reversed(range(count)):
        assert build_index(run, vocabulary, number) == number
    built = folders(run)
    opened: set[str] = set()
    read = index_cache._read

    def record(folder: Path, digest: str) -> index_cache.Arrays:
        opened.add(folder.name)
        return read(folder, digest)

    def refuse(*_: object) -> None:
        raise AssertionError("the run builds an index")

    monkeypatch.setattr(index_cache, "_read", record)
    monkeypatch.setattr(index_cache, "_build_or_wait", refuse)
    read_whole_run(run, vocabulary)
    assert opened <= built
    # Of a blend, an epoch that begins within a sample of the end may be built in vain.
    assert len(built - opened) <= 4 * (kind == "blend")


def test_command_builds_them_on_any_number_of_workers(
    config: Callable[[str], RunConfig],
    vocabulary: Vocabulary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_data, "open_vocabulary", lambda _: ("", None, vocabulary))
    run = config("plain")
    content: list[dict[str, bytes]] = []
    for workers in ("0", "2"):
        cache = tmp_path / f"index{workers}"
        call = [
            "index", "--workers", workers, f"data.train=[{run.data.train[0]}]", "train.steps=30",
            "data.validation_fraction=0.2", "data.sequence_length=32", "model.vocab_size=600",
            "train.global_batch_size=12", "train.micro_batch_size=2", f"data.index_cache={cache}",
            "optimizer.warmup_steps=0",
        ]  # fmt: skip
        path = tmp_path / "run.yaml"
        path.write_text("{}")
        call.insert(1, str(path))
        estimated = cli(*call, "--estimate")
        assert "disk  at most 0.0 GB" in estimated
        count = max(int(workers), 1)
        assert re.search(rf"memory  0\.[1-9] GB for {count} workers", estimated)
        for _ in range(2):
            assert main(call) == 0
            shown = capsys.readouterr()
            assert "indices; the run opens them" in shown.out
            assert shown.err.startswith("index: build")
        files = (path for path in sorted(cache.rglob("*")) if path.is_file())
        content.append({str(path.relative_to(cache)): path.read_bytes() for path in files})
    assert content[0] == content[1]
    assert len(content[0]) > 10

    monkeypatch.setattr(build_module, "WORTH_KEEPING", 1 << 20)
    assert "nothing to build" in cli(*call)
