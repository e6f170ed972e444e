"""Tokenizers: loading, training, saving, encoding and decoding.

Training and the exported model use the same files and library, so their ids are equal.
"""

from megatron_deberta.tokenizer.loading import load_tokenizer
from megatron_deberta.tokenizer.special_tokens import SpecialTokens
from megatron_deberta.tokenizer.tokenizer import Tokenizer

__all__ = ["SpecialTokens", "Tokenizer", "load_tokenizer"]
