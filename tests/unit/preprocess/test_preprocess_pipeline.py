"""Shards hold the documents in order, for any number of workers, or do not exist."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.console import Console

from megatron_deberta.cli.main import main
from megatron_deberta.data.indexed_writer import IndexedWriter
from megatron_deberta.data.manifest import Manifest, read_manifest, verify_hashes
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.preprocess import progress as progress_module
from megatron_deberta.preprocess.cutting import Block, RecordReader
from megatron_deberta.preprocess.pipeline import preprocess
from megatron_deberta.preprocess.progress import ProgressDisplay
from megatron_deberta.preprocess.sources import Source, find_sources
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.machine_text import documents

BLOCK_BYTES = 4000


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}


def blocks_of(sources: list[Source]) -> Iterator[tuple[Source, Block]]:
    for source in sources:
        for block in RecordReader(source, block_bytes=BLOCK_BYTES).blocks(0):
            yield source, block


def build(corpus: str, tokenizer_dir: str, output: Path, workers: int = 0) -> list[Manifest]:
    sources = find_sources([corpus])
    blocks = blocks_of(sources)
    return preprocess(sources, blocks, tokenizer_dir, str(output / "c"), workers=workers)


def test_megatron_core_reads_every_document(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    (manifest,) = build(corpus, tokenizer_dir, tmp_path / "out")
    tokenizer = load_tokenizer(tokenizer_dir)
    dataset = IndexedDataset(str(tmp_path / "out" / "c_text_document"))
    expected = [tokenizer.encode(text) for text in documents()[:60]]
    assert len(dataset) == len(expected) == manifest.num_documents
    assert dataset.document_indices.tolist() == list(range(61))
    for index, ids in enumerate(expected):
        assert dataset[index].dtype == np.uint16
        assert dataset[index].tolist() == ids
    assert manifest.num_tokens == sum(map(len, expected))


def test_manifest_says_what_made_the_shard(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    (manifest,) = build(corpus, tokenizer_dir, tmp_path / "out")
    prefix = str(tmp_path / "out" / "c_text_document")
    assert read_manifest(prefix) == manifest
    verify_hashes(prefix, manifest)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert manifest.tokenizer_fingerprint == tokenizer.fingerprint
    assert manifest.tokenizer_path == tokenizer_dir
    assert manifest.vocab_size == tokenizer.vocab_size == 600
    assert manifest.sources == (corpus,)


def test_workers_change_nothing(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    for workers in (0, 1, 3):
        build(corpus, tokenizer_dir, tmp_path / str(workers), workers)
    here = shards(tmp_path / "0")
    assert sorted(here) == [f"c_text_document.{end}" for end in ("bin", "idx", "manifest.json")]
    assert shards(tmp_path / "1") == here == shards(tmp_path / "3")


def test_large_vocabulary_is_stored_as_int32(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    load_tokenizer(tokenizer_dir).save(str(tmp_path / "large"))
    config = tmp_path / "large" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_vocab_size": 128_100}))
    (manifest,) = build(corpus, str(tmp_path / "large"), tmp_path / "out")
    assert manifest.dtype == "int32"


def test_blocks_are_read_only_as_fast_as_they_are_used(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_sources([corpus])[0]
    block = source, next(iter(RecordReader(source).blocks(0)))
    read = written = most_ahead = 0

    def endless() -> Iterator[tuple[Source, Block]]:
        nonlocal read
        for _ in range(40):
            read += 1
            yield block

    add_document = IndexedWriter.add_document

    def count(self: IndexedWriter, document: np.ndarray) -> None:  # type: ignore[type-arg]
        nonlocal written, most_ahead
        written += 1
        most_ahead = max(most_ahead, read - written // 60)
        add_document(self, document)

    monkeypatch.setattr(IndexedWriter, "add_document", count)
    preprocess([], endless(), tokenizer_dir, str(tmp_path / "c"), workers=1)
    assert read == 40
    assert most_ahead <= 5


def test_dead_worker_is_an_error_not_a_hang(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    source = find_sources([corpus])[0]
    block = source, next(iter(RecordReader(source).blocks(0)))
    others = set(multiprocessing.active_children())  # ranks of other tests

    def murderous() -> Iterator[tuple[Source, Block]]:
        yield from [block] * 4
        for child in set(multiprocessing.active_children()) - others:
            os.kill(child.pid or 0, signal.SIGKILL)
        yield from [block] * 100

    with pytest.raises(DataError, match="a worker process died"):
        preprocess([], murderous(), tokenizer_dir, str(tmp_path / "out" / "c"), workers=2)
    assert shards(tmp_path / "out") == {}
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_record_leaves_nothing(
    workers: int, corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    with open(corpus, "a") as stream:
        stream.write('{"text": 1}\n{"broken\n')
    with pytest.raises(DataError, match=r"line 61: not a string"):
        build(corpus, tokenizer_dir, tmp_path / "out", workers)
    assert shards(tmp_path / "out") == {}


def test_texts_without_tokens_are_left_out(tokenizer_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "word"}\n{"text": " \\n\\u200b"}\n{"text": "end"}\n')
    (manifest,) = build(str(path), tokenizer_dir, tmp_path / "out")
    assert manifest.num_documents == 2
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text under key 'text'"):
        build(str(path), tokenizer_dir, tmp_path / "none")
    assert shards(tmp_path / "none") == {}


def test_existing_shard_is_kept(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "out")
    before = shards(tmp_path / "out")
    with pytest.raises(ConfigError, match="--force"):
        build(corpus, tokenizer_dir, tmp_path / "out")
    assert shards(tmp_path / "out") == before


def run_cli(*arguments: str, text: bytes = b"", most_bytes: int = -1) -> tuple[int, str, str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    done = subprocess.run(
        [sys.executable, "-m", "megatron_deberta", *arguments],
        input=text,
        capture_output=True,
        preexec_fn=limit if most_bytes >= 0 else None,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_full_disk_is_one_line_and_leaves_nothing(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    arguments = ["--input", corpus, "--tokenizer", tokenizer_dir, "--workers", "0"]
    output = ["--output", str(tmp_path / "out" / "c")]
    code, _, err = run_cli("preprocess", *arguments, *output, most_bytes=20_000)
    assert code == 1
    assert "cannot write shard" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert shards(tmp_path / "out") == {}


def preprocess_two_keys(corpus: str, tokenizer_dir: str, output: Path) -> None:
    sources = find_sources([corpus])
    blocks = blocks_of(sources)
    keys = ("text", "title")
    preprocess(sources, blocks, tokenizer_dir, str(output / "c"), keys=keys, force=True)


def shards_with_an_index(output: Path) -> list[str]:
    """Shards that a reader would open; each must have the manifest of just its bytes."""
    prefixes = [str(path.with_suffix("")) for path in sorted(output.glob("*.idx"))]
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        assert manifest is not None
        verify_hashes(prefix, manifest)
    return prefixes


def test_a_kill_anywhere_leaves_no_shard_without_its_manifest(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    Path(corpus).write_text("".join(Path(corpus).open().readlines()[:5]))
    found = []
    for call in range(1, 50):
        output = tmp_path / str(call)
        preprocess_two_keys(corpus, tokenizer_dir, output)
        child = os.fork()
        if child == 0:
            left = call

            def dying(original: Callable[..., Any]) -> Callable[..., Any]:
                def function(*args: Any) -> Any:
                    nonlocal left
                    left -= 1
                    return original(*args) if left else os._exit(9)

                return function

            for name in ("fsync", "replace"):
                setattr(os, name, dying(getattr(os, name)))
            try:
                preprocess_two_keys(corpus, tokenizer_dir, output)
            finally:
                os._exit(0)
        lived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found.append(len(shards_with_an_index(output)))
        if lived:
            break
    assert lived
    assert found[0] == found[-1] == 2
    assert 0 in found


@pytest.mark.parametrize("file", ["text_document.manifest", "title_document.manifest", "title_"])
@pytest.mark.parametrize("function", ["open", "replace"])
def test_one_failed_key_publishes_none(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    file: str, function: str,
) -> None:  # fmt: skip
    owner: Any = os if function == "replace" else Path
    original = getattr(owner, function)

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if file in Path(path).name:
            raise OSError(28, "No space left on device")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(owner, function, failing)
    with pytest.raises(DataError, match="cannot write shard.*No space"):
        preprocess_two_keys(corpus, tokenizer_dir, tmp_path / "out")
    assert shards(tmp_path / "out") == {}


def test_standard_input_and_two_keys(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "file")
    code, out, err = run_cli(
        "preprocess", "--input", "-", "--input-key", "text", "title", "--workers", "1",
        "--tokenizer", tokenizer_dir, "--output", str(tmp_path / "stdin" / "c"),
        text=Path(corpus).read_bytes(),
    )  # fmt: skip
    assert code == 0, err
    assert "c_title_document: 60 documents" in out
    assert "MB/s" in err
    for end in ("bin", "idx"):
        name = f"c_text_document.{end}"
        assert shards(tmp_path / "stdin")[name] == shards(tmp_path / "file")[name]


def test_commands_train_and_preprocess(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, output = str(tmp_path / "tokenizer"), str(tmp_path / "shard" / "c")
    train = ["train-tokenizer", "--input", corpus, "--output", tokenizer, "--vocab-size"]
    assert main([*train, "100000"]) == 2
    assert "at most" in capsys.readouterr().err
    assert not Path(tokenizer).exists()
    assert main([*train, "400"]) == 0
    assert "model.vocab_size=500" in capsys.readouterr().out
    assert main([*train, "400"]) == 2
    make = ["preprocess", "--input", corpus, "--tokenizer", tokenizer, "--output", output]
    assert main([*make, "--workers", "0"]) == 0
    assert main([*make, "--workers", "0"]) == 2
    assert main([*make, "--workers", "0", "--force"]) == 0
    assert main([*make, "--workers", "-1"]) == 2
    assert main([*make, "--force", "--input-key", "body"]) == 1
    assert "missing key" in capsys.readouterr().err
    assert main([*make, "--force", "--input-key", "a/b"]) == 2


def test_progress_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_LINES", 0.0)
    shown = io.StringIO()
    with ProgressDisplay(1000, Console(file=shown)) as display:
        display.advance(file_bytes=250, text_bytes=1_000_000, tokens=10, documents=1)
    first, last = shown.getvalue().splitlines()
    assert first.startswith("preprocess: 25%, ETA ")
    assert first.endswith("tokens/s")
    assert last.startswith("preprocess: 1 documents, 10 tokens from 1.0 MB of text in ")


def test_progress_bar_on_a_terminal() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with ProgressDisplay(1000, console) as display:
        display.advance(file_bytes=500, text_bytes=1_000_000, tokens=10, documents=1)
    assert "50%" in shown.getvalue()
    assert "MB/s" in shown.getvalue()
