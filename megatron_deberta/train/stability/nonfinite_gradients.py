"""Detection of the first nonfinite gradient in backward, for every engine and ZeRO stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups


class NonfiniteGradients:
    """Checks gradients as backward computes them, without host synchronization.

    A context manager. A check costs one pass over each gradient, so it is enabled only for steps
    that are likely to have nonfinite gradients.

    Args:
        module: the model, the same on all ranks.
        groups: the rank grid.
        enabled: False does nothing.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups, *, enabled: bool) -> None:
        self._groups = groups
        self._enabled = enabled
        self._parameters = [item for item in module.named_parameters() if item[1].requires_grad]
        self._handles: list[RemovableHandle] = []
        self._checks: list[tuple[int, Tensor]] = []

    def __enter__(self) -> NonfiniteGradients:
        """Register the gradient hooks."""
        for index, (_, parameter) in enumerate(self._parameters if self._enabled else ()):

            def check(gradient: Tensor, index: int = index) -> None:
                self._checks.append((index, torch.isfinite(gradient).all()))

            self._handles.append(parameter.register_hook(check))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks; results are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def first_nonfinite(self) -> str:
        """Describe the first nonfinite gradient of all ranks, in backward order. Collective.

        It belongs to the layer from which it spread to the others.
        """
        not_found = len(self._checks)
        place, index = next(
            (
                (place, index)
                for place, (index, is_finite) in enumerate(self._checks)
                if not is_finite.item()
            ),
            (not_found, 0),
        )
        # One number that sorts by place and also encodes parameter and rank.
        code = (place * (len(self._parameters) + 1) + index) * self._groups.world_size
        code += self._groups.rank
        negated = torch.tensor(-code, dtype=torch.int64, device=self._groups.device)
        code, rank = divmod(-int(all_reduce_max(negated, self._groups)), self._groups.world_size)
        place, index = divmod(code, len(self._parameters) + 1)
        if place == not_found:
            return "its origin was not recorded"
        return f"the first nonfinite gradient was that of {self._parameters[index][0]}, rank {rank}"
