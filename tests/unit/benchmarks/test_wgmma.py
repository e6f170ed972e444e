"""Registers of asynchronous matrix products, in disassembly as ``nvdisasm`` prints it."""

from __future__ import annotations

import pytest

from benchmarks.lib.wgmma import wgmma_hazards

# Two products of one group with A in registers 144 to 151, accumulators 72 to 87.
PRODUCTS = """
        /*2710*/                   WARPGROUP.ARRIVE ;
        /*2720*/                   HGMMA.64x32x16.F32.BF16 R72, R144, gdesc[UR24].tnspB, R72 ;
        /*2730*/                   HGMMA.64x32x16.F32.BF16 R72, R148, gdesc[UR20].tnspB, R72, gsb0 ;
"""
WAIT = "        /*2740*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
END = "        /*2900*/                   EXIT ;\n"


def line(instruction: str) -> str:
    return f"        /*2800*/                   {instruction} ;\n"


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("FADD R144, R2, R3", "overwrites operand A"),
        ("@P0 MOV R151, R2", "overwrites operand A"),
        ("LDSM.16.MT88.4 R142, [R9]", "overwrites operand A"),
        ("LDS.64 R71, [R9]", "overwrites accumulators"),
        ("FMUL R3, R87, R2", "reads accumulators"),
        ("STG.E.128 desc[UR4][R2.64], R84", "reads accumulators"),
        ("STS.128 [R88], R70", "reads accumulators"),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR20][R71.64], !P0", "reads accumulators"),
        ("SHFL.BFLY PT, R4, R72, 0x1, 0x1f", "reads accumulators"),
        ("HGMMA.64x32x16.F32.BF16 R144, gdesc[UR4], RZ, !UPT", "overwrites operand A"),
    ],
)
def test_accesses_before_the_wait_are_found(instruction: str, message: str) -> None:
    (found,) = wgmma_hazards(PRODUCTS + line(instruction) + WAIT + END)
    assert found.startswith(message)
    assert not wgmma_hazards(PRODUCTS + WAIT + line(instruction) + END)


@pytest.mark.parametrize(
    "instruction",
    [
        "FADD R143, R152, R71",
        "FADD R88, R144, R3",
        "STS [R9], R144",
        "STS.128 [R71], R88",
        "LDGSTS.E.BYPASS.128 [R70+0x800], desc[UR20][R70.64], !P0",
        "ISETP.GE.AND P0, PT, R144, R3, PT",
        "HGMMA.64x32x16.F32.BF16 R72, R152, gdesc[UR20].tnspB, R72, gsb0",
    ],
)
def test_other_accesses_are_allowed(instruction: str) -> None:
    assert not wgmma_hazards(PRODUCTS + line(instruction) + WAIT + END)


def test_a_wait_for_all_but_one_group_frees_the_older_one() -> None:
    second = PRODUCTS.replace("R72", "R40").replace("R144", "R96").replace("R148", "R100")
    wait = WAIT.replace("0x0", "0x1")
    assert not wgmma_hazards(PRODUCTS + second + wait + line("FADD R72, R72, R3") + END)
    assert wgmma_hazards(PRODUCTS + second + wait + line("FADD R40, R40, R3") + END)


def test_products_run_on_into_the_next_iteration() -> None:
    """The loop's first instruction overwrites an operand of the iteration before."""
    loop = ".L_x_1:\n" + line("MOV R144, R2") + PRODUCTS + line("@P0 BRA `(.L_x_1)")
    assert len(wgmma_hazards(loop + WAIT + END)) == 1
    waiting = ".L_x_1:\n" + line("MOV R144, R2") + PRODUCTS + WAIT + line("@P0 BRA `(.L_x_1)")
    assert not wgmma_hazards(waiting + END)
