"""Windowed submission, and the choice of executors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import DataError
from megatron_deberta.text.jobs import dask
from megatron_deberta.text.jobs.executors import Call, local_engine, run_calls


def test_calls_are_read_as_results_come_in() -> None:
    read = []

    def calls() -> Iterator[Call]:
        for number in range(200):
            read.append(number)
            yield abs, (-number,)

    ahead, results = [], []

    def collect(result: int) -> None:
        results.append(result)
        ahead.append(len(read) - len(results))

    with local_engine(2) as engine:
        run_calls(engine, calls(), collect)
    assert sorted(results) == list(range(200))
    assert max(ahead) <= 4


def test_an_error_of_a_unit_ends_the_job() -> None:
    with pytest.raises(ZeroDivisionError), local_engine(2) as engine:
        run_calls(engine, ((divmod, (1, 0)) for _ in range(100)))


def test_a_dead_worker_is_one_line() -> None:
    with pytest.raises(DataError, match="a worker process died"), local_engine(2) as engine:
        run_calls(engine, [(os._exit, (9,))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "dask"], "--executor dask needs --dask ADDRESS"),
        (["--executor", "local", "--dask", "tcp://a:1"], "only with --executor dask"),
        (["--executor", "mpi"], "mpi4py sees a single rank"),
        (["--dask", "tcp://127.0.0.1:9"], "no scheduler with a worker"),
    ],
)
def test_executors_that_cannot_be_used(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dask, "_CONNECT_SECONDS", 0.5)
    assert main(["preprocess", "--input", "a", "--tokenizer", "b", "--output", "c", *options]) == 2
    assert message in capsys.readouterr().err
