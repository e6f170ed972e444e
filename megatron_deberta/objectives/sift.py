"""Scale-invariant fine-tuning (SiFT): consistency under perturbations of normalised embeddings.

Source: He et al. 2021, arXiv:2006.03654, section 4, with the steps and defaults of the released
code (docs/finetuning.md lists where both differ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.model.dropout import DropoutSeeds, site_id
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.inputs import TokenInfo

# Added to the largest gradient of a token, as in the release
_EPSILON = 1e-6

# Factor of the divergence whose gradient is taken; in fp16 small gradients would become 0.
_FP16_FACTOR = 1024.0

# Separate the dropout of the two passes with perturbation from that of the clean pass.
_PASSES = (site_id("sift.first"), site_id("sift.second"))
_NOISE = site_id("sift.noise")

# Computes logits with dropout keys and a perturbation.
LogitsOf = Callable[[DropoutSeeds | None, Perturbation | None], Tensor]

# Returns the logits of the distributions that a head predicts, each [T, K].
Distributions = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Sift:
    """Computes SiFT's loss: one gradient step of a random perturbation, then the divergence.

    Attributes:
        noise: standard deviation of the initial perturbation; cut off at twice this.
        step: size of the gradient step.
        inner: divergence whose gradient is followed; the squared error for a score.
        clean_gradient: the loss changes the clean prediction, too.
    """

    noise: float
    step: float
    inner: Literal["symmetric_kl", "kl"]
    clean_gradient: bool

    def __call__(
        self,
        logits_of: LogitsOf,
        distributions: Distributions,
        clean: Tensor,
        scored: Tensor,
        seeds: DropoutSeeds,
        *,
        squared_error: bool,
    ) -> Tensor:
        """Return the sum of the divergences over scored targets, an fp32 scalar.

        Args:
            logits_of: the model.
            distributions: logits of each predicted distribution.
            clean: logits without perturbation.
            scored: bool ``[T]``: targets that count.
            seeds: dropout keys of the clean pass.
            squared_error: the outputs are scores, not logits.
        """
        inner = _squared_error if squared_error else _DIVERGENCES[self.inner]
        outer = _squared_error if squared_error else symmetric_kl
        first, second = (
            replace(seeds, run_seed=_combine(seeds.run_seed, number)) for number in _PASSES
        )
        # One gradient step from the initial perturbation
        perturbation = _NoisyPerturbation(self.noise, first)
        perturbed, fixed = logits_of(first, perturbation), clean.detach()
        delta = perturbation.delta
        assert delta is not None
        factor = _FP16_FACTOR if clean.dtype == torch.float16 else 1.0
        total = _total(inner, distributions(perturbed), distributions(fixed), scored)
        (gradient,) = torch.autograd.grad(total * factor, delta)
        gradient = torch.nan_to_num(gradient / factor, 0.0, 0.0, 0.0)
        largest = gradient.abs().amax(-1, keepdim=True)
        delta = (delta + self.step * gradient / (_EPSILON + largest)).detach()
        # Before the second pass: none of it is needed any more.
        del perturbation, perturbed, total, gradient, largest
        perturbed = logits_of(second, Perturbation(delta))
        target = clean if self.clean_gradient else fixed
        return _total(outer, distributions(perturbed), distributions(target), scored)


class _NoisyPerturbation(Perturbation):
    """Draws its perturbation when it sees the embeddings, by row, position and feature."""

    def __init__(self, noise: float, seeds: DropoutSeeds) -> None:
        super().__init__()
        self._noise, self._seeds = noise, seeds

    def __call__(self, hidden: Tensor, tokens: TokenInfo) -> Tensor:
        if self.delta is None:
            self.delta = initial_noise(
                self._noise, self._seeds, tokens.positions, hidden.size(-1)
            ).requires_grad_()
        return super().__call__(hidden, tokens)


def initial_noise(noise: float, seeds: DropoutSeeds, positions: Tensor, size: int) -> Tensor:
    """Return N(0, ``noise`` ** 2) values, clamped to twice ``noise``.

    Args:
        noise: standard deviation.
        seeds: dropout keys.
        positions: int64 ``[B, R]``.
        size: features.

    Returns:
        fp32 ``[B, R, size]``.
    """
    values = seeds.standard_normal(_NOISE, positions, size)
    return (values * noise).clamp(-2 * noise, 2 * noise).float()


def symmetric_kl(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum of both cross-entropies ``[T]``, each with the other side detached.

    Its gradient is that of the symmetric KL divergence without the gradient of the weights.
    """
    return _kl(logits, target) + _kl(target, logits)


def _kl(logits: Tensor, target: Tensor) -> Tensor:
    log_p, log_q = F.log_softmax(logits.float(), -1), F.log_softmax(target.float(), -1)
    return -(log_q.exp().detach() * log_p).sum(-1)


def _squared_error(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.float() - target.float()).square().sum(-1)


_DIVERGENCES = {"symmetric_kl": symmetric_kl, "kl": _kl}


def _total(
    divergence: Callable[[Tensor, Tensor], Tensor],
    predicted: list[Tensor],
    target: list[Tensor],
    scored: Tensor,
) -> Tensor:
    """Return the sum over scored targets, and the mean over distributions of a target."""
    pairs = zip(predicted, target, strict=True)
    parts = [torch.where(scored, divergence(p, q), 0.0).sum() for p, q in pairs]
    return torch.stack(parts).mean()


def _combine(seed: int, number: int) -> int:
    return (seed * 0x9E3779B1 + number) & (2**62 - 1)
