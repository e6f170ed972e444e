"""Which parameter's gradient was the first that was not finite, whatever the engine and stage.

Owns the hooks. Refuses to run all the time: looking at every gradient costs a pass over it, so a
step is watched only where its gradients may well be not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups


class NonfiniteGradients:
    """Looks at gradients as backward makes them, without the host waiting; a context manager.

    Args:
        module: whose parameters to watch, the same on all ranks.
        groups: the rank grid.
        armed: False does nothing.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups, *, armed: bool) -> None:
        self._groups = groups
        self._armed = armed
        self._parameters = [item for item in module.named_parameters() if item[1].requires_grad]
        self._handles: list[RemovableHandle] = []
        self._seen: list[tuple[int, Tensor]] = []

    def __enter__(self) -> NonfiniteGradients:
        """Begin to look."""
        for number, (_, parameter) in enumerate(self._parameters if self._armed else ()):

            def look(gradient: Tensor, number: int = number) -> None:
                self._seen.append((number, torch.isfinite(gradient).all()))

            self._handles.append(parameter.register_hook(look))
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more; what was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def culprit(self) -> str:
        """Name the first gradient that was not finite on any rank, in words. Collective.

        First in the order of backward, so the layer from which the others have it.
        """
        nowhere = len(self._seen)
        place, number = next(
            (
                (place, number)
                for place, (number, is_finite) in enumerate(self._seen)
                if not is_finite.item()
            ),
            (nowhere, 0),
        )
        # One number that orders by place and tells parameter and rank.
        code = (place * (len(self._parameters) + 1) + number) * self._groups.world_size
        code += self._groups.rank
        least = torch.tensor(-code, dtype=torch.int64, device=self._groups.device)
        code, rank = divmod(-int(all_reduce_max(least, self._groups)), self._groups.world_size)
        place, number = divmod(code, len(self._parameters) + 1)
        if place == nowhere:
            return "no rank saw where it began"
        return (
            f"the first gradient not finite was that of {self._parameters[number][0]}, rank {rank}"
        )
