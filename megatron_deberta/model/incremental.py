"""Next-token logits of a growing sequence, with cached keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from megatron_deberta.model.attention import AttentionContext, KeyValue
from megatron_deberta.model.deberta import DebertaForPretraining
from megatron_deberta.model.inputs import ModelInputs, TokenInfo
from megatron_deberta.model.layers import Layer


class IncrementalDecoder:
    """Computes the logits after a sequence from those tokens that the call before did not have.

    Keys and values of every layer are kept, and so are the inputs of the convolution that the next
    tokens read. Results are those of `DebertaForPretraining.logits`, up
    to rounding.

    Args:
        model: an autoregressive model on one device, in evaluation mode.
    """

    def __init__(self, model: DebertaForPretraining) -> None:
        self._model = model
        self._reset()

    def _reset(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._cache: dict[int, KeyValue] = {}
        self._convolved: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits ``[V]`` of the token after ``ids``, int64 ``[1, N]``."""
        model, row = self._model, ids[0]
        start = len(self._ids)
        if start >= len(row) or not torch.equal(row[:start], self._ids):
            self._reset()
            start = 0
        everything = TokenInfo.of_sequence(ModelInputs(ids))
        tokens = everything.select(everything.positions[:, start:])
        context = AttentionContext(
            # The cache has its projections after the first call.
            position_table=None if self._cache else model.encoder.position_table(),
            attention_mask=None,
            document_ids=None,
            seeds=None,
            backend=model.options.attention_backend,
            recompute_cheap=False,
            causal=True,
        )
        hidden, _ = model.embeddings(ids[:, start:], tokens, None)
        embedded, decoder = hidden, model.mask_decoder
        layers = [cast(Layer, layer) for layer in model.encoder.layers]
        for index, layer in enumerate(layers if decoder is None else layers[:-1]):
            key_value = self._extend(index, layer, hidden, tokens, context)
            hidden = layer(hidden, tokens, context, key_value)
            if index == 0 and model.encoder.conv is not None:
                hidden = self._convolve(embedded, hidden, everything, context)
        last = everything.select(everything.positions[:, -1:])
        decoded = hidden[:, -1:]
        if decoder is not None:
            key_value = self._extend(len(layers) - 1, layers[-1], hidden, tokens, context)
            decoded = decoder.decode(decoded, last, layers[-1], context, key_value)
        self._ids = row.clone()
        logits: Tensor = model.head(decoded, model.embeddings.token.weight)
        return logits[0, 0]

    def _extend(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        tokens: TokenInfo,
        context: AttentionContext,
    ) -> KeyValue:
        """Append the keys and values of a layer's input ``[1, R, D]`` to the cache."""
        attention = layer.attention
        found = attention.project_key_value(hidden, tokens, context)
        if old := self._cache.get(index):
            key = torch.cat([old.key, found.key], 2)
            found = replace(old, key=key, value=torch.cat([old.value, found.value], 2))
        self._cache[index] = found
        return found

    def _convolve(
        self, embedded: Tensor, hidden: Tensor, everything: TokenInfo, context: AttentionContext
    ) -> Tensor:
        """Add the convolution, which reads earlier tokens, to the first layer's output."""
        conv, count = self._model.encoder.conv, hidden.size(1)
        kernel = self._model.config.conv_kernel_size
        assert conv is not None
        assert kernel is not None
        if self._convolved is not None:
            embedded, hidden = (
                torch.cat(pair, 1) for pair in zip(self._convolved, (embedded, hidden), strict=True)
            )
        radius = kernel // 2
        self._convolved = embedded[:, -radius:], hidden[:, -radius:]
        tokens = everything.select(everything.positions[:, -embedded.size(1) :])
        out: Tensor = conv(embedded, hidden, tokens, context)
        return out[:, -count:]
