"""Hugging Face interoperability: export, import, verification and fill-mask.

``DebertaForMaskedLM`` is imported on first access, because it imports transformers' model classes,
which takes seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM

__all__ = ["DebertaForMaskedLM"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from megatron_deberta.hf import modeling_megatron_deberta

        return getattr(modeling_megatron_deberta, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
