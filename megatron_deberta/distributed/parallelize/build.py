"""Construction and initialisation of this rank's part of the model.

The model is built on the ``meta`` device, sharded, and filled module by module: it never exists
whole on one rank, under ZeRO-3 not even a rank's tensor-parallel part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_deberta.config.rules import check_tensor_parallel_divides
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.apply import parallelize_module, shard_parameters
from megatron_deberta.distributed.parallelize.plan import ParameterSpec, shard_spec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import TopologyError
from megatron_deberta.model import DebertaBackbone, RuntimeOptions
from megatron_deberta.model.low_rank import add_adapters, is_trained
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.objectives import build_objective
from megatron_deberta.ops.triton import can_fuse


@dataclass(frozen=True)
class ShardedModel:
    """A rank's model and the shard specification of each parameter.

    Attributes:
        module: parameters carry canonical names.
        specs: by canonical name, in the module's order.
    """

    module: nn.Module
    specs: dict[str, ParameterSpec]


def build_model(
    config: RunConfig,
    groups: ProcessGroups,
    dtype: torch.dtype = torch.float32,
    *,
    model_class: type[DebertaBackbone] | None = None,
    partition: Callable[[nn.Module], None] | None = None,
) -> ShardedModel:
    """Build and initialise this rank's part of the model.

    The same seed gives the same model on every layout (``model.weight_init``). With
    ``finetune.lora_rank``, the objective's model has adapters, and other weights are frozen.

    Args:
        config: the run.
        groups: process groups.
        dtype: of the parameters.
        model_class: takes ``(ModelConfig, RuntimeOptions)``; None: the objective's model.
        partition: called with each module after its own parameters are filled (ZeRO-3).

    Raises:
        TopologyError: heads or widths are not divisible by the tensor-parallel size.
    """
    check_tensor_parallel_divides(
        groups.tp_size, {"model.num_heads": config.model.num_heads}, error=TopologyError
    )
    backend = config.parallel.attention_backend
    options = RuntimeOptions(
        config.parallel.recompute,
        None if backend == "auto" else backend,
        uses_fusion(config, groups.device),
    )
    model: nn.Module
    with torch.device("meta"):
        if model_class is None:
            model = build_objective(config).build_model(options)
            add_adapters(model, config.finetune)
        else:
            model = model_class(config.model, options)
    specs = {
        name: shard_spec(name, tuple(parameter.shape), groups.tp_rank, groups.tp_size)
        for name, parameter in model.named_parameters()
    }
    shard_parameters(model, {name: spec.local_shape for name, spec in specs.items()}, dtype)
    parallelize_module(model, config, groups, fuse=options.fuse)
    for path, module in model.named_modules():
        if _fill_own_parameters(module, path, specs, config, groups.device) and partition:
            partition(module)
    return ShardedModel(model, specs)


def uses_fusion(config: RunConfig, device: torch.device) -> bool:
    """Resolve ``parallel.fuse`` on a device.

    Rows of labelled tasks have too many lengths to compile for each of them.
    """
    fuse = config.parallel.fuse
    return fuse is True or (fuse == "auto" and not config.finetune.task and can_fuse(device))


def _fill_own_parameters(
    module: nn.Module,
    path: str,
    specs: dict[str, ParameterSpec],
    config: RunConfig,
    device: torch.device,
) -> bool:
    """Replace a module's own meta parameters by initialised ones; True if it has any."""
    own = list(module.named_parameters(recurse=False))
    for leaf, empty in own:
        spec = specs[f"{path}.{leaf}" if path else leaf]
        # Padding rows stay zero: no token uses them and the loss excludes them.
        data = initial_weights(config, spec, empty.dtype, device)
        is_updated = is_trained(spec.name, config.finetune.lora_rank)
        setattr(module, leaf, nn.Parameter(data, requires_grad=is_updated))
    return bool(own)


def initial_weights(
    config: RunConfig,
    spec: ParameterSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return this rank's part of a parameter's initial weights, padding included.

    Args:
        config: the run.
        spec: this rank's part.
        dtype: of the result.
        device: where it is computed.
    """
    data = torch.zeros(spec.local_shape, dtype=dtype, device=device)
    fill_initial(
        spec.true_part(data),
        spec.name,
        spec.logical_shape,
        config.model,
        config.train.seed,
        dim=spec.dim,
        offset=spec.offset,
    )
    return data
