"""Settings of all tests: CPU, few threads, Triton's interpreter."""

import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before the first import of torch or DeepSpeed.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor would compile a program for each instruction set, to see whether it runs, and start
# processes for a single kernel: a quarter of the time of the tests that compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

# Before the first import of Triton: without a GPU the fused kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Nothing that collection makes is garbage, and looking for some takes seconds.
gc.disable()


TOGETHER = (
    ("tests/distributed/",),
    ("tests/slurm/",),
    (
        "tests/integration/test_pretrain_", "tests/integration/test_finetune.py",
        "tests/integration/test_double_launch.py", "tests/integration/test_lost_node.py",
        "tests/faults/test_chaos.py", "tests/unit/cli/test_doctor.py",
    ),
)  # fmt: skip
"""Beginnings of paths of files that share rank pools, a virtual cluster, or a fork server."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests, and those of files that share fixtures, on one pytest-xdist worker."""
    from xdist.scheduler import LoadScopeScheduling

    from tests.durations import seconds_of_files

    def scope_of(path: str) -> str:
        return next((starts[0] for starts in TOGETHER if path.startswith(starts)), path)

    seconds: Counter[str] = Counter()
    for file, needed in seconds_of_files().items():
        seconds[scope_of(file)] += needed

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.split("::", 1)[0])

        def _assign_work_unit(self, node: Any) -> None:
            # The longest part first, so that no worker is left with it at the end; a new file may
            # be long, too.
            scope = max(self.workqueue, key=lambda name: seconds.get(name, float("inf")))
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # Libraries report what is left at the end of the process.
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Leave what is there, such as imported modules, out of garbage collections.

    DeepSpeed makes half a dozen full ones per engine, each of which takes half a second otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run of 60 steps on real text, for all tests; return the path of its config.

    One process accumulates gradients over two micro batches per step. Two data-parallel processes
    have one micro batch each; accumulation over several ranks is tested in ``tests/distributed``.
    """
    from tests.support.jobs import prepare
    from tests.support.shared import shared_folder

    make = functools.partial(prepare, micro_batch=4)
    return shared_folder(tmp_path_factory, "corpus", make) / "run.yaml"


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the stop signals' handlers: a rank that has ended leaves them ignored (its exit code
    must not change), and processes that later tests start would inherit that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
