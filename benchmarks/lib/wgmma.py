"""Check of compiled Hopper kernels: registers of asynchronous matrix products are left alone.

A warpgroup's matrix products (``HGMMA``) run asynchronously: their accumulators, and operand A if
it is in registers, must not be written, nor the accumulators read, before a
``WARPGROUP.DEPBAR.LE gsb0, N`` has waited for their group. Compilers have emitted such accesses
(triton-lang/triton#9433, #11781). The check follows all paths through the disassembly.

The format of the instructions::

    HGMMA.64x32x16.F32.BF16 R72, R148, gdesc[UR20].tnspB, R72, gsb0

Accumulators from R72 on, operand A from R148 on or in shared memory (``gdesc``); ``gsb0`` ends a
group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(
    r"\s*(?:/\*[0-9a-f]{4,}\*/)?\s+(?P<predicate>@!?U?P\w+ )?\s*(?P<name>[A-Z][A-Z0-9_.a-z]+)"
    r"(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"(\.L_x_\d+):")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_SHAPE = re.compile(r"HGMMA\.64x(\d+)x\d+\.(F32|F16)")
# Registers per thread of operand A: 64 rows of 32 bytes, of 128 threads.
_A_REGISTERS = 4
_MAX_GROUPS = 16
# Instructions whose first register is read.
_WITHOUT_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "WARP", "DEPBAR", "MEMBAR", "FENCE", "SYNCS",
                   "UBLKCP", "UTMA", "R2UR", "CCTL", "NOP", "ISETP", "FSETP", "HSETP2", "PLOP3",
                   "LDGSTS", "LDGDEPBAR", "ERRBAR", "R2P", "VOTE.")  # fmt: skip


@dataclass(frozen=True)
class _Instruction:
    name: str
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    accumulators: frozenset[int] = frozenset()
    operand_a: frozenset[int] = frozenset()
    target: str = ""
    ends: bool = False


@dataclass(frozen=True)
class _Group:
    accumulators: frozenset[int] = frozenset()
    operand_a: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _State:
    """Groups of products that may be running: finished ones, oldest first, and the open one."""

    committed: tuple[_Group, ...] = ()
    opened: _Group = field(default_factory=_Group)

    @property
    def accumulators(self) -> frozenset[int]:
        return frozenset().union(*(g.accumulators for g in (*self.committed, self.opened)))

    @property
    def operand_a(self) -> frozenset[int]:
        return frozenset().union(*(g.operand_a for g in (*self.committed, self.opened)))


def wgmma_hazards(disassembly: str) -> list[str]:
    """Return the accesses to registers of matrix products that may still be running.

    Args:
        disassembly: of a kernel for sm_90, from ``nvdisasm -c``.

    Returns:
        One message per instruction, in order; empty without hazards.
    """
    code, labels = _parse(disassembly)
    found: dict[int, str] = {}
    left, seen = [(0, _State())], set()
    while left:
        index, state = left.pop()
        if index >= len(code) or (index, state) in seen:
            continue
        seen.add((index, state))
        instruction = code[index]
        if message := _conflict(instruction, state):
            found[index] = f"{message}: {instruction.text}"
        state = _after(instruction, state)
        if instruction.target in labels:
            left.append((labels[instruction.target], state))
        if not instruction.ends:
            left.append((index + 1, state))
    return [found[index] for index in sorted(found)]


def _conflict(instruction: _Instruction, state: _State) -> str:
    is_product = bool(instruction.accumulators)
    if instruction.writes & state.operand_a:
        return "overwrites operand A of a running product"
    # A product may add to the accumulators of an earlier one.
    if not is_product and instruction.writes & state.accumulators:
        return "overwrites accumulators of a running product"
    reads = instruction.operand_a if is_product else instruction.reads
    return "reads accumulators of a running product" if reads & state.accumulators else ""


def _after(instruction: _Instruction, state: _State) -> _State:
    if instruction.accumulators:
        product = _Group(instruction.accumulators, instruction.operand_a)
        opened = _merged(state.opened, product)
        if "gsb0" in instruction.text:
            committed = (*state.committed, opened)
            if len(committed) > _MAX_GROUPS:
                # Otherwise a loop without a wait would have no end here.
                committed = (_merged(committed[0], committed[1]), *committed[2:])
            return _State(committed)
        return _State(state.committed, opened)
    waits = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", instruction.text)
    if waits:
        running = int(waits[1], 16)
        return _State(state.committed[-running:] if running else (), state.opened)
    return state


def _merged(a: _Group, b: _Group) -> _Group:
    return _Group(a.accumulators | b.accumulators, a.operand_a | b.operand_a)


def _parse(disassembly: str) -> tuple[list[_Instruction], dict[str, int]]:
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        if found := _LINE.match(line):
            code.append(_instruction(found))
    return code, labels


def _instruction(found: re.Match[str]) -> _Instruction:
    name, operands = found["name"], found["operands"]
    text = f"{name}{operands}".strip()
    if shape := _SHAPE.match(name):
        count = int(shape[1]) // (2 if shape[2] == "F32" else 4)
        first, second, *_ = operands.split(",")
        accumulators = _range(first, count)
        operand_a = frozenset() if "gdesc" in second else _range(second, _A_REGISTERS)
        return _Instruction(name, text, operand_a, accumulators, accumulators, operand_a)
    target = re.search(r"\.L_x_\d+", operands) if name.startswith("BRA") else None
    ends = name.split(".")[0] in ("EXIT", "BRA") and found["predicate"] is None
    registers = list(_REGISTER.finditer(operands))
    has_result = not name.startswith(_WITHOUT_RESULT)
    writes: frozenset[int] = frozenset()
    if has_result and registers:
        writes = _range(registers.pop(0)[0], _width(name))
    wide = 1 if has_result else _width(name)
    reads: set[int] = set()
    for register in registers:
        before = operands[: register.start()]
        is_address = before.count("[") > before.count("]")
        reads |= _range(register[0], 2 if register[2] else 1 if is_address else wide)
    return _Instruction(
        name, text, frozenset(reads), writes, target=target[0] if target else "", ends=ends
    )


def _range(operand: str, count: int) -> frozenset[int]:
    first = _REGISTER.search(operand)
    return frozenset(range(int(first[1]), int(first[1]) + count)) if first else frozenset()


def _width(name: str) -> int:
    """Return the registers of a load's result, a store's value or a wide product."""
    if name.startswith("LDSM") or name.startswith("STSM"):
        return int(name.rsplit(".", 1)[-1]) if name[-1] in "24" else 1
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name.startswith("CS2R") else 1
