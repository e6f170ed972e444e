"""Cycles of shared-memory accesses against what the hardware's rule gives by hand."""

from __future__ import annotations

import pytest

from benchmarks.lib.shared_memory import wavefronts_of_loops

LOOP = """
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 31;
    {address}
$L__BB0_1:
    {access}
    @%p1 bra $L__BB0_1;
"""


@pytest.mark.parametrize(
    ("address", "access", "expected"),
    [
        # Consecutive words: one cycle for each of two warps.
        ("shl.b32 %r3, %r2, 2;", "ld.shared.b32 %r4, [%r3+16];", (2, 2)),
        # Lanes 128 bytes apart share a bank.
        ("shl.b32 %r3, %r2, 7;", "ld.shared.b16 %r4, [%r3];", (64, 2)),
        ("shl.b32 %r3, %r2, 7;", "st.shared.b32 [%r3], %r4;", (64, 2)),
        # All lanes read one word.
        ("mov.b32 %r3, 64;", "ld.shared.b32 %r4, [%r3];", (2, 2)),
        # 16 bytes per lane: eight lanes at once.
        ("shl.b32 %r3, %r2, 4;", "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};", (8, 8)),
        ("shl.b32 %r3, %r2, 5;", "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];", (16, 8)),
        # Rows of an 8 x 8 matrix at a distance of 128 bytes, and one after the other.
        ("shl.b32 %r3, %r2, 7;",
         "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];", (64, 8)),
        ("mul.lo.s32 %r3, %r2, 16;",
         "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];", (8, 8)),
        ("mad.lo.s32 %r3, %r2, 16, 256;",
         "cp.async.cg.shared.global [%r3+0], [%rd1+0], 0x10, %r8;", (8, 8)),
        # A swizzled column of a tile: row r is rotated by its number.
        ("shl.b32 %r3, %r2, 7;\n    shl.b32 %r9, %r2, 2;\n    xor.b32 %r3, %r3, %r9;",
         "ld.shared.b32 %r4, [%r3];", (2, 2)),
    ],
)  # fmt: skip
def test_accesses_take_a_cycle_per_word_of_the_busiest_bank(
    address: str, access: str, expected: tuple[int, int]
) -> None:
    ptx = LOOP.replace("{address}", address).replace("{access}", access)
    assert wavefronts_of_loops(ptx, 2) == [expected]


def test_accesses_outside_of_loops_do_not_count() -> None:
    ptx = "    ld.shared.b32 %r4, [%r3];\n" + LOOP.format(address="", access="")
    assert wavefronts_of_loops(ptx, 1) == [(0, 0)]
