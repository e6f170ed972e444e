"""Windowed submission, and the choice of executors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.text.jobs import executors
from megatron_deberta.text.jobs.executors import Call, Engine, local_engine, run_calls
from tests.support.commands import Command


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


def test_workers_that_come_later_get_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_CHECK_SECONDS", 0.05)
    barrier = threading.Barrier(4)
    counts = iter([1, 1])
    results: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        engine = Engine(pool, 1, lambda: next(counts, 4))
        # Each call waits until four run at the same time.
        run_calls(engine, ((barrier.wait, (60,)) for _ in range(4)), results.append)
    assert sorted(results) == [0, 1, 2, 3]
    assert engine.workers == 4


def test_a_lost_scheduler_is_one_line() -> None:
    class Client:
        def nthreads(self) -> dict[str, int]:
            raise OSError("Timed out trying to connect")

    with pytest.raises(DataError, match="--dask tcp://a:1: the scheduler died"):
        executors._WorkerCount(Client(), "tcp://a:1")()


def test_nothing_waits_for_ever_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def nthreads(self) -> dict[str, int]:
            return {}

    clock = [0.0]
    monkeypatch.setattr(executors.time, "monotonic", lambda: clock[0])
    count = executors._WorkerCount(Client(), "tcp://a:1")
    assert count() == 0
    clock[0] = executors._WORKERLESS_SECONDS + 1.0
    with pytest.raises(DataError, match="no worker for 300 s"):
        count()


def test_an_error_of_a_unit_ends_the_job() -> None:
    with pytest.raises(ZeroDivisionError), local_engine(2) as engine:
        run_calls(engine, ((divmod, (1, 0)) for _ in range(100)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "dask"], "--executor dask needs --dask ADDRESS"),
        (["--executor", "local", "--dask", "tcp://a:1"], "only with --executor dask"),
        (["--executor", "mpi"], "mpi4py sees a single rank"),
        (["--dask", "tcp://127.0.0.1:9"], "no scheduler with a worker"),
        (["--executor", "mpi", "--workers", "2"], "--workers is not for --executor mpi"),
        (["--dask", "tcp://a:1", "--workers", "0"], "--workers is not for --executor dask"),
    ],
)
def test_executors_that_cannot_be_used(
    options: list[str],
    message: str,
    cli: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executors, "_CONNECT_SECONDS", 0.5)
    assert message in cli.errors(
        2, "preprocess", "--input", "a", "--tokenizer", "b", "--output", "c", *options
    )


def test_mpi4py_without_an_mpi_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so.40: cannot open shared object file")

    module = ModuleType("mpi4py")
    module.__getattr__ = missing  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    command = ["preprocess", "--input", "a", "--tokenizer", "b", "--output", "c"]
    shown = cli.errors(2, *command, "--executor", "mpi")
    assert "mpi4py cannot be imported (cannot load MPI library); pip install" in shown
    assert shown.count("\n") == 1
