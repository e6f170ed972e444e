"""Compile the fused attention kernels without a GPU and check their resource limits.

Reports registers, stack, shared memory and its bank conflicts, and instructions of every kernel,
counted with the driver's disassembler: ``python -m benchmarks.attention.compiled_kernels --output
benchmarks/results/offline/kernels.json`` adds the installed Triton's results to the report.
``--quick`` compiles only a few kernels. Exits with 1 if a limit is exceeded.

``--slots FILE --label NAME`` instead counts the issue slots per tile of the main kernels, which is
what bounds them, and adds them to FILE under NAME
(``benchmarks/results/offline/attention_slots.json``). Exits with 1 if there are too many.
``--gathered`` counts those of the mask decoder's queries instead, per row and head: by the kernels
of gathered queries, and spread over the row for those of consecutive queries.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The interpreter's functions cannot be compiled.
os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.lib.compiling import SHARED_BYTES, resources, write_by_version
from benchmarks.lib.shared_memory import wavefronts_of_loops
from megatron_deberta.ops.triton import consecutive, gathered, tables
from megatron_deberta.ops.triton.settings import WIDE_HEAD, launch_setting, tile_size
from megatron_deberta.ops.triton.tiles import DropoutArguments, HeadTensor

KERNELS = {
    "forward": consecutive.forward_kernel,
    "key": consecutive.key_kernel,
    "key_gradient": consecutive.key_gradient_kernel,
    "query_gradient": consecutive.query_gradient_kernel,
    "table_gradient": tables.table_gradient_kernel,
    "fold": tables.fold_kernel,
    "far_key": consecutive.far_key_kernel,
    "end_products": consecutive.end_products_kernel,
    "end_gradient": consecutive.end_gradient_kernel,
    "output_products": consecutive.output_products_kernel,
    "gathered_forward": gathered.gathered_forward_kernel,
    "gathered_query": gathered.gathered_query_kernel,
    "gathered_key": gathered.gathered_key_kernel,
}
# Constants of the parts into which these kernels are split for wide heads.
PARTS = {
    "key": {"scores": {"VALUES": False}, "values": {"SCORES": False}},
    "far_key": {"values": {"KEYS": False}, "keys": {"VALUES": False}},
}
MAIN = ("forward", "key", "key_gradient", "query_gradient", "table_gradient")
OF_LONG_ROWS = (*MAIN, "far_key", "gathered_forward", "gathered_query", "gathered_key")
# Maximum stack outside loops; in loops no access to the stack is allowed.
STACK_BYTES = 64
# Limits of stack bytes and of stack accesses in loops, by pattern of the variant's name; the first
# match counts.
EXCEPTIONS = {
    # No tensor cores: the 128 features of a query are in registers.
    r"forward .* d=128 fp32": (256, 0),
    # Only Triton 3.6: one access among 1,471 instructions.
    r"gathered_key .* d=128 fp32": (24, 1),
}
_FLOATS32 = (
    "Q_ENDS K_ENDS LSE2 DELTA D_K_FAR D_V_FAR BY_ROW K_SUMS Q_SUMS KEY_PARTS QUERY_PARTS PARTS "
    "ENDS SUMS"
).split()
_INTEGERS = "POSITIONS KEY_BEGIN KEY_END QUERY_BEGIN QUERY_END ROWS".split()
_SCALARS = "scale log2_scale unpack_scale".split()
_HEAD_TENSORS = "Q K V X OUT D_OUT D_Q D_K D_V".split()
# Arguments that are plain pointers in these kernels and ``HeadTensor`` in other kernels.
_POINTERS = {"fold": ("OUT",), "end_products": ("OUT",), "end_gradient": ("OUT",)} | {
    "gathered_query": ("D_Q",), "gathered_key": ("D_K",)
}  # fmt: skip
SLOTS = {"dropout": 4900, "plain": 4300}
"""Maximum issue slots per tile of all main kernels together."""

CONFLICTS = 1.5
"""Maximum ratio of the cycles of shared memory in loops to those without bank conflicts, for
kernels with tensor cores. Those in float32, which is for comparisons, reach 5.5."""

SCHEDULERS = 4
"""Of a multiprocessor; each issues one instruction of a warp per cycle."""

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Kernel compiled for one GPU architecture.

    Attributes:
        flags: ``plain``: dense rows. ``dropout``: with dropout. ``masked``: also with padding or
            documents. ``everything``: also with long rows whose length is no multiple of the tile.
        part: part of a split kernel, or empty.
    """

    kernel: str
    sm: int
    head_size: int
    dtype: torch.dtype
    flags: str
    part: str = ""

    @property
    def name(self) -> str:
        """Return a readable, unique name."""
        dtype = _TYPES[self.dtype]
        kernel = f"{self.kernel} {self.part}".strip()
        return f"{kernel} sm_{self.sm} d={self.head_size} {dtype} {self.flags}"

    @property
    def tile(self) -> int:
        """Return the number of queries and keys of a tile."""
        gathered = self.kernel.startswith("gathered")
        return tile_size(self.dtype, gathered, self.capability)

    @property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability as torch does."""
        return divmod(self.sm, 10)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments."""
        everything = self.flags == "everything"
        left_out = PARTS[self.kernel][self.part] if self.part else {}
        return {
            **{"BLOCK": self.tile, "HEAD_DIM": self.head_size},
            **{"C2P": True, "P2C": True, "CONTENT": True, "NEGATED": True},
            **{"DROP": self.flags != "plain", "RANGES": self.flags in ("masked", "everything")},
            **{"HALF": self.dtype != torch.float32, "FAR": everything},
            "EVEN": not everything,
            **{"SCORES": True, "VALUES": True, "KEYS": True, **left_out},
            "CHUNK": 16 if self.kernel == "fold" else min(self.head_size, 64),
        }


def variants(quick: bool) -> Iterator[Variant]:
    """Yield the variants to compile, with the parts of split kernels.

    Args:
        quick: only a few, for continuous integration.
    """
    for variant in _whole_variants(quick):
        parts = PARTS.get(variant.kernel, {}) if variant.head_size >= WIDE_HEAD else {}
        yield from (dataclasses.replace(variant, part=part) for part in parts or [""])


def _whole_variants(quick: bool) -> Iterator[Variant]:
    if quick:
        for kernel, sm in (("forward", 90), ("key", 90), ("table_gradient", 80), ("forward", 100)):
            yield Variant(kernel, sm, 64, torch.bfloat16, "dropout")
        for kernel in ("key_gradient", "query_gradient", "table_gradient"):
            yield Variant(kernel, 90, 64, torch.bfloat16, "dropout")
        yield Variant("key", 90, 128, torch.bfloat16, "everything")
        return
    for kernel, sm in itertools.product(KERNELS, (90, 80, 100)):
        yield Variant(kernel, sm, 64, torch.bfloat16, "everything")
    for kernel, sm in itertools.product(MAIN, (90, 80, 100)):
        yield Variant(kernel, sm, 64, torch.bfloat16, "dropout")
        yield Variant(kernel, sm, 64, torch.bfloat16, "masked")
    for kernel in MAIN:
        yield Variant(kernel, 90, 64, torch.bfloat16, "plain")
        yield Variant(kernel, 90, 64, torch.float16, "dropout")
        for size, dtype in ((64, torch.float32), (32, torch.bfloat16), (128, torch.bfloat16)):
            yield Variant(kernel, 90, size, dtype, "dropout")
    for kernel, sm, size in itertools.product(OF_LONG_ROWS, (90, 80, 100), (32, 128)):
        yield Variant(kernel, sm, size, torch.bfloat16, "everything")
    for kernel, size in itertools.product(OF_LONG_ROWS, (64, 128)):
        yield Variant(kernel, 90, size, torch.float32, "everything")


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, memory and instructions."""
    kernel = KERNELS[variant.kernel]
    constants = variant.constants()
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = _type_of(name, variant)
        aligned: tuple[tuple[int, ...], ...] = ()
        if isinstance(signature[name], HeadTensor):
            aligned = tuple((index, field) for field in range(4))
            if signature[name].row_stride == "constexpr":
                constexprs[(index, 3)] = 24 * variant.head_size
                aligned = aligned[:3]
        elif isinstance(signature[name], DropoutArguments):
            aligned = ((index, 0),)
        elif signature[name].startswith("*"):
            aligned = ((index,),)
        attributes.update({path: [["tt.divisibility", 16]] for path in aligned})
    setting = launch_setting(
        variant.kernel, variant.dtype, variant.tile, variant.head_size, variant.capability
    )
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes),
        target=GPUTarget("cuda", variant.sm, 32),
        options=setting.options,
    )
    wavefronts = wavefronts_of_loops(compiled.asm["ptx"], setting.warps)
    return {
        "warps": setting.warps,
        "stages": setting.stages,
        "shared_bytes": compiled.metadata.shared,
        "wavefronts": sum(count for count, _ in wavefronts),
        "least_wavefronts": sum(least for _, least in wavefronts),
        **resources(compiled.asm["cubin"]),
    }


def issue_slots() -> dict[str, dict[str, Any]]:
    """Return the issue slots per tile of the main kernels, with dropout and without.

    For heads of 64 in bfloat16 on sm_90 and dense rows whose length is a multiple of the tile.
    A kernel's slots are the instructions of its main loop, which processes a tile of
    64 x 64 per iteration, times the warps that execute it, over the schedulers of a multiprocessor:
    the cycles that a multiprocessor takes for a tile if it issues an instruction in every one.
    Beside them stand the cycles of shared memory (``benchmarks.lib.shared_memory``), without those
    of matrix products. What programs do once, before and after the loop, is not counted, nor are
    stalls.
    """
    kept = (
        "warps", "stages", "registers", "stack_bytes", "spills_in_loops", "shared_bytes",
        "wavefronts", "least_wavefronts",
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for flags in ("dropout", "plain"):
        kernels: dict[str, Any] = {}
        for kernel in MAIN:
            result = compile_variant(Variant(kernel, 90, 64, torch.bfloat16, flags))
            instructions = max(result["instructions_of_loops"])
            slots = instructions * result["warps"] // SCHEDULERS
            kernels[kernel] = {"slots": slots} | {name: result[name] for name in kept}
        total = sum(kernel["slots"] for kernel in kernels.values())
        found[flags] = {"slots": total, "kernels": kernels}
    return found


def gathered_slots() -> dict[str, Any]:
    """Return the issue slots per row and head of 15 % masked queries among 512 positions.

    Counted as in ``issue_slots``, with dropout, from instructions and how often loops run: the
    kernels of gathered queries multiply by each block of the tables that a tile needs.
    """
    # Here, because it imports what the other counts do not need.
    from benchmarks.attention.operator import masked_positions
    from benchmarks.attention.variants import Case

    rows = masked_positions(Case(32, 1, 512, 0.1))
    spread = issue_slots()["dropout"]["kernels"]
    tiles = (512 // 64) ** 2
    forward = spread["forward"]["slots"] * tiles
    by_row: dict[str, Any] = {
        "queries": rows.shape[1],
        "spread": {
            "forward": forward,
            "backward": sum(kernel["slots"] for kernel in spread.values()) * tiles - forward,
        },
    }
    tile, near = 32, 512 // 32
    pairs, blocks, bands = 0, 0, 0
    for at in (part for row in rows for part in row.split(tile)):
        nearest, farthest = int(at.min()), int(at.max())
        for key_tile in range(512 // tile):
            pairs += 1
            first = nearest - key_tile * tile - tile + 1 + near * tile
            blocks += (farthest - key_tile * tile + near * tile) // tile - max(first, 0) // tile + 1
            bands += farthest // tile - nearest // tile + 1
    repeats = [count / len(rows) for count in (pairs, blocks, bands)]
    slots: dict[str, float] = {}
    for kernel in ("gathered_forward", "gathered_query", "gathered_key"):
        result = compile_variant(Variant(kernel, 90, 64, torch.bfloat16, "masked"))
        *inner, outer = result["instructions_of_loops"]
        counts = [outer - sum(inner), *inner]
        instructions = sum(n * count for n, count in zip(repeats, counts, strict=False))
        slots[kernel] = instructions * result["warps"] / SCHEDULERS
    for kernel, constants in (
        ("key_gradient", {"CONTENT": False, "FAR": True}), ("table_gradient", {"C2P": False})
    ):  # fmt: skip
        variant = _OfPositions(kernel, 90, 64, torch.bfloat16, "plain", overrides=constants)
        result = compile_variant(variant)
        loop = max(result["instructions_of_loops"])
        slots[kernel] = loop * result["warps"] / SCHEDULERS * (512 // tile) ** 2
    by_row["gathered"] = {
        "forward": round(slots.pop("gathered_forward")),
        "backward": round(sum(slots.values())),
        "blocks_per_tile": blocks / pairs,
    }
    return by_row


@dataclasses.dataclass(frozen=True)
class _OfPositions(Variant):
    """Kernel of consecutive queries as the backward pass of gathered queries calls it."""

    overrides: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def tile(self) -> int:
        return tile_size(self.dtype, True, self.capability)

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), **self.overrides}


def _type_of(name: str, variant: Variant) -> Any:
    """Return the type of an argument that is not a compile-time constant."""
    pointer = f"*{_TYPES[variant.dtype]}"
    if name == "DROPOUT":
        return DropoutArguments("*i64", "i32", "fp32", "i32")  # type: ignore[arg-type]
    if name in _FLOATS32:
        return "*fp32"
    if name in _HEAD_TENSORS:
        if name not in _POINTERS.get(variant.kernel, ()):
            constant = not variant.kernel.startswith("gathered")
            row_stride = "constexpr" if constant else "i32"
            return HeadTensor(pointer, "i32", "i32", row_stride)  # type: ignore[arg-type]
        return pointer if variant.kernel == "fold" else "*fp32"
    if name in _INTEGERS:
        return "*i32"
    if name in _SCALARS:
        return "fp32"
    return pointer if name.isupper() else "i32"


def broken_limits(variant: Variant, result: dict[str, Any]) -> list[str]:
    """Return messages on the limits that a compiled kernel exceeds."""
    limits = (limit for name, limit in EXCEPTIONS.items() if re.match(name, variant.name))
    stack, in_loops = next(limits, (STACK_BYTES, 0))
    wrong = []
    if result["stack_bytes"] > stack:
        wrong.append(f"stack {result['stack_bytes']} > {stack} bytes")
    if result["spills_in_loops"] > in_loops:
        wrong.append(f"{result['spills_in_loops']} > {in_loops} accesses to the stack in loops")
    if result["shared_bytes"] > SHARED_BYTES[variant.sm]:
        wrong.append(f"shared memory {result['shared_bytes']} > {SHARED_BYTES[variant.sm]} bytes")
    if result["product_hazards"]:
        wrong.append(f"{result['product_hazards']} accesses to registers of running products")
    if result["atomics"]:
        wrong.append(f"{result['atomics']} atomic instructions, whose order is not fixed")
    multiplies = variant.kernel not in ("fold", "end_products", "end_gradient", "output_products")
    if multiplies and variant.dtype != torch.float32:
        if not result["tensor_core_instructions"]:
            wrong.append("no tensor-core instruction")
        if result["wavefronts"] > CONFLICTS * result["least_wavefronts"]:
            wrong.append(
                f"{result['wavefronts']} cycles of shared memory > {CONFLICTS} x "
                f"{result['least_wavefronts']} without bank conflicts"
            )
    return [f"{variant.name}: {message}" for message in wrong]


def main() -> int:
    """Compile the variants, write the report and check the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="regular expression of variant names")
    parser.add_argument("--slots", type=Path, help="only count issue slots, into this file")
    parser.add_argument("--gathered", action="store_true", help="slots of the mask decoder")
    parser.add_argument("--label", default="now", help="name of the counts in this file")
    arguments = parser.parse_args()
    if arguments.slots is not None and arguments.gathered:
        by_row = gathered_slots()
        write_by_version(arguments.slots, {arguments.label: by_row}, keep=True)
        print(by_row)
        return 0
    if arguments.slots is not None:
        counts = issue_slots()
        write_by_version(arguments.slots, {arguments.label: counts}, keep=True)
        for flags, count in counts.items():
            by_kernel = {name: kernel["slots"] for name, kernel in count["kernels"].items()}
            print(flags, count["slots"], by_kernel)
        return int(any(count["slots"] > SLOTS[flags] for flags, count in counts.items()))
    results, wrong = {}, []
    for variant in variants(arguments.quick):
        if not re.search(arguments.only, variant.name):
            continue
        results[variant.name] = compile_variant(variant)
        wrong += broken_limits(variant, results[variant.name])
        print(variant.name, results[variant.name], flush=True)
    if arguments.output is not None:
        write_by_version(arguments.output, results, keep=bool(arguments.only))
    print("\n".join(wrong) or "within all limits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
