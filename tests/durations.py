"""Seconds of every test file, from the report of the last ``tests/run.sh``.

The committed result shows which files are slow, and the longest files start first.

  tests/run.sh --all && python -m tests.durations
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.lib.provenance import ROOT, provenance

REPORT = ROOT / ".pytest_cache" / "junit.xml"
OUTPUT = ROOT / "benchmarks" / "results" / "tests" / "durations.json"
SLOWEST = 60


def seconds_of_files(output: Path = OUTPUT) -> dict[str, float]:
    """Return the committed seconds of test files; empty if there are none."""
    if not output.exists():
        return {}
    files: dict[str, float] = json.loads(output.read_text(encoding="utf-8"))["files"]
    return files


def read_report(report: Path) -> dict[str, object]:
    """Sum the seconds of a JUnit report by file, longest first, and list the slowest tests."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.attrib["classname"].split(".")
        # The name of a class, if any, is behind that of the module.
        while module and not ROOT.joinpath(*module).with_suffix(".py").exists():
            module.pop()
        if not module:  # a skipped module
            continue
        file, seconds = "/".join(module) + ".py", float(case.attrib["time"])
        files[file] += seconds
        tests[f"{file}::{case.attrib['name']}"] += seconds
    return {
        "seconds": round(files.total(), 1),
        "tests": len(tests),
        "files": {file: round(seconds, 1) for file, seconds in files.most_common()},
        "slowest": {test: round(seconds, 1) for test, seconds in tests.most_common(SLOWEST)},
    }


def main() -> None:
    """Write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help="JUnit report of pytest")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = provenance() | read_report(args.report)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
