"""Some kernels compiled without a GPU: limits on stack, shared memory and tensor-core use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the fused kernels are written in Triton")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("module", "count", "variants"),
    [
        pytest.param(
            "benchmarks.attention.compiled_kernels",
            "tensor_core_instructions",
            9,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "benchmarks.step.compiled_kernels", "narrow_accesses", 9, marks=pytest.mark.nightly
        ),
    ],
)
def test_kernels_compile_within_their_limits(
    module: str, count: str, variants: int, tmp_path: Path
) -> None:
    # A process of its own: in this one the kernels may be the interpreter's.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(count) == variants
