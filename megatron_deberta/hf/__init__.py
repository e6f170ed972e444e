"""Hugging Face interoperability: export, import, verification and fill-mask."""

from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM

__all__ = ["DebertaForMaskedLM"]
