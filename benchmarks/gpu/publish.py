"""Convert the suite's results to the committed result files that the tables are made from.

    python -m benchmarks.gpu.publish runs/gpu_suite benchmarks/results/cuda
    python -m benchmarks.gpu.publish runs/first_contact benchmarks/results/h100
    python -m benchmarks.tables --write

The first is the folder of ``benchmarks.gpu.suite``, whose items that failed a check or could not
run are left out; the second that of ``benchmarks.gpu.first_contact``, which is kept whole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.first_contact import read_stages
from benchmarks.learn.ablations import plot
from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import revision, source_digest
from benchmarks.step.parts import draw

# Result file by comparison of ``benchmarks/step/compare.py``.
FILES = {"huggingface": "step", "peers": "peers", "disentanglement": "disentanglement"}
MACHINE = ("hardware", "cores", "torch", "revision", "source")


def publish(suite_results: Path, results: Path) -> list[Path]:
    """Write result files.

    Args:
        suite_results: ``--out`` of the suite.
        results: folder of the committed results of that device.

    Returns:
        The written files.
    """
    stages = suite_results / "stages.jsonl"
    if stages.exists():
        return [publish_first_contact(read_stages(stages), results / "first_contact.json")]
    parts = {path.stem: json.loads(path.read_text()) for path in suite_results.glob("*.json")}
    written = []
    for part, name in (("attention", "attention"), ("parity", "parity"), ("step", "large_step")):
        if part in parts:
            valid = {n: i for n, i in parts[part]["items"].items() if is_valid(i)}
            written.append(results / f"{name}.json")
            write_json(written[-1], {**parts[part], "items": valid})
    profiled = profile_of(parts.get("step"))
    if profiled is not None:
        written.append(results / "profile.json")
        write_json(written[-1], profiled)
        draw(profiled, results / "profile.png")
    for comparison, name in FILES.items():
        rows = rows_of(parts.get("peers"), comparison)
        if rows:
            tokens = {row.pop("tokens") for row in rows}.pop()
            written.append(results / f"{name}.json")
            write_json(written[-1], {"tokens": tokens, "threads": 1, "results": rows})
    if "learning_curves" in parts:
        written.append(results / "learn.json")
        write_json(written[-1], parts["learning_curves"])
        plot(parts["learning_curves"], results / "learn.png")
    return written


def publish_first_contact(stages: list[dict[str, Any]], target: Path) -> Path:
    """Write the stages of a first contact; return the file.

    The copy on the GPU's machine has no repository, or an older one: its revision is this
    checkout's if both have the same source.
    """
    for stage in stages:
        if stage["source"] == source_digest():
            stage["revision"] = revision()
    write_json(target, {"stages": stages})
    return target


def is_valid(item: dict[str, Any]) -> bool:
    """Return whether an item ran and passed its checks."""
    return "error" not in item and not item.get("wrong")


def profile_of(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the time by part of the first valid step, as ``benchmarks.step.compare`` writes it."""
    for name, item in ({} if part is None else part["items"]).items():
        if part is not None and is_valid(item) and "seconds_by_part" in item:
            place = {key: part[key] for key in (*MACHINE, "load")}
            return {"name": f"1.5b_h100, {name}", **item, "provenance": place}
    return None


def rows_of(part: dict[str, Any] | None, comparison: str) -> list[dict[str, Any]]:
    """Return the cases of one comparison, each with hardware and versions."""
    if part is None:
        return []
    place = {key: part[key] for key in MACHINE}
    return [
        {**item, **place}
        for name, item in part["items"].items()
        if name.startswith(f"{comparison}: ") and is_valid(item)
    ]


def main() -> None:
    """Publish one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite_results", type=Path, metavar="OUT", help="--out of the suite")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="benchmarks/results/DEVICE")
    args = parser.parse_args()
    for path in publish(args.suite_results, args.results):
        print(path)


if __name__ == "__main__":
    main()
