"""Triton kernels compiled without a GPU: registers, memory and instructions by architecture."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import provenance
from benchmarks.lib.wgmma import wgmma_hazards

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Atomics on global memory; those on shared memory (``ATOMS``) allocate Blackwell's tensor memory.
ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")


def resources(cubin: bytes) -> dict[str, Any]:
    """Return registers, stack and instructions of a compiled kernel, counted in its disassembly.

    Raises:
        ValueError: the tools that Triton ships print something else.
    """
    usage = _output("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump: got {usage[:200]!r}, expected REG and STACK")
    disassembly = _output("nvdisasm", "-c", cubin)
    names, loops = _instructions(disassembly)
    counts = Counter(names)
    in_loops = set().union(*(range(*loop) for loop in loops))
    tensor_core = sum(n for name, n in counts.items() if name.endswith("MMA"))
    return {
        "registers": int(found.group(1)),
        "stack_bytes": int(found.group(2)),
        "instructions": sum(counts.values()),
        "instructions_of_loops": [end - begin for begin, end in loops],
        "spill_stores": counts["STL"],
        "spill_loads": counts["LDL"],
        "spills_in_loops": sum(names[i] in ("STL", "LDL") for i in in_loops),
        "tensor_core_instructions": tensor_core,
        "product_hazards": len(wgmma_hazards(disassembly)),
        "shuffles": counts["SHFL"],
        "barriers": counts["BAR"],
        "atomics": sum(counts[name] for name in ATOMICS),
    }


def _instructions(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the names of a kernel's instructions, and the index ranges of its loops."""
    line = re.compile(r"\s*(?:/\*[0-9a-f]{4,}\*/)?\s+(?:@!?U?P\d+ )?\s*([A-Z][A-Z0-9_]+)([^;]*);")
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    ended = False
    for text in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", text):
            labels[label.group(1)] = len(names)
        if found := line.match(text):
            names.append(found.group(1))
            ended = ended or (names[-1] == "EXIT" and "@" not in text)
            target = re.search(r"\.L_x_\d+", found.group(2)) if found.group(1) == "BRA" else None
            # Branches after the end, and shorter loops, wait for barriers.
            if target and not ended and len(names) - labels.get(target.group(), len(names)) > 60:
                loops.append((labels[target.group()], len(names)))
    return names, loops


def _output(tool: str, option: str, cubin: bytes) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([folder / tool, option, file.name], capture_output=True, check=True)
    return (done.stdout + done.stderr).decode()


def narrow_accesses(cubin: bytes) -> int:
    """Return the loads and stores of global memory that move less than 8 bytes per thread."""
    return len(
        re.findall(r"\b(?:LDG|STG)\.E(?!\S*\.(?:64|128)\b)", _output("nvdisasm", "-c", cubin))
    )


def write_by_version(path: Path, results: dict[str, Any], *, keep: bool = False) -> None:
    """Write the results of the installed Triton beside those of other versions.

    Args:
        path: JSON file.
        results: by variant.
        keep: keep this version's other variants.
    """
    by_version = read_json(path, {"by_triton_version": {}})["by_triton_version"]
    earlier = by_version.get(triton.__version__, {}) if keep else {}
    by_version[triton.__version__] = {**earlier, **results}
    write_json(path, {"provenance": provenance(), "by_triton_version": by_version})
