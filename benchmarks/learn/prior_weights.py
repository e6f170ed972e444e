"""Measure predictions of held-out words with several weights and floors of the prior.

Each row is the mean over ``--tables`` tables of 40 words of ``tools/fill_held_out.py``. Finished
rows are kept when the program starts again.

    launch/quickstart.sh
    python -m benchmarks.learn.prior_weights --quickstart runs/quickstart \
        --output benchmarks/results/cpu/prior_weights.json
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tqdm import tqdm

from benchmarks.learn.quickstart_recipes import fill_held_out
from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import provenance
from megatron_deberta.checkpoint.layout import committed_steps

PRIORS = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.002))
"""Weight and floor."""


def main() -> None:
    """Measure the rows that the result file lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quickstart", type=Path, nargs="+", required=True,
        help="folders of quickstarts, of different numbers of steps",
    )  # fmt: skip
    parser.add_argument("--tables", type=int, default=60, help="tables of 40 words (60)")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    record = read_json(args.output, {"rows": []})
    done = {(row["steps"], row["weight"], row["floor"]) for row in record["rows"]}
    for quickstart in map(Path.resolve, args.quickstart):
        steps = max(committed_steps(quickstart / "run"))
        for weight, floor in PRIORS:
            if (steps, weight, floor) in done:
                continue
            tables = [
                fill_held_out(
                    quickstart, quickstart / "exported", "--seed", str(seed),
                    "--prior-weight", str(weight), "--prior-floor", str(floor),
                )
                for seed in tqdm(range(args.tables), desc=f"{steps} steps, {weight:g}, {floor:g}")
            ]  # fmt: skip
            right, most_frequent = zip(*tables, strict=True)
            row = {"steps": steps, "weight": weight, "floor": floor, "tables": args.tables}
            for name, values in (("right", right), ("most_frequent", most_frequent)):
                error = statistics.stdev(values) / args.tables**0.5
                row |= {name: statistics.mean(values), f"{name}_error": error}
            record["rows"].append(row | provenance())
            write_json(args.output, record)


if __name__ == "__main__":
    main()
