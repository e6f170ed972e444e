"""Attention on a CPU whose probabilities become denormal numbers, kept or taken as zero.

Forward and backward of the attention core, one thread, fp32. Scores have a growing standard
deviation, as in training: a probability below 1.2e-38 is denormal. Training sets
``torch.set_flush_denormal(True)``; the two settings are timed in turns.

    python -m benchmarks.step.denormals --output benchmarks/results/cpu/denormals.json
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attention.variants import POSITIONS, Case, make_inputs
from benchmarks.lib.measuring import Stopwatch, in_turns, write_json
from benchmarks.lib.provenance import provenance
from megatron_deberta.ops import disentangled_attention

CASE = Case(32, 6, 64)  # of the quickstart
SPREADS = (1, 4, 8, 16, 24)
"""Standard deviations of scores."""
GRADIENT = 1e-6
"""Standard deviation of the output's gradient; the loss is a mean over many tokens."""
BACKENDS = ("native", "reference")
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def with_spread(spread: float) -> list[Tensor]:
    """Return q, k, v and both position tables; scores have a standard deviation of ``spread``."""
    q, k, v, *tables = (tensor.detach() for tensor in make_inputs(CASE))
    scale = (q.shape[-1] * 3) ** -0.5
    factor = spread / float((q @ k.mT * scale).std())
    # No position terms: their share of the scores does not matter here.
    return [q * factor, k, v, *(torch.zeros_like(table) for table in tables)]


def denormal_share(inputs: list[Tensor]) -> float:
    """Return the share of the attention probabilities that are denormal."""
    q, k, *_ = inputs
    scores = (q @ k.mT * (q.shape[-1] * 3) ** -0.5).double()
    probabilities = scores.softmax(-1)
    smallest = _SMALLEST_NORMAL * 2.0**-23
    return float(((probabilities < _SMALLEST_NORMAL) & (probabilities >= smallest)).double().mean())


def seconds_of_pass(inputs: list[Tensor], backend: str, flush: bool) -> list[float]:
    """Return the time of forward and backward."""
    torch.set_flush_denormal(flush)
    x = [tensor.clone().requires_grad_() for tensor in inputs]
    gradient = GRADIENT * x[2].detach()
    stopwatch = Stopwatch("cpu")
    stopwatch.mark()
    output = disentangled_attention(*x, positions=POSITIONS, backend=backend)
    torch.autograd.grad(output, x, gradient)
    stopwatch.mark()
    torch.set_flush_denormal(False)
    return stopwatch.seconds()


def main() -> None:
    """Measure every spread and backend, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=10, help="seconds of a case")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for spread in SPREADS:
        inputs = with_spread(spread)
        row = {"spread": spread, "denormal_share": denormal_share(inputs)}
        for backend in BACKENDS:
            jobs = {
                name: partial(seconds_of_pass, inputs, backend, flush)
                for name, flush in (("kept", False), ("zero", True))
            }
            times = in_turns(jobs, least=3, most=50, budget=args.budget)
            row[backend] = {name: seconds[0] for name, seconds in times.items()}
        rows.append(row)
        print(row, flush=True)
    write_json(args.output, {**provenance(), "results": rows})


if __name__ == "__main__":
    main()
