"""Train one recipe of ``benchmarks.learn.judge``, or measure the processor time of its steps.

    python -m benchmarks.learn.judge_train RECIPE.yaml KEY=VALUE ...
    python -m benchmarks.learn.judge_train RECIPE.yaml KEY=VALUE ... --measure seconds.json

It is ``megatron-deberta pretrain`` with an optimizer that the package does not have: a recipe whose
file name begins with ``muon`` is trained with :class:`Muon`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_deberta import load_config, pretrain
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import OptimizerConfig
from megatron_deberta.engine import reference_engine
from megatron_deberta.engine.optimizer import parameter_groups
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.files import write_atomically
from megatron_deberta.train.state import StepResult
from megatron_deberta.train.trainer import Callback, Trainer

LAYERS = "encoder.layers."
MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
UPDATE_SCALE = 0.2
SKIPPED = 3
"""Steps at the start of a phase that are not measured: they allocate memory and read files."""


class Muon(torch.optim.AdamW):
    """Muon for the matrices of layers, AdamW for the other parameters.

    The update of a matrix is its momentum with all singular values near 1, times 0.2 sqrt(largest
    dimension), so that its size is that of AdamW's. Source: Jordan et al. 2024, "Muon: An optimizer
    for hidden layers in neural networks"; scale: Liu et al. 2025, arXiv:2502.16982, section 2.2.

    The momentum is in ``exp_avg``; ``exp_avg_sq`` of these matrices stays zero. So checkpoints are
    those of AdamW.

    Args:
        groups: of ``parameter_groups``, whose parameters are set in ``matrices``.
        matrices: parameters that are updated by Muon.
        arguments: of AdamW.
    """

    def __init__(
        self, groups: list[dict[str, Any]], matrices: list[Tensor], **arguments: Any
    ) -> None:
        super().__init__(groups, fused=True, **arguments)
        self._matrices = {id(matrix) for matrix in matrices}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        gradients: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._matrices and parameter.grad is not None:
                    gradients.append((group, parameter, parameter.grad))
                    parameter.grad = None
        super().step(closure)
        for group, parameter, gradient in gradients:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            momentum = state["exp_avg"].mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
            # Nesterov's form: the gradient counts once more.
            update = orthogonalized(gradient.lerp(momentum, MOMENTUM))
            rate = float(group["lr"])
            parameter.mul_(1 - rate * group["weight_decay"])
            scale = UPDATE_SCALE * max(parameter.shape) ** 0.5
            parameter.add_(update.to(parameter.dtype), alpha=-rate * scale)
            state["step"] += 1


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1.

    Args:
        matrix: [rows, columns].

    Returns:
        Float32, from five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if is_tall else matrix).float()
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def use_muon() -> None:
    """Let the plain engine build :class:`Muon` for the matrices of the encoder's layers."""
    matrices: list[Tensor] = []

    def group(named: Iterable[tuple[str, Any]], *arguments: Any) -> list[dict[str, Any]]:
        members = list(named)
        matrices[:] = [p for name, p in members if name.startswith(LAYERS) and p.ndim == 2]
        return parameter_groups(members, *arguments)

    def build(groups: list[dict[str, Any]], config: OptimizerConfig, **_: Any) -> Muon:
        betas = (config.beta1, config.beta2)
        return Muon(groups, matrices, lr=config.learning_rate, betas=betas, eps=config.eps)

    reference_engine.parameter_groups = group  # type: ignore[assignment]
    reference_engine.build_optimizer = build  # type: ignore[assignment]


class ProcessorTime(Callback):
    """Records the processor time of this process after every step."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Record the time."""
        self.marks.append((trainer.state.step, time.process_time()))


def seconds_per_step(marks: list[tuple[int, float]], ends: list[int]) -> float:
    """Return the mean processor time of a step, of phases weighted by their steps.

    Args:
        marks: step and processor time after it, of all steps.
        ends: last step of each phase.
    """
    total, begin = 0.0, 0
    for end in ends:
        measured = [
            later - earlier
            for (_, earlier), (step, later) in pairwise(marks)
            if begin + SKIPPED < step <= end
        ]
        total += (end - begin) * sorted(measured)[len(measured) // 2]
        begin = end
    return total / begin


def main() -> int:
    """Train; with ``--measure`` also write the processor time of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="run file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="write seconds per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(args.recipe, args.overrides)
    if args.recipe.name.startswith("muon"):
        use_muon()
    timer = ProcessorTime()
    code = pretrain(config, callbacks=[timer])
    if args.measure and code == EXIT_DONE:
        ends = [segment.first_step + segment.steps for segment in segments(config)]
        found = seconds_per_step(timer.marks, ends)
        write_atomically(args.measure, json.dumps(found).encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
