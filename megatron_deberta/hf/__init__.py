"""Hugging Face interoperability: export, import, verification, fill-mask and fast attention.

Names are imported on first access, because they import transformers' model classes, which takes
seconds.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_deberta.hf.fast_attention import FastAttentionHandle, use_fast_attention
    from megatron_deberta.hf.modeling_megatron_deberta import MegatronDebertaForMaskedLM

__all__ = ["FastAttentionHandle", "MegatronDebertaForMaskedLM", "use_fast_attention"]
_RENAMED = {
    "Acceleration": "FastAttentionHandle",
    "DebertaForMaskedLM": "MegatronDebertaForMaskedLM",
    "accelerate": "use_fast_attention",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        is_model = name == "MegatronDebertaForMaskedLM"
        module = "modeling_megatron_deberta" if is_model else "fast_attention"
        return getattr(import_module(f"{__name__}.{module}"), name)
    if new := _RENAMED.get(name):
        message = f"{__name__}.{name} was renamed to {new}; use the new name"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        # Later accesses do not call this function, so that the warning comes once.
        globals()[name] = __getattr__(new)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
