"""Models for use after training: fill-mask through the mask decoder, no remote code needed."""

from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM

__all__ = ["DebertaForMaskedLM"]
