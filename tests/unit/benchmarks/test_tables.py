"""The tables of README and docs equal the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.lib.campaigns import canonical_code
from benchmarks.tables import pages as tables


@pytest.mark.slow
def test_pages_equal_the_results() -> None:
    # Digests differ where an earlier test lets torch flush denormal numbers, such as the one in
    # `hostile_files.py`, to zero.
    torch.set_flush_denormal(False)
    canonical_code.cache_clear()
    assert not tables.stale_pages(), "run: python -m benchmarks.tables --write"


def test_pictures_show_the_results() -> None:
    assert not tables.stale_figures(), "run: python -m benchmarks.tables --write"


def test_new_result_changes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tables.load("cpu", "step")
    assert record is not None
    (results := tmp_path / "benchmarks/results/cpu").mkdir(parents=True)
    (results / "step.json").write_text(json.dumps(record))
    picture = tmp_path / "docs/images/step.png"
    picture.parent.mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    assert list(tables.stale_figures()) == [picture]
    picture.write_bytes(tables.stale_figures()[picture])
    assert not tables.stale_figures()
    record["results"][0]["sides"]["ours"]["tokens_per_second"] += 1
    (results / "step.json").write_text(json.dumps(record))
    assert list(tables.stale_figures()) == [picture]


@pytest.mark.parametrize("name", tables.TABLES)
def test_table_without_a_result(name: str) -> None:
    assert tables.TABLES[name]("nowhere") == tables.NOTHING


def test_new_result_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results" / "cpu"
    folder.mkdir(parents=True)
    side = {"seconds": 2.0, "tokens_per_second": 1024.0, "peak_bytes": 2**30}
    row = {
        "name": "tiny", "length": 64, "target": 1.5, "speedup": {"huggingface": 3.0},
        "sides": {"ours": side, "huggingface": {**side, "seconds": 6.0}},
        "hardware": "abacus", "cores": 1, "torch": "2+cpu",
    }  # fmt: skip
    record = {"tokens": 2048, "threads": 2, "results": [row]}
    (folder / "step.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    page = tables.rewrite("before\n<!-- table: step-summary cpu -->\nold\n<!-- end of table -->\n")

    assert "| tiny, N=64 | 3.0x | 1.0 / 1.0 |" in page
    assert "abacus" in page
    assert "old" not in page
    assert page == tables.rewrite(page)
