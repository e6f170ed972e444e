"""First contact with a GPU, in at most three minutes: every kernel, a DeepSpeed step, save, resume.

Each item is independent; the stack of a failing one is printed and the rest goes on. Kernels are
compared with their twins in float64 on the CPU and must give the same bits three times. On a CPU
they run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import parity, train
from benchmarks.gpu.record import Item, Record
from benchmarks.lib.provenance import ROOT, version
from benchmarks.lib.tolerances import OPERATOR
from megatron_deberta.cluster.installation import check_compiler
from megatron_deberta.distributed import vocab
from megatron_deberta.errors import ConfigError
from megatron_deberta.model import fused
from megatron_deberta.ops import RelativePositions, disentangled_attention

OPTIONAL = ("triton", "flash_attn", "disentangled_flash", "flashdeberta", "liger_kernel")
POSITIONS = RelativePositions(40, 8)
LENGTH, TARGETS = 197, 23
CPU_LENGTH = 40
RACECHECK_SECONDS = 90
GATHERED_DONE = "gathered kernels: done"
REPEATS = 3
# The interpreter, one thread, takes seconds for a call.
CPU_REPEATS = 2
Function = Callable[..., Tensor]


def run(record: Record) -> None:
    """Run the items, the broadest first: a first start compiles for most of the time."""
    device = record.options.device
    on_gpu = device == "cuda"
    record.run("installation", lambda: installation(on_gpu))
    first, size = kernel_case(device)
    check_kernels(record, first)
    for gathered in (False, True):
        check_attention(record, first, size, gathered)
    check_attention(record, first, size, documents=True)
    small = parity.SMALL if record.options.small else parity.MODEL
    record.run("DeepSpeed step", lambda: parity.compare_steps(small, device, "bf16"))
    record.run("save, kill, resume", lambda: train.killed_and_resumed(record, train.SMALL))
    record.run("export and fill masks", lambda: train.export(record.options.work))
    if on_gpu:
        record.run("racecheck of the gathered kernels", racecheck)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype != first:
            check_kernels(record, dtype)
    if on_gpu:
        check_attention(record, torch.float16, 128)
        check_attention(record, torch.float32, 32, gathered=True)


def kernel_case(device: str) -> tuple[torch.dtype, int]:
    """Return the dtype and the head size that are checked first."""
    # The interpreter's bfloat16 arithmetic is wrong in products.
    return (torch.bfloat16, 64) if device == "cuda" else (torch.float16, 32)


def check_kernels(record: Record, dtype: torch.dtype) -> None:
    """Check the kernels outside of attention."""
    device = record.options.device
    record.run(f"layer norm {name_of(dtype)}", lambda: layer_norm(device, dtype))
    record.run(f"cross-entropy {name_of(dtype)}", lambda: cross_entropy(device, dtype))


def check_attention(
    record: Record, dtype: torch.dtype, size: int, gathered: bool = False, documents: bool = False
) -> None:
    """Check one variant of the attention operator."""
    name = f"attention {name_of(dtype)} d={size}" + " gathered" * gathered
    name += " documents" * documents
    device = record.options.device
    record.run(name, lambda: attention(device, dtype, size, gathered, documents))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def installation(on_gpu: bool) -> Item:
    """Import the optional packages; check compiler and headers, which kernels need."""
    found = {}
    for package in OPTIONAL:
        try:
            importlib.import_module(package)
            found[package] = version(package.replace("_", "-")) or "without a version"
        except ImportError as missing:
            found[package] = str(missing)
    wrong = []
    if on_gpu and version("triton") is None:
        wrong.append("Triton is not installed: nothing below runs in a kernel")
    try:
        found["compiler"] = check_compiler()
    except ConfigError as missing:
        found["compiler"] = str(missing)
        wrong += [str(missing)] if on_gpu else []
    return {"found": found, "wrong": wrong}


def compare(
    function: Function,
    leaves: Sequence[Tensor],
    device: str,
    dtype: torch.dtype,
    reference: Function | None = None,
) -> Item:
    """Compare output and gradients with those in float64 on the CPU.

    Args:
        function: called with the leaves.
        leaves: float64 tensors, exact in ``dtype``.
        device: where ``function`` runs.
        dtype: in which ``function`` runs.
        reference: the twin; None: ``function`` itself.
    """

    def work(call: Function, where: str, of: torch.dtype) -> list[Tensor]:
        own = [x.to(where, of).requires_grad_() for x in leaves]
        output = call(*own)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        gradients = torch.autograd.grad(output, own, upstream.to(output))
        return [x.detach().double().cpu() for x in (output, *gradients)]

    expected = work(reference or function, "cpu", torch.float64)
    repeats = REPEATS if device == "cuda" else CPU_REPEATS
    found, *again = (work(function, device, dtype) for _ in range(repeats))
    bound = 2 * OPERATOR[dtype]
    errors = {
        f"result {index}": float((a - b).norm() / b.norm().clamp(min=1e-9))
        for index, (a, b) in enumerate(zip(found, expected, strict=True))
    }
    wrong = [f"error of {key} {error:.1e} > {bound:.1e}" for key, error in errors.items()
             if not error <= bound]  # fmt: skip
    if any(not torch.equal(a, b) for other in again for a, b in zip(found, other, strict=True)):
        wrong.append("the results of equal calls differ")
    return {"off": {"largest": max(errors.values())}, "errors": errors, "wrong": wrong}


def random_tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal values that are exact in a dtype, in float64."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes]


def layer_norm(device: str, dtype: torch.dtype) -> Item:
    """Dropout + residual + LayerNorm; on a CPU in the interpreter."""
    rows = (2, LENGTH, 768) if device == "cuda" else (2, 3, 100)
    features = rows[-1]
    leaves = random_tensors(dtype, rows, rows, (features,), (features,))

    def normalise(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seed = torch.arange(2, device=x.device)
        positions = torch.arange(rows[1], device=x.device).expand(rows[:2])
        pending = fused.PendingResidual(x, residual, seed, positions, 0.1)
        return fused.layer_norm(pending, weight, bias, 1e-7)

    # Compiling the twin for float64 would take longer than everything else.
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(fused, "runs_kernels", uses_kernels(device)),
    ):
        return compare(normalise, leaves, device, dtype)


def cross_entropy(device: str, dtype: torch.dtype) -> Item:
    """The vocabulary's loss over several chunks and columns of padding."""
    columns = 50264 if device == "cuda" else 60
    leaves = random_tensors(dtype, (TARGETS, 64), (columns, 64), (columns,))
    labels = torch.arange(TARGETS) * (columns // TARGETS - 1)
    labels[3] = vocab.IGNORED_LABEL

    def loss_of(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = labels.to(states.device)
        return vocab.vocab_parallel_loss(
            states, weight, bias, own, 0, columns - 3, None, fuse=True
        )[0]

    with (
        mock.patch.object(vocab, "runs_kernels", uses_kernels(device)),
        mock.patch.dict(vocab._CHUNK_ELEMENTS, {"fused": 10 * columns, "cuda": 10 * columns}),
    ):
        return compare(loss_of, leaves, device, dtype)


def uses_kernels(device: str) -> Callable[[Tensor], bool]:
    """Return the rule for the kernels: everything but the reference in float64."""
    return lambda x: x.dtype != torch.float64 and x.device.type == device


def attention(
    device: str, dtype: torch.dtype, size: int, gathered: bool, documents: bool = False
) -> Item:
    """The attention operator with padding, dropout and distances beyond the table."""
    heads, length = 2, LENGTH if device == "cuda" else CPU_LENGTH
    queries = 9 if gathered else length
    shapes = [(2, heads, queries, size), *[(2, heads, length, size)] * 2]
    leaves = random_tensors(dtype, *shapes, *[(heads, 2 * POSITIONS.span, size)] * 2)
    at = torch.arange(queries).mul(7).remainder(length).expand(2, -1) if gathered else None
    real = torch.arange(length) < torch.tensor([[length], [length - 11]])
    ids = (torch.arange(length) // 17).expand(2, -1) if documents else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        where = q.device
        backend = "reference" if q.dtype == torch.float64 else "triton"
        return disentangled_attention(
            q, k, v, *tables, POSITIONS,
            q_positions=None if at is None else at.to(where), key_padding=real.to(where),
            document_ids=None if ids is None else ids.to(where),
            dropout_p=0.1, seed=torch.arange(2, device=where), backend=backend,
        )  # fmt: skip

    return compare(attend, leaves, device, dtype)


_RUN_GATHERED = """
import sys
from benchmarks.gpu.smoke import gathered_kernels
sys.exit(gathered_kernels(sys.argv[1]))
"""


def racecheck(device: str = "cuda") -> Item:
    """Run the gathered kernels under compute-sanitizer, which checks shared memory for races.

    It does not see global memory; there the equal bits of repeated calls must do.

    Args:
        device: on which they run.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{home}/bin")
    if tool is None:
        return {"skipped": "compute-sanitizer is not installed", "wrong": []}
    command = [tool, "--tool", "racecheck", "--error-exitcode", "9",
               sys.executable, "-c", _RUN_GATHERED, device]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RACECHECK_SECONDS
    )
    tail = (done.stdout + done.stderr)[-2000:]
    wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}: {tail}"]
    if not wrong and GATHERED_DONE not in done.stdout:
        wrong.append(f"the kernels did not run: {tail}")
    return {"summary": tail.splitlines()[-1:], "wrong": wrong}


def gathered_kernels(device: str) -> int:
    """Run forward and backward of gathered queries, as `racecheck` does; return the exit code."""
    dtype, size = kernel_case(device)
    item = attention(device, dtype, size, gathered=True)
    print(GATHERED_DONE, *item["wrong"], sep="\n")
    return int(bool(item["wrong"]))


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    lines = []
    for name, item in items.items():
        off = item.get("off", {})
        text = "  ".join(f"{key} error {value:.1e}" for key, value in off.items())
        state = item.get("skipped") or ("wrong" if item.get("wrong") or "error" in item else "ok")
        lines.append(f"  {name:34} {state:6} {text}")
    return lines
