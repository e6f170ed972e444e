"""Worker processes share what the first one has loaded."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.data.shards.manifest import read_manifest
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.units import plan_units, usual_unit_bytes
from megatron_deberta.text.preprocess import encoding, worker
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers.sources import find_sources
from tests.support.commands import Command


def test_workers_load_nothing_again(
    corpus: str, gpt2_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def logged(module: object, name: str) -> None:
        original = getattr(module, name)

        def function(*args: object) -> object:
            with log.open("a") as stream:
                stream.write(f"{name} {os.getpid()}\n")
            return original(*args)

        monkeypatch.setattr(module, name, function)

    logged(worker, "load_tokenizer")
    logged(encoding, "fast_bpe_encoder")
    output = str(tmp_path / "out" / "c")
    manifests = preprocess(
        find_sources([corpus]), gpt2_dir, output, run=RunOptions(workers=2), unit_bytes=5_000
    )
    assert manifests[0].num_documents == 60
    me = os.getpid()
    assert log.read_text().splitlines() == [f"load_tokenizer {me}", f"fast_bpe_encoder {me}"]


@pytest.mark.parametrize(
    ("megabytes", "unit", "units"), [(1, 8, 1), (80, 8, 10), (4096, 16, 256), (65536, 64, 1024)]
)
def test_units_by_the_size_of_the_input(megabytes: int, unit: int, units: int, corpus: str) -> None:
    source = replace(find_sources([corpus])[0], size_bytes=megabytes << 20)
    assert usual_unit_bytes([source]) == unit << 20
    assert len(plan_units([source], unit << 20)) == units


def test_estimate_is_of_the_tokens_and_the_nodes(
    make: Command, make_from: Command, corpus: str, tmp_path: Path
) -> None:
    described = make("--workers", "4", "--estimate", "--nodes", "16")
    assert list(tmp_path.iterdir()) == [Path(corpus)]
    assert "with 16 x 4 workers" in described
    for word in ("text ", "time ", "disk ", "memory "):
        assert f"\n{word}" in f"\n{described}"
    make()
    manifest = read_manifest(str(tmp_path / "c_text_document"))
    assert manifest is not None
    (estimated,) = re.findall(r"tokens +([\d,]+)", described)
    assert int(estimated.replace(",", "")) == pytest.approx(manifest.num_tokens, rel=0.01)
    make_from.errors(2, "--input", "-", "--estimate")
