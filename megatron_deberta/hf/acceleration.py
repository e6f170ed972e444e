"""``accelerate``: transformers' DeBERTa models on our attention operator, without padding."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from megatron_deberta.hf.accelerated_modules import (
    LAST_STATE_ONLY,
    AcceleratedV1Encoder,
    AcceleratedV1LayerNorm,
    AcceleratedV1SelfAttention,
    AcceleratedV2Encoder,
    AcceleratedV2SelfAttention,
    positions_of,
    restore,
)
from megatron_deberta.ops import RelativePositions

SUPPORTED_TRANSFORMERS = ">=5.0,<6"
"""Versions of transformers; 5.0.0 and 5.23.0 are tested."""
_REPLACEMENTS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (v1.DisentangledSelfAttention, AcceleratedV1SelfAttention),
    (v2.DisentangledSelfAttention, AcceleratedV2SelfAttention),
    (v1.DebertaEncoder, AcceleratedV1Encoder),
    (v2.DebertaV2Encoder, AcceleratedV2Encoder),
    (v1.DebertaLayerNorm, AcceleratedV1LayerNorm),
)
_ATTENTIONS = (v1.DisentangledSelfAttention, v2.DisentangledSelfAttention)
_MODELS = (v1.DebertaModel, v2.DebertaV2Model)


class Acceleration:
    """A model that is accelerated; a context manager that undoes it at the end.

    ``Acceleration(copy).undo()`` undoes that of a model which was pickled.

    Args:
        model: the model.

    Attributes:
        model: as given.
        modules: the accelerated modules, with those of deep copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: WeakSet[nn.Module] = WeakSet()

    def undo(self) -> None:
        """Restore transformers' own forward pass; parameters are untouched. May be repeated.

        Deep copies of the model are restored, too.
        """
        for module in [*self.modules, *self.model.modules()]:
            restore(module)
        self.modules.clear()
        for module in self.model.modules():
            _remove_hook(module)

    def __enter__(self) -> Acceleration:
        """Return the acceleration."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Undo."""
        self.undo()

    def __deepcopy__(self, memo: object) -> Acceleration:
        """Return itself: a deep copy of a module belongs to the same acceleration."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None in the place of a pickled acceleration: it belongs to this process."""
        return type(None), ()

    def _replace_class(self, module: Any, accelerated: type[nn.Module]) -> None:
        module.stock_class, module.acceleration = type(module), self
        module.__class__ = accelerated
        self.modules.add(module)


def accelerate(model: nn.Module, *, remove_padding: bool = True) -> Acceleration:
    """Let every DeBERTa in a model compute attention through ``disentangled_attention``.

    transformers' DeBERTa, DeBERTa-v2 and DeBERTa-v3 encoders are found at any depth, under any
    head. Outputs and gradients stay the same up to rounding, at padding as well; only attention
    dropout draws other random bits, at a probability rounded to a multiple of 1/256. Parameters,
    their names and the modules' order do not change.

    Args:
        model: a model that contains at least one of transformers' DeBERTa encoders.
        remove_padding: compute the tokens of a padded batch only. Between the layers states are
            then ``[1, tokens, hidden]``, as forward hooks on layers can observe. False: they are
            ``[batch, length, hidden]`` as in transformers.

    Returns:
        The acceleration: call its ``undo()``, or use it in a ``with`` statement.

    Raises:
        ValueError: there is no such encoder, or one that cannot be accelerated; the model is then
            unchanged.
        ImportError: this version of transformers is not supported.
    """
    if Version(transformers.__version__) not in SpecifierSet(SUPPORTED_TRANSFORMERS):
        raise ImportError(
            f"transformers: got version {transformers.__version__}, accelerate supports "
            f"{SUPPORTED_TRANSFORMERS}; install such a version"
        )
    found = [
        (name or type(model).__name__, module, stock, accelerated)
        for name, module in model.named_modules()
        for stock, accelerated in _REPLACEMENTS
        if isinstance(module, stock)
    ]
    if not any(isinstance(module, _ATTENTIONS) for _, module, _, _ in found):
        raise ValueError(
            f"model: got {type(model).__name__} without an encoder of transformers' DeBERTa or "
            "DeBERTa-v2; give a model that has one"
        )
    for name, module, stock, accelerated in found:
        _check_module(name, module, stock, accelerated)
    acceleration = Acceleration(model)
    for _, module, _, accelerated in found:
        acceleration._replace_class(module, accelerated)
        if isinstance(module, (AcceleratedV1Encoder, AcceleratedV2Encoder)):
            module.remove_padding = remove_padding
    for module in model.modules():
        if isinstance(module, _MODELS):
            _remove_hook(module)
            module.register_forward_pre_hook(_ask_for_last_state, with_kwargs=True)
    return acceleration


def _ask_for_last_state(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell the encoder if the caller of a DeBERTa model does not use the states of every layer.

    The wish is an argument, so that it belongs to one call, of one thread.
    """
    # The sixth and seventh arguments of transformers' forward methods.
    attentions = args[5] if len(args) > 5 else kwargs.get("output_attentions")
    states = args[6] if len(args) > 6 else kwargs.get("output_hidden_states")
    given = (
        (attentions, model.config.output_attentions),
        (states, model.config.output_hidden_states),
    )
    if any(default if value is None else value for value, default in given):
        return None
    if not isinstance(model.encoder, (AcceleratedV1Encoder, AcceleratedV2Encoder)):
        return None
    if len(args) > 5:
        return (*args[:5], LAST_STATE_ONLY, *args[6:]), kwargs
    return args, {**kwargs, "output_attentions": LAST_STATE_ONLY}


def _remove_hook(module: nn.Module) -> None:
    """Remove the hook, which deep copies and pickles have as well."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _ask_for_last_state:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _check_module(
    name: str, module: Any, stock: type[nn.Module], accelerated: type[nn.Module]
) -> None:
    """Reject a module whose forward pass would not be that of the accelerated class.

    Raises:
        ValueError: it would not.
    """
    if isinstance(module, accelerated):
        raise ValueError(
            f"{name}: is accelerated already; call undo() of that acceleration first, or "
            "Acceleration(model).undo()"
        )
    if type(module).forward is not stock.forward or "forward" in vars(module):
        raise ValueError(
            f"{name}: {type(module).__name__} has another forward method than transformers' own, "
            "which would be lost or would hide ours; accelerate the model before it is changed"
        )
    if getattr(module, "talking_head", False):
        raise ValueError(
            f"{name}: talking_head: got True, which mixes attention matrices of heads and is not "
            "supported; use the model without accelerate"
        )
    if isinstance(module, _ATTENTIONS):
        _check_attention(name, module)


def _check_attention(name: str, module: Any) -> None:
    if module.relative_attention:
        try:
            positions = positions_of(module)
        except ValueError as error:
            raise ValueError(
                f"{name}: position_buckets={getattr(module, 'position_buckets', -1)} with "
                f"max_relative_positions={module.max_relative_positions}: {error}; use the model "
                "without accelerate"
            ) from None
        if not _same_slots(positions):
            raise ValueError(
                f"{name}: {positions} differ from this version of transformers; use the model "
                "without accelerate"
            )


@cache
def _same_slots(positions: RelativePositions) -> bool:
    """Return whether our slots of all distances are those of transformers."""
    reach, span = positions.reach, positions.span
    distance = torch.arange(-reach, reach + 1, device="cpu")
    bucket = distance
    if positions.buckets:
        bucket = v2.make_log_bucket_position(distance, positions.buckets, positions.max_distance)
    expected = (bucket.long() + span).clamp(0, 2 * span - 1)
    return bool(torch.equal(expected, positions.slots(distance)))
