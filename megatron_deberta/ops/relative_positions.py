"""Map from relative distances (query position minus key position) to rows of the position table.

Log buckets as in DeBERTa v2, or the paper's clipped linear distances. The map is an integer table
built once on the CPU; backends look slots up and compute no logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """The distances that a model distinguishes.

    ``buckets=0`` is the paper's delta(i, j): linear distances clipped to ``[-k, k)`` with
    k = ``max_distance``. ``buckets > 0`` are the log buckets of the v2 release: exact up to half
    of ``buckets``, logarithmic up to ``max_distance``.

    Source: He et al. 2021, arXiv:2006.03654, Eq. 3; ``make_log_bucket_position`` of the release.
    """

    max_distance: int = 512
    buckets: int = 256

    def __post_init__(self) -> None:
        """Validate the sizes.

        Raises:
            ValueError: a size is out of range.
        """
        if self.max_distance < 1:
            raise ValueError(f"max_distance: got {self.max_distance}, expected at least 1")
        if self.buckets < 0 or self.buckets % 2:
            raise ValueError(f"buckets: got {self.buckets}, expected 0 or a positive even number")
        if self.buckets and self.max_distance <= self.buckets // 2 + 1:
            raise ValueError(
                f"max_distance: got {self.max_distance}, expected more than "
                f"buckets / 2 + 1 = {self.buckets // 2 + 1}"
            )

    @property
    def span(self) -> int:
        """Half the rows of the position table."""
        return self.buckets or self.max_distance

    @property
    def reach(self) -> int:
        """Distance from which on all distances of the same sign share a slot."""
        return 2 * self.max_distance

    def slots(self, distance: Tensor) -> Tensor:
        """Return the slots of distances.

        Args:
            distance: query position minus key position, any shape, any integer dtype.

        Returns:
            Slots in ``[0, 2 * span)``, int64, same shape and device.
        """
        table = _slot_table(self, distance.device)
        return table[distance.clamp(-self.reach, self.reach).long() + self.reach]

    def slots_of_length(self, length: int) -> range:
        """Return all slots that distances within a row of ``length`` tokens can have."""
        first, last = self.slots(torch.tensor([1 - length, length - 1], device="cpu")).tolist()
        return range(first, last + 1)


@lru_cache(maxsize=64)
def _slot_table(positions: RelativePositions, device: torch.device) -> Tensor:
    """Return the slot of each distance in ``[-reach, reach]``, int64 ``[2 * reach + 1]``."""
    # The cache may be filled under inference_mode but is used in training as well.
    with torch.inference_mode(False):
        distance = torch.arange(-positions.reach, positions.reach + 1, device="cpu")
        bucket = _log_bucket(distance, positions) if positions.buckets else distance
        span = positions.span
        return (bucket + span).clamp(0, 2 * span - 1).to(device)


def _log_bucket(distance: Tensor, positions: RelativePositions) -> Tensor:
    """Return the signed log bucket, with the release's float32 rounding in every operation."""
    mid = positions.buckets // 2
    magnitude = distance.abs()
    whole = torch.log(torch.tensor((positions.max_distance - 1) / mid, device="cpu"))
    share = torch.log(magnitude.clamp(min=mid) / mid) / whole
    far = (torch.ceil(share * (mid - 1)) + mid).long()
    return torch.where(magnitude <= mid, distance, far * distance.sign())
