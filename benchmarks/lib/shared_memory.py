"""Cycles that a kernel's shared-memory accesses take, counted from its PTX without a GPU.

Shared memory serves each of 32 banks with one word of 4 bytes per cycle. A warp's access takes as
many cycles (wavefronts) as the words of its busiest bank; the fewest are those of an access whose
words are spread over all banks. Addresses are computed from the thread's index: all integer
instructions are evaluated once for the threads of a program, with 0 for what is not known, such as
kernel arguments and values in memory. Reads of matrix products are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LANES, BANKS, WORD = 32, 32, 4
ROW_BYTES = 16
"""Of a row of ``ldmatrix`` and ``stmatrix``: eight lanes give the rows of one 8 x 8 matrix."""

Values = NDArray[np.int64]
_ACCESS = re.compile(r"(ld|st)\.shared|(ld|st)matrix|cp\.async\.c[ag]\.shared")
_OPERATIONS: dict[str, Callable[..., Values]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: np.left_shift(a, np.clip(b, 0, 63)),
    "shr": lambda a, b: np.right_shift(a, np.clip(b, 0, 63)),
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "min": np.minimum,
    "max": np.maximum,
    "bfe": lambda a, b, c: (a >> np.clip(b, 0, 63)) & ((1 << np.clip(c, 0, 62)) - 1),
    "selp": lambda a, b, c: a * (c != 0) + b * (c == 0),
}
_COMPARISONS: dict[str, Callable[..., Values]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


class Access(NamedTuple):
    """One access of all warps of a program.

    Attributes:
        line: of the PTX, from 0.
        wavefronts: cycles.
        least: cycles without bank conflicts.
    """

    line: int
    wavefronts: int
    least: int


def wavefronts_of_loops(ptx: str, warps: int) -> list[tuple[int, int]]:
    """Return the wavefronts per iteration of each loop, and those without bank conflicts.

    Args:
        ptx: of one kernel.
        warps: of a program.
    """
    accesses = _accesses(ptx, warps)
    found = []
    for begin, end in _loops(ptx):
        inside = [access for access in accesses if begin <= access.line <= end]
        found.append((sum(a.wavefronts for a in inside), sum(a.least for a in inside)))
    return found


def wavefronts(addresses: Values, width: int) -> int:
    """Return the wavefronts of an access of ``width`` bytes per lane.

    Args:
        addresses: of the lanes that are served together, in bytes, int64 ``[lanes]``.
        width: bytes per lane.
    """
    words = {int(at) // WORD + i for at in addresses for i in range(max(1, width // WORD))}
    return int(np.bincount([word % BANKS for word in words]).max())


def _loops(ptx: str) -> list[tuple[int, int]]:
    """Return the first and the last line of each loop."""
    labels: dict[str, int] = {}
    found = []
    for number, line in enumerate(ptx.splitlines()):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label.group(1)] = number
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if branch and branch.group(1) in labels:
            found.append((labels[branch.group(1)], number))
    return found


def _accesses(ptx: str, warps: int) -> list[Access]:
    registers: dict[str, Values] = {"%tid.x": np.arange(LANES * warps)}
    zeros = np.zeros(LANES * warps, np.int64)

    def value(operand: str) -> Values:
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", operand):
            number = int(operand, 0)
            return zeros + (number if abs(number) < 2**63 else 0)
        return registers.get(operand, zeros)

    found = []
    for index, line in enumerate(ptx.splitlines()):
        instruction = re.match(r"[\s{]*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^/]*);", line)
        if not instruction:
            continue
        name, rest = instruction.groups()
        address = re.search(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", rest)
        if _ACCESS.match(name) and address:
            start = value(address.group(1)) + int(address.group(2) or 0)
            found.append(Access(index, *_cost(name, rest, start)))
            continue
        target, *operands = re.split(r"\s*,\s*", rest.strip())
        kind, *types = name.split(".")
        if kind == "setp":
            compare = _COMPARISONS.get(types[0], np.equal)
            registers[target] = compare(*map(value, operands[:2])).astype(np.int64)
        elif kind in _OPERATIONS and "{" not in rest and "f" not in types[-1]:
            result = _OPERATIONS[kind](*map(value, operands))
            stored = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32}.get(types[-1], np.int64)
            registers[target] = result.astype(stored).astype(np.int64)
    return found


def _cost(name: str, operands: str, start: Values) -> tuple[int, int]:
    """Return the wavefronts of an access by all warps, and those without bank conflicts."""
    lanes = start.reshape(-1, LANES)
    if "matrix" in name:
        matrices = int(re.findall(r"\.x(\d)", name)[0])
        groups, width = lanes[:, : 8 * matrices].reshape(-1, 8), ROW_BYTES
    else:
        if name.startswith("cp.async"):
            width = int(re.findall(r"\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", operands)[0], 0)
        else:
            vector = re.search(r"\.v(\d)", name)
            bits = int(re.findall(r"\.[bufs](\d+)$", name)[0])
            width = bits // 8 * (int(vector.group(1)) if vector else 1)
        # 128 bytes at most are served at once.
        groups = lanes.reshape(-1, min(LANES, BANKS * WORD // width))
    return sum([wavefronts(group, width) for group in groups]), len(groups)
