"""The choice of an engine.

Owns what is refused whatever the engine. Refuses everything an engine does.
"""

from __future__ import annotations

from torch import nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.protocol import Engine, Placements
from megatron_deberta.engine.reference_engine import ReferenceEngine


def build_engine(
    config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
) -> Engine:
    """Wrap a filled model in the engine of ``precision.engine``. Collective over all ranks.

    Args:
        config: the run.
        module: this rank's part of the model, in ``precision.dtype``, on ``groups.device``; its
            replicated parameters are equal on all ranks.
        specs: placement of every parameter under its canonical name.
        groups: the rank grid.

    Raises:
        ConfigError: ``precision`` asks for what the engine cannot do rightly.
    """
    if config.precision.engine == "plain":
        return ReferenceEngine(config, module, specs, groups)
    # Only here: importing DeepSpeed takes time and reads its environment.
    from megatron_deberta.engine.deepspeed_engine import DeepSpeedZeroEngine

    return DeepSpeedZeroEngine(config, module, specs, groups)
