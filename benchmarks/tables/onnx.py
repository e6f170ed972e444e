"""Tables of ONNX graphs: speed, filled masks, accuracy."""

from __future__ import annotations

from benchmarks.tables.common import NOTHING, Result, markdown, place

_GRAPHS = {"rows": "classification", "fill-mask": "fill-mask"}


def speed(record: Result) -> str:
    """Speed against transformers, by wall-clock and by processor time."""
    if "speed" not in record:
        return NOTHING
    header = ("graph", "format", "batch x length", "ms",
              "speed-up over transformers in torch: wall clock / CPU",
              "over torch's export of it: wall clock / CPU")  # fmt: skip
    rows = []
    for result in record["speed"]["results"]:
        for case in result["cases"]:
            rows.append((
                _GRAPHS[result["graph"]], result["dtype"], f"{case['batch']} x {case['length']}",
                f"{case['seconds']['onnx'] * 1e3:.0f}",
                _ratios(case, "transformers"), _ratios(case, "transformers_onnx"),
            ))  # fmt: skip
    first = record["speed"]["results"][0]
    note = f"\n{first['layers']} layers of base width, {first['threads']} thread.\n"
    return markdown(header, rows) + note + place(record["speed"]["provenance"])


def accuracy(record: Result) -> str:
    """Scores of the formats on a task, and file sizes."""
    if "accuracy" not in record:
        return NOTHING
    results = record["accuracy"]["results"]
    first = results[0]
    header = ("format", f"{first['task']} {first['metric']}, {first['examples']} examples", "MB")
    rows = [("torch, fp32", f"{first['torch']:.2%}", "")]
    rows += [(row["dtype"], f"{row['onnx']:.2%}", f"{row['bytes'] / 1e6:.1f}") for row in results]
    return markdown(header, rows)


def fill_mask(record: Result) -> str:
    """Agreement of filled masks with torch."""
    if "fill-mask" not in record:
        return NOTHING
    found = record["fill-mask"]["results"]
    header = ("sentences", "masks", "same first answer", "largest difference of a probability")
    cells = (f"{found['sentences']:,}", f"{found['masks']:,}", f"{found['same_first_answer']:,}",
             f"{found['largest_difference_of_probability']:.1e}")  # fmt: skip
    return markdown(header, [cells])


def _ratios(case: Result, side: str) -> str:
    if side not in case["seconds"]:
        return ""
    return " / ".join(
        f"{case[clock][side] / case[clock]['onnx']:.2f}x" for clock in ("seconds", "cpu_seconds")
    )
