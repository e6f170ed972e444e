"""Settings every test shares: no GPU detour, few threads, Triton's interpreter."""

import os
from pathlib import Path

# Before torch or DeepSpeed is imported anywhere.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Before Triton is imported anywhere: without a GPU the fused kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent
STARTING_PROCESSES = {"slurm", "faults", "chaos", "campaigns", "integration", "distributed"}
"""Folders whose tests start ranks or jobs and wait for them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one pytest-xdist worker, and run at most one job at a time.

    The tests of a file share fixtures. Those that start processes come first, on one worker, so
    that their time-outs see one other test beside them at most.
    """
    for item in items:
        path = item.path.relative_to(ROOT)
        group = "processes" if path.parts[0] in STARTING_PROCESSES else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.relative_to(ROOT).parts[0] not in STARTING_PROCESSES)
