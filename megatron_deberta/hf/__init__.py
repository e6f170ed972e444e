"""Hugging Face interoperability: export, import, verification, fill-mask and acceleration.

Names are imported on first access, because they import transformers' model classes, which takes
seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_deberta.hf.acceleration import Acceleration, accelerate
    from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM

__all__ = ["Acceleration", "DebertaForMaskedLM", "accelerate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "modeling_megatron_deberta" if name == "DebertaForMaskedLM" else "acceleration"
        return getattr(import_module(f"megatron_deberta.hf.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
