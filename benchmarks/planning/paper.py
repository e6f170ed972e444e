"""The table of docs/planning.md: the paper's training times, and what ``plan`` predicts for them.

    python -m benchmarks.planning.paper

Nothing is measured. Source of the paper's figures: He et al. 2021, arXiv:2006.03654, section 5.1.1
and appendix A.2 (batch 2,048, 1 million steps, 512 tokens).
"""

from __future__ import annotations

import argparse

from benchmarks.lib.provenance import ROOT
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.config import load_config
from megatron_deberta.planning.machine import machine_of
from megatron_deberta.planning.plan import make_plan

# Model -> our run, DGX-2 nodes and days of the paper.
PAPER = {
    "base": ("base_dgx2", 4, 10),
    "large": ("large_dgx2", 6, 20),
    "1.5B": ("1.5b_dgx2", 16, 30),
}


def table() -> str:
    """Format the table as Markdown, one line per model."""
    machine = machine_of(load_profile("dgx2"))
    lines = [
        "| model | V100 | GFLOP per token | paper: days | share of 125 TFLOP/s that implies | "
        "`plan`: days | days at 20 % in all |",
        "|---|---|---|---|---|---|---|",
    ]
    slower = machine_of(load_profile("dgx2"), achieved=0.2)
    for name, (run, nodes, days) in PAPER.items():
        config = load_config(ROOT / "configs/runs" / f"{run}.yaml")
        ranks = nodes * machine.ranks_per_node
        plan = make_plan(config, machine, ranks, search=False)
        work = plan.flops_per_token * plan.batch.tokens_per_step * config.train.steps
        implied = work / (days * 86400 * ranks * machine.device.flops_per_second("fp16"))
        late = make_plan(config, slower, ranks, search=False)
        lines.append(
            f"| {name} | {ranks} | {plan.flops_per_token / 1e9:.2f} | {days} | {implied:.1%} | "
            f"{plan.seconds / 86400:.1f} | {late.seconds / 86400:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(table())
