"""Construction of the engine of a run: that of ``parallel.engine``, or one for each submodel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import (
    Engine,
    FetchState,
    LocalShard,
    Placements,
    ReadNorm,
    StepOutcome,
)
from megatron_deberta.engine.optimizer import rate_scales
from megatron_deberta.engine.reference_engine import ReferenceEngine


def build_engine(
    config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
) -> Engine:
    """Wrap an initialised model in an engine. Collective over all ranks.

    A module with a nonempty attribute ``updated_separately`` gets an engine for each of the
    submodules that it names.

    Args:
        config: the run.
        module: this rank's part of the model, in ``precision.dtype``, on ``groups.device``; its
            replicated parameters are equal on all ranks.
        specs: placement of every parameter by canonical name.
        groups: process groups.

    Raises:
        ConfigError: the engine does not support the ``parallel`` or ``precision`` settings, or an
            entry of ``optimizer.freeze`` names no parameter.
    """
    names = getattr(module, "updated_separately", ())
    if not names:
        return _build(config, module, specs, groups)
    freeze = config.optimizer.freeze
    prefixed = tuple(frozen for frozen in freeze if frozen.partition(".")[0] in names)
    # Checks the names; those of a part lack its prefix.
    rate_scales(list(specs), replace(config.optimizer, freeze=prefixed))

    def build(name: str) -> Engine:
        start = f"{name}."
        own = {k.removeprefix(start): v for k, v in specs.items() if k.startswith(start)}
        frozen = [one for one in freeze if one not in prefixed]
        for one in prefixed:
            if one == name:
                frozen += own
            elif one.startswith(start):
                frozen.append(one.removeprefix(start))
        optimizer = replace(config.optimizer, freeze=tuple(frozen))
        part = module.get_submodule(name)
        return _build(replace(config, optimizer=optimizer), part, own, groups)

    return EngineSequence(module, {name: build(name) for name in names})


def _build(
    config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
) -> Engine:
    if config.parallel.engine == "plain":
        return ReferenceEngine(config, module, specs, groups)
    # Imported here because importing DeepSpeed takes seconds and reads environment variables.
    from megatron_deberta.engine.deepspeed_engine import DeepSpeedZeroEngine

    return DeepSpeedZeroEngine(config, module, specs, groups)


class EngineSequence(Engine):
    """One engine for each of some submodules, which hold all parameters.

    Each has its own moments, gradient norm and loss scale. Their states appear as one, with the
    submodule's name before parameters and scalars.

    Args:
        module: the whole model.
        parts: the engine of each submodule, by name, in the order of their updates.
    """

    def __init__(self, module: nn.Module, parts: Mapping[str, Engine]) -> None:
        self.module = module
        self._parts = parts

    @property
    def parts(self) -> tuple[Engine, ...]:
        """The engines, in the order of their updates."""
        return tuple(self._parts.values())

    def backward(self, loss: Tensor) -> None:
        """Raise RuntimeError; call ``backward`` of one of ``parts``."""
        raise RuntimeError("call backward of one of the parts")

    def step(self, learning_rate: float, norm_limit: float | ReadNorm = 0.0) -> StepOutcome:
        """Raise RuntimeError; call ``step`` of one of ``parts``."""
        raise RuntimeError("call step of one of the parts")

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro batches of the following steps, for each part."""
        for engine in self.parts:
            engine.set_accumulation_steps(accumulation_steps)

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield this rank's shards of each part, in order."""
        for part, engine in self._parts.items():
            for shard in engine.local_shards():
                yield shard._replace(name=f"{part}.{shard.name}")

    def load_states(self, fetch: FetchState) -> None:
        """Set every parameter and its moments."""

        def fetch_of(part: str) -> FetchState:
            return lambda name: fetch(f"{part}.{name}")

        for part, engine in self._parts.items():
            engine.load_states(fetch_of(part))

    def state_dict(self) -> dict[str, int | float]:
        """Return the scalars of all parts."""
        return {
            f"{part}.{key}": value
            for part, engine in self._parts.items()
            for key, value in engine.state_dict().items()
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the values of ``state_dict``; call it after ``load_states``."""
        for part, engine in self._parts.items():
            start = f"{part}."
            engine.load_state_dict(
                {k.removeprefix(start): v for k, v in scalars.items() if k.startswith(start)}
            )

    def destroy(self, *, is_last: bool = True) -> None:
        """Release each part's resources, in reverse."""
        for engine in reversed(self.parts):
            engine.destroy(is_last=is_last and engine is self.parts[0])
