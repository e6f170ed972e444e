"""Which samples a rank reads for a step.

Owns the deal of global batches to data-parallel ranks and micro batches. Has no state: step s of
a run without changes of batch size reads samples [s * G, (s + 1) * G), whatever the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_deberta.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSampler:
    """The deal of one layout.

    Attributes:
        global_batch_size: G, samples a step over all ranks.
        micro_batch_size: samples a forward pass.
        dp_rank: data-parallel rank; tensor-parallel ranks of it read the same samples.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: the sizes do not divide.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        """Check that the batch can be dealt."""
        if self.global_batch_size % (self.micro_batch_size * self.dp_size):
            raise ConfigError(
                f"train.global_batch_size {self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size {self.micro_batch_size} x {self.dp_size} data-parallel "
                "ranks; change one of them"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro batches a rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def micro_batches(self, first_sample: int) -> list[range]:
        """Return this rank's samples of the step that begins at ``first_sample``, in order."""
        share = self.global_batch_size // self.dp_size
        begin = first_sample + self.dp_rank * share
        return [
            range(start, start + self.micro_batch_size)
            for start in range(begin, begin + share, self.micro_batch_size)
        ]
