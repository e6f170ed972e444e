"""Shards hold the documents in order, for any number of processes, or do not exist."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from megatron_deberta.cli.main import main
from megatron_deberta.data.shards.manifest import ShardManifest, read_manifest, verify_hashes
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.jobs import executors
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.preprocess import encoding
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers import reading
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.commands import Command
from tests.support.machine_text import documents
from tests.support.megatron import megatron_dataset

UNIT_BYTES = 20_000
SHARD = [f"c_text_document.{end}" for end in ("bin", "idx", "manifest.json")]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}


def build(
    corpus: str, tokenizer_dir: str, output: Path, workers: int = 0, **options: Any
) -> list[ShardManifest]:
    read = ReadOptions(keys=options.pop("keys", ("text",)))
    language = options.pop("language", "")
    run = RunOptions(workers=workers, **options)
    return preprocess(
        find_sources([corpus]),
        tokenizer_dir,
        str(output / "c"),
        read=read,
        run=run,
        language=language,
        unit_bytes=UNIT_BYTES,
    )


@pytest.mark.slow
def test_megatron_core_reads_every_document(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    (manifest,) = build(corpus, tokenizer_dir, tmp_path / "out")
    tokenizer = load_tokenizer(tokenizer_dir)
    dataset = megatron_dataset(str(tmp_path / "out" / "c_text_document"))
    expected = [tokenizer.encode(text) for text in documents()[:60]]
    assert len(dataset) == len(expected) == manifest.num_documents
    assert dataset.document_indices.tolist() == list(range(61))
    for index, ids in enumerate(expected):
        assert dataset[index].dtype == np.uint16
        assert dataset[index].tolist() == ids
    assert manifest.num_tokens == sum(map(len, expected))


def test_sentences_are_megatrons_sequences(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    (manifest,) = build(corpus, tokenizer_dir, tmp_path / "out", language="en")
    tokenizer = load_tokenizer(tokenizer_dir)
    dataset = megatron_dataset(str(tmp_path / "out" / "c_text_sentence"))
    boundaries = dataset.document_indices
    assert len(boundaries) == 61
    for index, text in enumerate(documents()[:60]):
        sentences = [
            ids
            for sentence in encoding.split_sentences(text, "en")
            if (ids := tokenizer.encode(sentence))
        ]
        found = [dataset[i].tolist() for i in range(boundaries[index], boundaries[index + 1])]
        assert found == sentences
    assert manifest.num_sequences == boundaries[-1] > 600


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
    assert (manifest.documents_in, manifest.documents_empty) == (60, 0)


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.txt"])
def test_workers_change_nothing(name: str, corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = Path(corpus).read_bytes()
    if name.endswith(".gz"):
        content = gzip.compress(content[:9000]) + gzip.compress(content[9000:])
    elif name.endswith(".zst"):
        content = zstandard.compress(content)
    elif name.endswith(".txt"):
        content = "\n\n".join(
            re.sub(r"\n\s*", "\n", text.strip()) for text in documents()[:60]
        ).encode()
    path.write_bytes(content)
    for workers in (0, 3):
        build(str(path), tokenizer_dir, tmp_path / str(workers), workers)
    here = shards(tmp_path / "0")
    assert sorted(here) == ["c.quarantine.jsonl", *SHARD]
    assert shards(tmp_path / "3") == here
    assert not list(tmp_path.glob("*/*.unfinished*"))
    assert len(megatron_dataset(str(tmp_path / "0" / "c_text_document"))) == 60


def test_large_vocabulary_is_stored_as_int32(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    load_tokenizer(tokenizer_dir).save(str(tmp_path / "large"))
    config = tmp_path / "large" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_vocab_size": 128_100}))
    (manifest,) = build(corpus, str(tmp_path / "large"), tmp_path / "out")
    assert manifest.dtype == "int32"


DEFECTS = {
    "malformed JSON": b"{broken",
    "not a JSON object": b"[]",
    "missing key": b'{"body": "x"}',
    "not a string": b'{"text": 1}',
    "invalid UTF-8": b'{"text": "\xff"}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "NUL character": b'{"text": "a\\u0000"}',
    "document too long": b'{"text": "' + b"word " * 4000 + b'"}',
    "empty": b'{"text": " \\n"}',
}


def test_the_quarantine_is_exact(tokenizer_dir: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {index} of many"}).encode() for index in range(3000)]
    expected = []
    for index, line in enumerate(DEFECTS.values()):
        for number in range(5):
            lines.insert(37 + 331 * index + 50 * number, line)
    offset = 0
    reasons = {line: reason for reason, line in DEFECTS.items()}
    for number, line in enumerate(lines, 1):
        if line in reasons:
            expected.append((str(tmp_path / "bad.jsonl"), number, offset, reasons[line]))
        offset += len(line) + 1
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    sources = find_sources([str(tmp_path / "bad.jsonl")])
    read = ReadOptions(longest_bytes=20_000)

    def run(allow_bad: float | None, output: str, workers: int) -> ShardManifest:
        return preprocess(
            sources,
            tokenizer_dir,
            str(tmp_path / output / "c"),
            read=read,
            run=RunOptions(allow_bad=allow_bad, workers=workers),
            unit_bytes=UNIT_BYTES,
        )[0]

    with pytest.raises(
        DataError, match=r"40 of 3045 records are bad .*1\.31% where --max-bad-fraction"
    ):
        run(None, "out", 0)
    assert shards(tmp_path / "out") == {}
    manifest = run(0.02, "out", 0)
    assert manifest == run(0.02, "again", 2)
    assert manifest.num_documents == 3000
    assert (manifest.documents_in, manifest.documents_empty) == (3045, 5)
    assert manifest.quarantine == dict.fromkeys(sorted(set(DEFECTS) - {"empty"}), 5)
    found = [
        json.loads(line)
        for line in (tmp_path / "out" / "c.quarantine.jsonl").open(encoding="utf-8")
    ]
    assert [(e["file"], e["line"], e["offset"], e["reason"]) for e in found] == expected
    assert Counter(entry["reason"] for entry in found) == dict.fromkeys(DEFECTS, 5)
    assert shards(tmp_path / "out") == shards(tmp_path / "again")


def test_a_truncated_file_needs_leave(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    for end, content in (
        ("gz", gzip.compress(Path(corpus).read_bytes())),
        ("zst", zstandard.compress(Path(corpus).read_bytes())),
    ):
        path = tmp_path / f"c.jsonl.{end}"
        path.write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(DataError, match=f"1 damaged file.* damaged: {re.escape(str(path))};"):
            build(str(path), tokenizer_dir, tmp_path / end)
        with pytest.raises(DataError, match="nothing was published|truncated or damaged"):
            build(str(path), tokenizer_dir, tmp_path / end)
        (manifest,) = build(str(path), tokenizer_dir, tmp_path / end, allow_bad=0.1)
        assert manifest.quarantine == {"damaged file": 1}
        assert 20 < manifest.num_documents < 60


def test_texts_without_tokens_are_left_out(tokenizer_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "word"}\n{"text": " \\n\\u200b"}\n{"text": "end"}\n')
    (manifest,) = build(str(path), tokenizer_dir, tmp_path / "out")
    assert (manifest.num_documents, manifest.documents_empty) == (2, 2)
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text under key 'text'"):
        build(str(path), tokenizer_dir, tmp_path / "none")
    assert shards(tmp_path / "none") == {}


def test_existing_shard_is_kept(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "out")
    before = shards(tmp_path / "out")
    # The same command finds its own result.
    assert len(build(corpus, tokenizer_dir, tmp_path / "out")) == 1
    with pytest.raises(ConfigError, match="--force"):
        build(corpus, tokenizer_dir, tmp_path / "out", keys=("text", "title"))
    assert shards(tmp_path / "out") == before
    build(corpus, tokenizer_dir, tmp_path / "out", keys=("text", "title"), force=True)
    assert len(shards(tmp_path / "out")) == 7


def run_cli(
    *arguments: str, text: bytes = b"", most_bytes: int = -1, **env: str
) -> tuple[int, str, str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    done = subprocess.run(
        [sys.executable, "-m", "megatron_deberta", *arguments],
        input=text,
        capture_output=True,
        preexec_fn=limit if most_bytes >= 0 else None,
        env={**os.environ, **env},
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_full_disk_is_one_line_and_can_be_gone_on_with(
    corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    arguments = ["--input", corpus, "--tokenizer", tokenizer_dir, "--workers", "1"]
    output = ["--output", str(tmp_path / "out" / "c")]
    code, _, err = run_cli("preprocess", *arguments, *output, most_bytes=20_000)
    assert code == 1
    assert "cannot write shard" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert shards(tmp_path / "out") == {}
    assert run_cli("preprocess", *arguments, *output)[0] == 0


def test_a_dead_worker_is_an_error_not_a_hang(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = executors.wait

    def murderous(futures: set[Any], *args: Any) -> Any:
        for process in multiprocessing.active_children():
            process.kill()
        return wait(futures, *args)

    monkeypatch.setattr(executors, "wait", murderous)
    with pytest.raises(DataError, match="a worker process died"):
        build(corpus, tokenizer_dir, tmp_path / "out", 2)
    assert shards(tmp_path / "out") == {}
    monkeypatch.undo()
    build(corpus, tokenizer_dir, tmp_path / "out", 1)
    build(corpus, tokenizer_dir, tmp_path / "whole")
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def run_until(call: int, work: Callable[[], object]) -> int:
    """Do work in a child that ends at a call that changes the disk; return how many it did."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        done = 0

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                nonlocal done
                done += 1
                return os._exit(9) if done == call else original(*args, **kwargs)

            return function

        for name in ("fsync", "replace", "link", "rename", "unlink", "pwrite", "rmdir", "utime"):
            setattr(os, name, counting(getattr(os, name)))
        try:
            work()
            os.write(sender, str(done).encode())
        finally:
            os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with os.fdopen(receiver) as stream:
        return int(stream.read() or 0)


@pytest.mark.slow
def test_a_kill_anywhere_is_gone_on_from(tokenizer_dir: str, tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    text = documents()[0][:3000]
    corpus.write_text("".join(json.dumps({"text": text, "title": "A title"}) + "\n" for _ in "123"))

    def work(output: Path) -> None:
        build(str(corpus), tokenizer_dir, output, keys=("text", "title"), force=True)

    work(tmp_path / "whole")
    whole = shards(tmp_path / "whole")
    calls = run_until(0, lambda: work(tmp_path / "count"))
    assert calls > 60
    complete = 0
    for call in range(1, calls + 1, 7):
        output = tmp_path / "out" / str(call)
        if call % 3:
            # An older shard is replaced.
            build(str(corpus), tokenizer_dir, output, keys=("title",))
        assert run_until(call, lambda output=output: work(output)) == 0  # type: ignore[misc]
        # Each index that is there belongs to its tokens.
        for path in output.glob("*.idx"):
            prefix = str(path.with_suffix(""))
            manifest = read_manifest(prefix)
            assert manifest is not None
            verify_hashes(prefix, manifest)
            complete += 1
        work(output)
        assert shards(output) == whole, call
        assert [path.name for path in output.iterdir() if path.is_dir()] == []
    assert complete > 3


def test_a_changed_plan_is_refused_by_name(
    make: Command, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(corpus, "a") as stream:
        stream.write("{broken\n")
    assert "1 of 61 records are bad" in make.errors(1)
    for change, message in (
        (["--keys", "title"], '--keys was "text" when this run began and is "title" now'),
        (["--normalize", "nfc"], '--normalize was "none"'),
        (["--max-document-mb", "1"], "--max-document-mb"),
        (["--sentences"], "--sentences was"),
    ):
        assert message in make.errors(2, *change)
    with monkeypatch.context() as newer:
        # Units that another release cut may end elsewhere.
        newer.setattr(reading, "READING_VERSION", reading.READING_VERSION + 1)
        assert "version of reading was" in make.errors(2)
    os.utime(corpus, (1, 1))
    assert f"{corpus} has changed" in make.errors(2, "--max-bad-fraction", "0.1")
    make("--max-bad-fraction", "0.1", "--restart")


def test_nothing_of_the_users_is_removed(
    make: Command, make_from: Command, corpus: str, tmp_path: Path
) -> None:
    mine = tmp_path / "c.unfinished" / "parts" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for restart in ([], ["--restart"]):
        assert "holds notes.txt and no plan.json" in make.errors(2, *restart)
    mine.unlink()
    quarantine = tmp_path / "c.quarantine.jsonl"
    quarantine.write_bytes(Path(corpus).read_bytes())
    message = make_from.errors(2, "--input", str(quarantine))
    assert "is an input and would be replaced" in message
    quarantine.unlink()
    make()


def test_a_broken_result_is_not_taken_for_whole(make: Command, tmp_path: Path) -> None:
    make()
    make()
    os.truncate(tmp_path / "c_text_document.bin", 100)
    assert "exists" in make.errors(2)
    make("--force")
    # Another key would replace the list of what was set aside for the first.
    assert "c.quarantine.jsonl: exists, of other shards" in make.errors(2, "--keys", "title")


def test_a_refused_run_does_not_keep_standard_input(
    make_from: Command, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(corpus).read_bytes()
    for options, code in (([], 0), (["--keys", "title"], 2)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        make_from.errors(code, "--input", "-", *options)
        assert not (tmp_path / "c.unfinished").exists()


def test_options_about_other_input_are_refused(
    make: Command, make_from: Command, tmp_path: Path
) -> None:
    message = make.errors(2, "--text-mode", "line")
    assert "--text-mode line is for plain text" in message
    assert "; leave it out for JSON Lines" in message
    (tmp_path / "a.txt").write_text("A line of text.\n")
    plain = ["--input", str(tmp_path / "a.txt")]
    message = make_from.errors(2, *plain, "--keys", "title")
    assert "--keys title is for JSON Lines and tables" in message
    make(*plain, "--text-mode", "line")


def test_an_empty_input_is_a_mistake_of_the_user(make_from: Command, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    message = make_from.errors(2, "--input", str(tmp_path / "a.jsonl"))
    assert f"{tmp_path / 'a.jsonl'}: the file is empty" in message


def test_options_that_cannot_be(make: Command, corpus: str, tmp_path: Path) -> None:
    for change, message in (
        (["--unit-mb", "nan"], "--unit-mb: nan must be between 1e-06 and 1e+06"),
        (["--unit-mb", "1e308"], "--unit-mb: 1e308 must be between 1e-06 and 1e+06"),
        (["--max-document-mb", "inf"], "--max-document-mb: inf must be at least 1e-06"),
        (["--sentences", "english"], "must be a code as en or de"),
        (["--output", f"{tmp_path}/"], "ends without a name"),
        (["--workers", "-1"], "--workers: -1 must be at least 0"),
        (
            ["--max-bad-fraction", "1", "--keys", "a/b"],
            "--keys 'a/b': cannot be part of a file name",
        ),
    ):
        assert message in make.errors(2, *change)
    assert list(tmp_path.iterdir()) == [Path(corpus)]


def test_inputs_add_up(make: Command, corpus: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "one more"}\n')
    make("--input", str(other))
    manifest = read_manifest(str(tmp_path / "c_text_document"))
    assert manifest is not None
    assert manifest.num_documents == 61
    assert manifest.sources == (corpus, str(other))


def test_empty_variables_of_an_array_are_not_given() -> None:
    array_task, alone = executors.array_task, executors.Share(0, 1)
    empty = dict.fromkeys([f"SLURM_ARRAY_TASK_{n}" for n in ("ID", "MIN", "STEP", "COUNT")], "")
    assert array_task(None, empty) == array_task(None, {}) == alone
    assert array_task(None, {**empty, "SLURM_ARRAY_TASK_ID": "0"}) == alone
    with pytest.raises(ConfigError, match="SLURM_ARRAY_TASK_ID='x' is not a whole number"):
        array_task(None, {"SLURM_ARRAY_TASK_ID": "x"})


def test_array_tasks_share_the_work(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "whole")
    common = [
        sys.executable, "-m", "megatron_deberta", "preprocess", "--input", corpus, "--tokenizer",
        tokenizer_dir, "--workers", "0", "--unit-mb", str(UNIT_BYTES / 1e6),
        "--output", str(tmp_path / "out" / "c"),
    ]  # fmt: skip
    tasks = [subprocess.Popen([*common, "--array-task", f"{k}/2"]) for k in range(2)]
    assert [task.wait() for task in tasks] == [0, 0]
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")
    # One that comes when all is done finds it done.
    env = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "3"}
    begin = time.time_ns()
    assert run_cli(*common[3:], **env)[0] == 0
    assert all(path.stat().st_mtime_ns < begin for path in (tmp_path / "out").iterdir())
    assert run_cli(*common[3:], "--array-task", "2/2")[0] == 2


def test_standard_input_and_two_keys(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "file")
    code, out, err = run_cli(
        "preprocess", "--input", "-", "--keys", "text", "title", "--workers", "1",
        "--tokenizer", tokenizer_dir, "--output", str(tmp_path / "stdin" / "c"),
        text=Path(corpus).read_bytes(),
    )  # fmt: skip
    assert code == 0, err
    assert "c_title_document: 60 documents" in out
    assert "MB/s" in err
    for end in ("bin", "idx"):
        name = f"c_text_document.{end}"
        assert shards(tmp_path / "stdin")[name] == shards(tmp_path / "file")[name]


@pytest.mark.parametrize("command", ["train-tokenizer", "deduplicate", "split", "preprocess"])
def test_a_key_that_no_record_has_is_refused_at_once(
    command: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = Command(capsys, command, "--input", corpus, "--output", str(tmp_path / "out"))
    # The message comes before the tokenizer is looked at, and before any work.
    call = call.with_options(*(["--tokenizer", "none"] if command == "preprocess" else []))
    for keys, missing in ((["body"], "body"), (["text,body", "id"], "body,id")):
        (line,) = call.errors(2, "--keys", *keys).splitlines()
        assert f"--keys {missing}: no such key with text in the first records of {corpus}" in line
        assert line.endswith("choose from: text, title")
    assert list(tmp_path.iterdir()) == [Path(corpus)]
    assert "a key is empty" in call.errors(2, "--keys", "text,,title")


def test_leave_given_afterwards_says_that_nothing_was_left(make: Command, corpus: str) -> None:
    with open(corpus, "a") as stream:
        stream.write("{}\n")
    assert "1 of 61 records are bad" in make.errors(1)
    shown = make.errors(0, "--max-bad-fraction", "0.1")
    assert shown.splitlines()[0] == "preprocess: encode 100%"
    assert ": 60 documents" in make()


def test_both_sides_of_a_split_do_not_become_one_shard(
    make_from: Command, corpus: str, tmp_path: Path
) -> None:
    parted = tmp_path / "parted"
    call = ["split", "--input", corpus, "--output", str(parted), "--fraction", "0.5"]
    assert main([*call, "--workers", "0"]) == 0
    train, validation = parted / "train", parted / "validation"
    for inputs in ([parted], [train, validation], [f"{parted}/*/part-*"]):
        message = make_from.errors(2, "--input", *map(str, inputs))
        assert f"{train} and {validation} are the two sides of a split" in message
        for side in (train, validation):
            assert f"--input {side} --output {tmp_path}/c_{side.name}" in message
        assert not (tmp_path / "c.unfinished").exists()
    make_from("--input", str(train))


def test_files_are_documents(tokenizer_dir: str, tmp_path: Path) -> None:
    """Also those that are larger than a unit."""
    texts = ["\n\n".join(documents()[:20]), "\n\n".join(documents()[20:60]), "short"]
    texts = [text.strip() for text in texts]
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text(texts[0])
    (folder / "b.txt.gz").write_bytes(gzip.compress(texts[1].encode()))
    (folder / "c.txt").write_text(texts[2])
    for workers in (0, 2):
        (manifest,) = build(str(folder), tokenizer_dir, tmp_path / str(workers), workers)
        assert manifest.num_documents == 3
    assert shards(tmp_path / "0") == shards(tmp_path / "2")
    dataset = megatron_dataset(str(tmp_path / "0" / "c_text_document"))
    encode = load_tokenizer(tokenizer_dir).encode
    assert [dataset[index].tolist() for index in range(3)] == [encode(text) for text in texts]
