"""Choice of the backend, and errors that name the argument, its value and what is expected."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.ops import RelativePositions, disentangled_attention, dispatch
from megatron_deberta.ops import triton as triton_kernels
from megatron_deberta.ops.dispatch import choose_backend, why_not_native

POSITIONS = RelativePositions(8, 0)


def arguments(**changes: Any) -> dict[str, Any]:
    """Return a valid call (2 rows, 2 heads, 5 tokens, heads of 4) with changes."""
    call: dict[str, Any] = {name: torch.zeros(2, 2, 5, 4) for name in ("q", "k", "v")}
    call.update(pos_key=torch.zeros(2, 16, 4), pos_query=torch.zeros(2, 16, 4), positions=POSITIONS)
    return {**call, **changes}


BAD = {
    "q: got shape": {"q": torch.zeros(2, 5, 4)},
    "q: got dtype": {"q": torch.zeros(2, 2, 5, 4, dtype=torch.int64)},
    "q: got 3 queries for 5 keys": {"q": torch.zeros(2, 2, 3, 4)},
    "k: got shape": {"k": torch.zeros(2, 3, 5, 4)},
    "k: got dtype": {"k": torch.zeros(2, 2, 5, 4, dtype=torch.float16)},
    "v: got shape": {"v": torch.zeros(2, 2, 6, 4)},
    "v: got device": {"v": torch.zeros(2, 2, 5, 4, device="meta")},
    "pos_key: got shape": {"pos_key": torch.zeros(2, 15, 4)},
    "pos_query: got shape": {"pos_query": torch.zeros(1, 16, 4)},
    "pos_query: got dtype": {"pos_query": torch.zeros(2, 16, 4, dtype=torch.float64)},
    "q_positions: got shape": {"q_positions": torch.zeros(2, 4, dtype=torch.int64)},
    "q_positions: got dtype": {"q_positions": torch.zeros(2, 5)},
    "q_positions: got values": {"q_positions": torch.full((2, 5), 5)},
    r"q_positions: got values in \[-2": {"q_positions": torch.full((2, 5), -2)},
    "q_positions: got a repeated position in row 1": {
        "q_positions": torch.tensor([[0, 1, -1, 2, -1], [3, 0, 3, -1, -1]]),
        "distinct_positions": True,
    },
    "attention_mask: got shape": {"attention_mask": torch.ones(5, dtype=torch.bool)},
    "attention_mask: got dtype": {"attention_mask": torch.ones(2, 5)},
    "attention_mask: got a gap.* row 1": {
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 0, 0]]).bool()
    },
    "document_ids: got shape": {"document_ids": torch.zeros(2, 6, dtype=torch.int64)},
    "document_ids: got dtype": {"document_ids": torch.zeros(2, 5)},
    "document_ids: got decreasing": {"document_ids": torch.tensor([[0, 0, 1, 0, 1]] * 2)},
    "dropout_p: got": {"dropout_p": 1.0},
    "seed: got None": {"dropout_p": 0.1},
    "seed: got shape": {"dropout_p": 0.1, "seed": torch.zeros(3, dtype=torch.int64)},
    "seed: got dtype": {"dropout_p": 0.1, "seed": torch.zeros(2)},
    "head_offset: got -1": {"head_offset": -1},
    "p2c_index: got 'other'": {"p2c_index": "other"},
    "backend: got 'other'": {"backend": "other"},
    "backend: got 'triton', but heads have 4": {"backend": "triton"},
    "backend: got 'triton', but the kernels do not support torch.float64": {
        "backend": "triton",
        **{name: torch.zeros(2, 2, 5, 4, dtype=torch.float64) for name in ("q", "k", "v")},
        **{n: torch.zeros(2, 16, 4, dtype=torch.float64) for n in ("pos_key", "pos_query")},
    },
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_raise(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", True)
    with pytest.raises(ValueError, match=f"^{message}.*expected"):
        disentangled_attention(**arguments(**BAD[message]))


def test_valid_arguments_pass() -> None:
    output = disentangled_attention(
        **arguments(
            attention_mask=torch.tensor([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool(),
            document_ids=torch.tensor([[0, 0, 1, 1, 1]] * 2, dtype=torch.int32),
            q_positions=torch.tensor([[0, 4, -1, -1, -1]] * 2, dtype=torch.int32),
            dropout_p=0.1,
            seed=-3,
        )
    )
    assert output.shape == (2, 2, 5, 4)


@pytest.mark.parametrize("checks", [False, True])
def test_values_on_devices_are_checked_only_on_request(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks:
        monkeypatch.setenv("MEGATRON_DEBERTA_CHECK", "1")
    call = arguments(document_ids=torch.tensor([[0, 0, 1, 1, 1]] * 2))
    tensors = (torch.Tensor,)
    on_meta = {n: x.to("meta") if isinstance(x, tensors) else x for n, x in call.items()}
    if checks:  # a meta tensor has no values to read
        with pytest.raises((RuntimeError, NotImplementedError)):
            disentangled_attention(**on_meta, backend="reference")
    else:
        assert disentangled_attention(**on_meta, backend="reference").device.type == "meta"


Q = torch.zeros(1, 1, 1, 64)


def test_the_environment_decides_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_DEBERTA_ATTENTION", raising=False)
    fastest = "chunked" if why_not_native(Q) else "native"
    assert choose_backend(None, Q) == choose_backend("auto", Q) == fastest
    monkeypatch.setenv("MEGATRON_DEBERTA_ATTENTION", "reference")
    assert choose_backend(None, Q) == choose_backend("auto", Q) == "reference"
    assert choose_backend("chunked", Q) == "chunked"
    monkeypatch.setenv("MEGATRON_DEBERTA_ATTENTION", "nonsense")
    with pytest.raises(ValueError, match="MEGATRON_DEBERTA_ATTENTION: got 'nonsense', expected"):
        choose_backend(None, Q)


class OnGpu:
    """Stand-in for a tensor on a GPU."""

    device = torch.device("cuda", 0)
    shape = (1, 1, 1, 64)

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> None:
        self.dtype, self.shape = dtype, (1, 1, 1, size)


@pytest.mark.parametrize(
    ("capability", "q", "chosen"),
    [
        ((9, 0), OnGpu(), "triton"),
        ((8, 0), OnGpu(torch.float16, 128), "triton"),
        ((8, 0), OnGpu(size=80), "chunked"),
        ((7, 0), OnGpu(torch.float16), "chunked"),
        ((7, 5), OnGpu(torch.float32), "chunked"),
    ],
)
def test_ampere_and_newer_gpus_use_the_fused_kernels(
    capability: tuple[int, int], q: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_DEBERTA_ATTENTION", raising=False)
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_backend(None, q) == chosen
    if chosen == "triton":
        assert choose_backend("triton", q) == "triton"
        assert choose_backend("chunked", q) == "chunked"
        monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", False)
        assert choose_backend(None, q) == "chunked"
        return
    reason = "this GPU is sm_7" if capability[0] < 8 else "heads have 80"
    with pytest.raises(ValueError, match=f"backend: got 'triton', but {reason}.*expected"):
        choose_backend("triton", q)


@pytest.mark.parametrize(
    ("triton", "interpret", "dtype", "reason"),
    [
        (False, "1", torch.float32, "Triton is not installed"),
        (True, "0", torch.float32, "the kernels run on CUDA devices .*, not on cpu"),
        (True, "1", torch.bfloat16, "the arithmetic of Triton's interpreter is wrong"),
    ],
)
def test_requesting_a_backend_that_cannot_run_gives_the_reason(
    triton: bool, interpret: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", triton)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setenv("MEGATRON_DEBERTA_ATTENTION", "triton")
    with pytest.raises(
        ValueError, match=f"MEGATRON_DEBERTA_ATTENTION: got 'triton', but {reason}.*expected"
    ):
        choose_backend(None, Q.to(dtype))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(3):
            disentangled_attention(**arguments(backend="chunked"))
    assert [r.getMessage() for r in caplog.records] == [
        "disentangled attention: chunked backend on cpu, torch.float32"
    ]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import pytest, torch
from megatron_deberta.ops import RelativePositions, disentangled_attention
q = torch.ones(1, 1, 3, 64)
table = torch.ones(1, 8, 64)
output = disentangled_attention(q, q, q, table, table, RelativePositions(4, 0))
torch.testing.assert_close(output, q)
try:
    disentangled_attention(q, q, q, table, table, RelativePositions(4, 0), backend="triton")
except ValueError as error:
    assert "Triton is not installed" in str(error)
else:
    raise AssertionError
raise SystemExit(pytest.main(["--collect-only", "-q", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_without_triton_the_operator_runs_and_its_tests_are_found() -> None:
    tests = Path(__file__).parents[1]
    files = [*tests.glob("ops/test_triton*.py"), tests / "benchmarks/test_attention_benchmark.py"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, *map(str, files)],
        cwd=tests.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "written in Triton" in done.stdout


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_a_function_that_calls_the_operator_compiles(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 9, 32),) * 3 + ((2, 16, 32),) * 2
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return disentangled_attention(*x, positions=POSITIONS, backend=backend).sin().sum()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=backend == "reference")
    expected = torch.autograd.grad(attend(*leaves), leaves)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
