"""The two models in a checkpoint of replaced-token detection, each under its own names."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from megatron_deberta.checkpoint.layout import WEIGHT
from megatron_deberta.checkpoint.reader import Slice
from megatron_deberta.checkpoint.store import WeightSource
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.model.replaced_tokens import (
    DELTA,
    DISCRIMINATOR,
    GENERATOR,
    TOKENS,
    discriminator_config,
    generator_config,
)
from megatron_deberta.model.task_models import parameter_shapes

Part: TypeAlias = Literal["generator", "discriminator"]


class ModelPart:
    """Weights of the generator or the discriminator, with the names of a single model.

    The discriminator's token embeddings are the sum that it uses: the generator's table plus delta.

    Args:
        reader: checkpoint of a model with ``head: rtd``.
        model: its architecture.
        part: which model.

    Attributes:
        path: folder of the checkpoint.
        config: architecture of the part.
        shapes: logical shape by canonical name.
    """

    def __init__(self, reader: WeightSource, model: ModelConfig, part: Part) -> None:
        self._reader = reader
        self._is_generator = part == "generator"
        self.path = reader.path
        self.config = (generator_config if self._is_generator else discriminator_config)(model)
        self.shapes = parameter_shapes(self.config)

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a weight; arguments as in `CheckpointReader.tensor`.

        Raises:
            CheckpointError: there is no such parameter, or a file is damaged.
        """
        if kind != WEIGHT:
            raise CheckpointError(f"{self.path}: a part of it has weights only, no {kind}")

        def read(stored: str) -> Tensor:
            return self._reader.tensor(stored, kind, part)

        if self._is_generator:
            return read(GENERATOR + name)
        if name != TOKENS or DISCRIMINATOR + TOKENS in self._reader.shapes:
            return read(DISCRIMINATOR + name)
        table = read(GENERATOR + TOKENS)
        has_delta = DISCRIMINATOR + DELTA in self._reader.shapes
        return table.add_(read(DISCRIMINATOR + DELTA)) if has_delta else table


def open_part(
    reader: WeightSource, model: ModelConfig, part: Part
) -> tuple[ModelConfig, WeightSource]:
    """Return architecture and weights of a part; of the model itself if it has no parts.

    Args:
        reader: the checkpoint.
        model: its architecture.
        part: which model of replaced-token detection.
    """
    if model.head != "rtd":
        return model, reader
    chosen = ModelPart(reader, model, part)
    return chosen.config, chosen
