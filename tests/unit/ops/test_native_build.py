"""Compilation of the CPU kernels: cache, failures, and machines without a compiler."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_deberta.ops.dispatch import choose_backend
from megatron_deberta.ops.native import backend, build
from tests.support.compiler import needs_compiler

Q = torch.zeros(1, 1, 1, 32)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Look for the library anew in each test, and afterwards."""
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.fixture
def small_source(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the source of the kernels, which takes seconds to compile, with one function."""
    source = tmp_path_factory.mktemp("source") / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    monkeypatch.setattr(build, "SOURCE", source)


def test_without_a_compiler_the_slower_ones_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library() is None
    assert choose_backend(None, Q) == "chunked"
    assert "no C++ compiler" in str(backend.why_not_native(Q))


def test_a_failure_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho x >&2; echo error: no AVX2 >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MEGATRON_DEBERTA_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert choose_backend(None, Q) == choose_backend(None, Q) == "chunked"
    (record,) = caplog.records
    assert "cannot be compiled, slower ones are used: error: no AVX2" in record.getMessage()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("MEGATRON_DEBERTA_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="chmod 700"):
        build.cache_folder()
    assert build.library() is None


@needs_compiler
def test_the_library_is_compiled_once_and_kept(tmp_path: Path, small_source: None) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    with ThreadPoolExecutor(2) as pool:  # Processes may start at the same time.
        results = set(pool.map(lambda _: build.compile_library(compiler, tmp_path), range(2)))
    (result,) = results
    assert list(tmp_path.iterdir()) == [result]
    before = result.stat().st_mtime_ns
    assert build.compile_library(compiler, tmp_path) == result
    assert result.stat().st_mtime_ns == before


@needs_compiler
def test_a_damaged_library_is_compiled_again(tmp_path: Path, small_source: None) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    result = build.compile_library(compiler, tmp_path)
    content = result.read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    for damaged in (b"", content[:16], content[:-33], bytes(flipped)):
        result.write_bytes(damaged)
        assert build.compile_library(compiler, tmp_path) == result
        assert result.read_bytes() == content
    assert ctypes.CDLL(str(result)).seven() == 7


def test_the_compiler_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own-c++"
    own.write_text("")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "own-c++")
    assert build.find_compiler() == shutil.which("own-c++") == str(own)
