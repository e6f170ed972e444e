"""Tables of the attention operator and of its Triton kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.attention.variants import EAGER, Case
from benchmarks.tables.common import Result, markdown

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def kernels(record: Result) -> str:
    """Instructions of each kernel by GPU architecture, and the largest stack of its variants."""
    versions: dict[str, Any] = record["by_triton_version"]
    newest = max(versions, key=lambda version: tuple(map(int, version.split("."))))
    by_kernel: dict[str, dict[str, dict[str, int]]] = {}
    for name, variant in versions[newest].items():
        by_kernel.setdefault(name.split()[0], {})[name] = variant
    rows = [
        (
            f"`{kernel}`",
            *(_instructions(kernel, architecture, variants) for architecture in ARCHITECTURES),
            *_stack(variants),
        )
        for kernel, variants in by_kernel.items()
    ]
    columns = ("kernel", *ARCHITECTURES, "largest stack, bytes", "variants with spills in loops")
    others = "".join(
        "; with Triton {}: {} bytes, {} variants".format(version, *_stack(variants))
        for version, variants in versions.items()
        if version != newest
    )
    return markdown(columns, rows) + (
        f"\n(Instructions for heads of 64 in bfloat16 with dropout, or of the full variant where "
        f"marked *. Stack and spills over all {len(versions[newest])} variants, Triton "
        f"{newest}{others}.)\n"
    )


def _instructions(kernel: str, architecture: str, variants: dict[str, dict[str, int]]) -> str:
    for options, mark in (("dropout", ""), ("everything", " *")):
        variant = variants.get(f"{kernel} {architecture} d=64 bf16 {options}")
        if variant is not None:
            return f"{variant['instructions']:,}{mark}"
    return ""


def _stack(variants: dict[str, dict[str, int]]) -> tuple[str, str]:
    """Largest stack, and the number of variants that access it in a loop."""
    largest = max(variant["stack_bytes"] for variant in variants.values())
    return str(largest), str(sum(variant["spills_in_loops"] > 0 for variant in variants.values()))


def batched(record: Result) -> str:
    """Work of a layer's attention on GPUs without fused kernels, and its time at peak rates."""
    header = ("forward and backward of a layer", "computed", "GFLOP", "GB", "operators",
              "V100: ms of products, of memory traffic")  # fmt: skip
    rows = []
    for row in record["results"]:
        case, dropout = row["case"], row["dropout"]
        name = f"{case['name']}, {case['rows']} rows" + (", dropout" if dropout else "")
        sides = {"per_head": "head by head, fp32", "batched": "all heads, fp16",
                 "efficient": "`efficient`, fp16"}  # fmt: skip
        for side, title in sides.items():
            if side not in row:
                continue
            forward, backward = row[side].values()
            total = {key: value + backward[key] for key, value in forward.items()}
            flops = total.get("float16", 0) + total.get("float32", 0)
            rows.append((
                name if side == "per_head" else "", title, f"{flops / 1e9:.0f}",
                f"{total['bytes'] / 1e9:.1f}", f"{total['operators']:,}",
                f"{total['products_ms']:.1f}, {total['memory_ms']:.1f}",
            ))  # fmt: skip
    return markdown(header, rows)


def interpreted(record: Result) -> str:
    """Errors of long rows against an fp64 reference."""
    rows = []
    for name, case in record["cases"].items():
        gradients = max(case["errors"][key] for key in ("q", "k", "v", "pos_key", "pos_query"))
        output = case["errors"]["output"]
        cells = (f"{error:.1e}" for error in (output, gradients, case["limit"]))
        rows.append((name, f"`{case['oracle']}`, float64", *cells))
    return markdown(("row", "compared with", "output", "largest gradient error", "limit"), rows)


def summary(record: Result) -> str:
    """Speed and memory of the operator against transformers' eager form, in short."""
    header = ("attention operator alone, forward and backward", "speed / eager",
              "peak memory, MiB: ours / eager")  # fmt: skip
    rows = []
    for row in record["cases"]:
        variants = row["variants"]
        ours, eager = variants.get("native") or variants["chunked"], variants[EAGER]
        rows.append((
            Case(**row["case"]).name,
            f"{eager['milliseconds']['both'] / ours['milliseconds']['both']:.1f}x",
            f"{ours['peak_mib']:.0f} / {eager['peak_mib']:.0f}",
        ))  # fmt: skip
    return markdown(header, rows) + (
        f"\n({record['hardware']}, {record['cores']} cores, {record['threads']} threads, torch "
        f"{record['torch']}.)\n"
    )


def operator(record: Result) -> str:
    """Time, memory and error of the attention operator's backends and peers."""
    header = ("case", "variant", "forward, ms", "forward + backward, ms", "speed / flash",
              "peak memory, MiB", "error")  # fmt: skip
    cells = []
    for row in record.get("cases") or record["items"].values():
        case = Case(**row["case"]).name
        for name, found in row["variants"].items():
            times = found.get("milliseconds")
            if times is None:
                cells.append((case, name, found["not run"], "", "", "", ""))
            else:
                floor, peak = found.get("fraction_of_floor"), found.get("peak_mib")
                both, forward = (
                    f"{times[key]:,.0f}" if times[key] >= 100 else f"{times[key]:.3g}"
                    for key in ("both", "forward")
                )
                cells.append((
                    case, name, forward, both,
                    f"{floor:.2f}" if floor else "", f"{peak:,.0f}" if peak is not None else "",
                    f"{max(found['errors'].values()):.0e}" if "errors" in found else "",
                ))  # fmt: skip
            case = ""
    return markdown(header, cells) + (
        f"\n({record['hardware']}, {record['cores']} cores, load {record['load']:.1f}, "
        f"torch {record['torch']}.)\n"
    )
