"""Some kernels compiled without a GPU: limits on stack, shared memory and tensor-core use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the fused kernels are written in Triton")

ROOT = Path(__file__).parents[3]
ATTENTION = "benchmarks.attention.compiled_kernels"


@pytest.mark.parametrize(
    ("module", "only", "count", "variants"),
    [
        pytest.param(*case, marks=mark)
        for mark, *case in (
            # The five main kernels for one GPU; the nightly cases add others and other head sizes.
            (pytest.mark.slow, ATTENTION, "sm_90 d=64", "tensor_core_instructions", 5),
            (pytest.mark.nightly, ATTENTION, "", "tensor_core_instructions", 9),
            (pytest.mark.nightly, "benchmarks.step.compiled_kernels", "", "narrow_accesses", 9),
        )
    ],
)
def test_kernels_compile_within_their_limits(
    module: str, only: str, count: str, variants: int, tmp_path: Path
) -> None:
    # A process of its own: in this one the kernels may be the interpreter's.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick", *(["--only", only] if only else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(count) == variants
