"""Held-out words of a quickstart's model, ranked with several weights and floors of the prior.

Each row is the sum of ``--samples`` samples of 400 words of ``tools/fill_held_out.py``. Finished
rows are kept when the program starts again.

    launch/quickstart.sh
    python -m benchmarks.learn.prior_weights --quickstart runs/quickstart \
        --output benchmarks/results/cpu/prior_weights.json
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.learn.quickstart_recipes import held_out_words
from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import provenance

PRIORS = ((0.0, 0.0), (0.5, 0.0), (0.75, 0.0), (1.0, 0.005), (1.0, 0.01))
"""Weight and floor."""


def main() -> None:
    """Measure the rows that the result file lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quickstart", type=Path, required=True, help="folder of a quickstart")
    parser.add_argument("--samples", type=int, default=8, help="samples of 400 words (8)")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    quickstart = args.quickstart.resolve()
    record = read_json(args.output, {"rows": []})
    done = {(row["weight"], row["floor"]) for row in record["rows"]}
    for weight, floor in PRIORS:
        if (weight, floor) in done:
            continue
        total: Counter[str] = Counter()
        for seed in range(args.samples):
            total.update(
                held_out_words(
                    quickstart, quickstart / "exported", "--seed", str(seed),
                    "--prior-weight", str(weight), "--prior-floor", str(floor),
                )
            )  # fmt: skip
        row = {"weight": weight, "floor": floor, "samples": args.samples, **total}
        record["rows"].append(row | provenance())
        write_json(args.output, record)


if __name__ == "__main__":
    main()
