"""Construction of the engine that ``precision.engine`` selects."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine, Placements
from megatron_deberta.engine.optimizer import rate_scales
from megatron_deberta.engine.reference_engine import ReferenceEngine
from megatron_deberta.engine.sequence import EngineSequence


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
        ConfigError: the engine does not support the ``precision`` settings, or an entry of
            ``optimizer.freeze`` names no parameter.
    """
    names = getattr(module, "updated_separately", ())
    if not names:
        return _build(config, module, specs, groups)
    freeze = config.optimizer.freeze
    prefixed = tuple(frozen for frozen in freeze if frozen.partition(".")[0] in names)
    # Checks the names; those of a part lack its prefix.
    rate_scales(list(specs), replace(config.optimizer, freeze=prefixed))

    def build(name: str, part: nn.Module) -> Engine:
        own = _of_part(specs, name)
        frozen = [one for one in freeze if one not in prefixed]
        for one in prefixed:
            if one == name:
                frozen += own
            elif one.startswith(f"{name}."):
                frozen.append(one.removeprefix(f"{name}."))
        optimizer = replace(config.optimizer, freeze=tuple(frozen))
        return _build(replace(config, optimizer=optimizer), part, own, groups)

    return EngineSequence(module, names, build)


def _of_part(specs: Placements, name: str) -> Placements:
    """Return the placements of a submodule, by names within it."""
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in specs.items() if k.startswith(start)}


def _build(
    config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
) -> Engine:
    if config.precision.engine == "plain":
        return ReferenceEngine(config, module, specs, groups)
    # Imported here because importing DeepSpeed takes seconds and reads environment variables.
    from megatron_deberta.engine.deepspeed_engine import DeepSpeedZeroEngine

    return DeepSpeedZeroEngine(config, module, specs, groups)
