"""Compile the Triton kernels outside of attention without a GPU and check their resource limits.

Dropout + residual + LayerNorm (``ops.triton.layer_norm``) at the widths of DeBERTa-base and of the
1.5B model, bias + GELU (``ops.triton.gelu``), and the vocabulary's cross-entropy
(``ops.triton.cross_entropy``):
``python -m benchmarks.step.compiled_kernels --output FILE`` (``offline/step_kernels.json``).
``--quick`` compiles for one architecture. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The interpreter's functions cannot be compiled.
os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.lib.compiling import SHARED_BYTES, narrow_accesses, resources, write_by_version
from megatron_deberta.ops.triton import cross_entropy, gelu, layer_norm
from megatron_deberta.ops.triton.tiles import DropoutArguments

WIDTHS = {"base": 768, "1.5B": 1536}
ARCHITECTURES = (80, 90, 100)
_KERNELS = {
    "drop_add_norm": layer_norm.drop_add_norm_kernel,
    "drop_add_norm_backward": layer_norm.drop_add_norm_backward_kernel,
    "layer_norm_sum": layer_norm.layer_norm_sum_kernel,
    "bias_gelu": gelu.bias_gelu_kernel,
    "bias_gelu_backward": gelu.bias_gelu_backward_kernel,
    "cross_entropy_statistics": cross_entropy.cross_entropy_statistics_kernel,
    "cross_entropy_gradient": cross_entropy.cross_entropy_gradient_kernel,
}
_OF_ROWS = ("drop_add_norm", "drop_add_norm_backward")
_GELU = ("bias_gelu", "bias_gelu_backward")
_FLOATS32 = ("MEAN", "RSTD", "PARTS", "STATISTICS", "TOP", "SUM", "D_BIAS")
_SCALARS = ("eps", "factor")
# Known to be multiples of 16 at the launch: the vectors of loads depend on them.
_DIVISIBLE = ("features", "stride", "columns")


class Variant(NamedTuple):
    """Kernel compiled for one architecture; ``width`` is empty where it does not matter."""

    kernel: str
    sm: int
    dtype: str
    width: str = ""

    @property
    def name(self) -> str:
        """Return a readable, unique name."""
        return " ".join(filter(None, (self.kernel, f"sm_{self.sm}", self.dtype, self.width)))

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments."""
        if self.kernel in _OF_ROWS:
            return {"GROUPS": layer_norm.num_groups(WIDTHS[self.width])}
        if self.kernel == "layer_norm_sum":
            return {"ROWS": layer_norm.SUM_ROWS, "COLUMNS": layer_norm.SUM_COLUMNS}
        if self.kernel in _GELU:
            return {"ROWS": gelu.ROWS, "COLUMNS": gelu.COLUMNS}
        if self.kernel == "cross_entropy_statistics":
            return {"COLUMNS": cross_entropy.COLUMNS}
        return dict(zip(("ROWS", "COLUMNS"), cross_entropy.GRADIENT_TILE, strict=True))

    @property
    def warps(self) -> int:
        """Return the warps of a program."""
        if self.kernel in _OF_ROWS:
            return layer_norm.num_warps(self.constants()["GROUPS"])
        if self.kernel in _GELU:
            return gelu.WARPS
        return cross_entropy.WARPS.get(self.kernel, layer_norm.SUM_WARPS)


def variants(quick: bool) -> Iterator[Variant]:
    """Yield the variants; ``quick``: sm_90 in bf16 only."""
    architectures = (90,) if quick else ARCHITECTURES
    dtypes = ("bf16",) if quick else ("bf16", "fp16", "fp32")
    for kernel, sm, dtype in itertools.product(_KERNELS, architectures, dtypes):
        for width in WIDTHS if kernel in _OF_ROWS else ("",):
            yield Variant(kernel, sm, dtype, width)


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, memory and instructions."""
    kernel, constants = _KERNELS[variant.kernel], variant.constants()
    signature: dict[str, Any] = {}
    constexprs, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = _type_of(name, variant.dtype)
        path = (index, 0) if name == "DROPOUT" else (index,)
        # The stride of logits is padded; their number without padding is arbitrary.
        exact = name == "columns" and variant.kernel != "layer_norm_sum"
        if name.isupper() or (name in _DIVISIBLE and not exact):
            attributes[path] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes),
        target=GPUTarget("cuda", variant.sm, 32),
        options={"num_warps": variant.warps},
    )
    cubin = compiled.asm["cubin"]
    return {
        "warps": variant.warps,
        "shared_bytes": compiled.metadata.shared,
        "narrow_accesses": narrow_accesses(cubin),
        **resources(cubin),
    }


def _type_of(name: str, dtype: str) -> Any:
    """Return the type of an argument that is not a compile-time constant."""
    if name == "DROPOUT":
        return DropoutArguments("*i64", "i32", "fp32", "i32")  # type: ignore[arg-type]
    if name in ("LABELS", "POSITIONS"):
        return "*i64"
    if name in _FLOATS32:
        return "*fp32"
    if name in _SCALARS:
        return "fp32"
    return f"*{dtype}" if name.isupper() else "i32"


def broken_limits(variant: Variant, result: dict[str, Any]) -> list[str]:
    """Return messages on the limits that a compiled kernel exceeds."""
    wrong = [
        f"{result[key]} {what}"
        for key, what in (
            ("stack_bytes", "bytes of stack"),
            ("spills_in_loops", "accesses to the stack in loops"),
            ("atomics", "atomic instructions, whose order is not fixed"),
        )
        if result[key]
    ]
    if result["shared_bytes"] > SHARED_BYTES[variant.sm]:
        wrong.append(f"shared memory {result['shared_bytes']} > {SHARED_BYTES[variant.sm]} bytes")
    return [f"{variant.name}: {message}" for message in wrong]


def main() -> int:
    """Compile the variants, write the report and check the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    results, wrong = {}, []
    for variant in variants(arguments.quick):
        results[variant.name] = compile_variant(variant)
        wrong += broken_limits(variant, results[variant.name])
        print(variant.name, results[variant.name], flush=True)
    if arguments.output is not None:
        write_by_version(arguments.output, results)
    print("\n".join(wrong) or "within all limits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
