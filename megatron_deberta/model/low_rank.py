"""Low-rank adapters of a model whose other encoder weights are frozen (LoRA).

Source: Hu et al. 2021, arXiv:2106.09685. Definition, initial weights and scale are those of the
package peft. Its classes wrap ``torch.nn.Linear``, which tensor parallelism replaces and
``project_together`` joins with its neighbours, so the adapters are a layer of this package.

A projection of tokens also projects the table of relative positions
(``share_position_projections``), and so does its adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from megatron_deberta.config.schema import FinetuneConfig
from megatron_deberta.model.parallel_layers import LowRankAdapter
from megatron_deberta.model.weight_init import ADAPTER_FACTORS

HEAD_PREFIXES = ("pooler.", "classifier.", "qa_outputs.")
"""Parameters of the heads of labelled tasks."""
FIRST, SECOND = ADAPTER_FACTORS
_PROJECTION = re.compile(r"(encoder\.layers\.\d+\.(?:attention|ffn)\.(\w+))(?:\.weight)?")


def is_adapter(name: str) -> bool:
    """Return whether a canonical name is that of an adapter's parameter."""
    return name.endswith(ADAPTER_FACTORS)


def is_trained(name: str, rank: int | None) -> bool:
    """Return whether a run with ``finetune.lora_rank`` of this value trains a parameter.

    Args:
        name: canonical name.
        rank: None: there are no adapters, and everything is trained.
    """
    return rank is None or is_adapter(name) or name.startswith(HEAD_PREFIXES)


def _adapted_layer(name: str, config: FinetuneConfig) -> str | None:
    """Return the layer of a module or of its weight, if it has an adapter."""
    match = _PROJECTION.fullmatch(name)
    return match[1] if match and match[2] in config.lora_targets else None


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: FinetuneConfig
) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of the adapters' parameters; empty: the run has none.

    Args:
        shapes: of the model without adapters.
        config: rank and targets.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items() if config.lora_rank else ():
        layer = _adapted_layer(name, config)
        if layer is not None:
            found[layer + FIRST] = (config.lora_rank or 0, shape[1])
            found[layer + SECOND] = (shape[0], config.lora_rank or 0)
    return found


def add_adapters(model: nn.Module, config: FinetuneConfig) -> None:
    """Add adapters, without weights, to the layers of ``finetune.lora_targets``.

    Args:
        model: on the meta device, with whole parameters.
        config: rank, alpha and targets; without a rank, the model stays as it is.
    """
    rank = config.lora_rank
    if rank is None:
        return
    for path, module in list(model.named_modules()):
        if _adapted_layer(path, config) is not None:
            assert isinstance(module, nn.Linear)
            with torch.device("meta"):
                module.lora = LowRankAdapter(
                    module.in_features, module.out_features, rank, config.lora_alpha / rank
                )
