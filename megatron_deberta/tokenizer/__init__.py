"""Vocabularies: text to token ids and back.

Owns loading, saving and training of tokenizers, and the promise that training and the exported
model see the same ids. Refuses to read corpora (``preprocess``) and to lay out rows (``data``).
"""

from megatron_deberta.tokenizer.loading import load_tokenizer
from megatron_deberta.tokenizer.special_tokens import SpecialTokens
from megatron_deberta.tokenizer.tokenizer import Tokenizer

__all__ = ["SpecialTokens", "Tokenizer", "load_tokenizer"]
