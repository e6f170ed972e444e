"""Damage on disk, stalled processes and hostile files do not reach a shard."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import zstandard

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.readers.sources import PLAN
from tests.support.commands import Command
from tests.unit.text.preprocess.test_preprocess_pipeline import build, shards


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kind", ["0", "bad"])
def test_a_flipped_bit_in_an_unfinished_part_is_not_published(
    kind: str, place: int, corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    with open(corpus, "a") as stream:
        stream.write("{broken\n")
    build(corpus, tokenizer_dir, tmp_path / "whole", allow_bad=0.1)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="1 of 61 records are bad"):
        build(corpus, tokenizer_dir, out)
    part = min(out.glob(f"c.unfinished/*/parts/*.{kind}"))
    content = bytearray(part.read_bytes())
    content[place] ^= 1
    part.write_bytes(content)
    if kind == "bad":
        # The list is written again.
        for path in out.glob("c.unfinished/*/done/quarantine.json"):
            path.unlink()
    with pytest.raises(DataError, match="damaged since it was written"):
        build(corpus, tokenizer_dir, out, allow_bad=0.1)
    assert shards(out) == {}
    build(corpus, tokenizer_dir, out, allow_bad=0.1)
    assert shards(out) == shards(tmp_path / "whole")


@pytest.mark.slow
def test_nobody_takes_over_from_a_suspended_process(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(corpus, tokenizer_dir, tmp_path / "whole")
    child = os.fork()
    if child == 0:
        unlink = Path.unlink

        def stalled(path: Path, missing_ok: bool = False) -> None:
            if path.name == "c_text_document.idx":
                os.kill(os.getpid(), signal.SIGSTOP)
            unlink(path, missing_ok)

        Path.unlink = stalled  # type: ignore[method-assign]
        code = 1
        try:
            build(corpus, tokenizer_dir, tmp_path / "out")
            code = 0
        finally:
            os._exit(code)
    try:
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        with pytest.raises(DataError, match="another process works there"):
            build(corpus, tokenizer_dir, tmp_path / "out")
    finally:
        os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_a_process_that_lost_its_folder_publishes_and_removes_nothing(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lock = JobFolder.check_lock
    build(corpus, tokenizer_dir, tmp_path / "whole")

    def lose(folder: JobFolder) -> None:
        monkeypatch.undo()
        # A file server that has given the lock to another node.
        os.rename(tmp_path / "out" / "c.unfinished", tmp_path / "lost")
        build(corpus, tokenizer_dir, tmp_path / "out")
        check_lock(folder)

    monkeypatch.setattr(JobFolder, "check_lock", lose)
    with pytest.raises(DataError, match="finished or restarted"):
        build(corpus, tokenizer_dir, tmp_path / "out")
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


@pytest.mark.parametrize("content", [b'{"--input": [["a', b"[" * 100_000, b"\xff", b"{}"])
def test_a_torn_plan_is_one_line(content: bytes, make: Command, tmp_path: Path) -> None:
    folder = tmp_path / "c.unfinished"
    folder.mkdir()
    (folder / PLAN).write_bytes(content)
    assert len(make.errors(1).splitlines()) == 1
    make("--restart")
    for deep in (b"[" * 100_000, b'{"sources":' + b"[" * 100_000):
        (tmp_path / "c_text_document.manifest.json").write_bytes(deep)
        assert "c_text_document.bin: exists" in make.errors(2)


def test_a_zstd_window_of_two_gib_is_refused(tokenizer_dir: str, tmp_path: Path) -> None:
    # Frame header: magic, no content size, window of 2**31 bytes; then raw blocks.
    text = b'{"text": "some words"}\n' * 100
    block = (len(text) << 3 | 1).to_bytes(3, "little") + text
    path = tmp_path / "c.jsonl.zst"
    wide = b"\x28\xb5\x2f\xfd\x00\xa8" + block
    path.write_bytes(wide)
    with pytest.raises(ConfigError, match=r"window of 2,048 MiB exceeds 128 MiB.* zstd --long=27"):
        build(str(path), tokenizer_dir, tmp_path / "out")
    # In a later frame it is found while the file is read.
    path.write_bytes(zstandard.compress(text) + wide)
    with pytest.raises(DataError, match="damaged"):
        build(str(path), tokenizer_dir, tmp_path / "out")
    (listed,) = tmp_path.glob("out/*/*/staged/bad")
    assert "its window exceeds 128 MiB; compress with at most zstd --long=27" in listed.read_text()
    assert shards(tmp_path / "out") == {}
