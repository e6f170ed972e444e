"""``model.vocab_size: auto``: the size of the run's tokenizer."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from megatron_deberta.config.schema import AUTO, RunConfig
from megatron_deberta.data.build import tokenizer_path
from megatron_deberta.errors import ConfigError
from megatron_deberta.tokenizer import load_tokenizer

MULTIPLE = 128
"""Matrix products with the vocabulary are fastest for multiples of this number."""

logger = logging.getLogger(__name__)


def with_vocab_size(config: RunConfig) -> RunConfig:
    """Replace ``model.vocab_size: auto`` by the tokenizer's size, rounded up.

    Raises:
        ConfigError: neither ``tokenizer.path`` nor a shard's manifest names a tokenizer.
        DataError: the tokenizer cannot be loaded.
    """
    if config.model.vocab_size != AUTO:
        return config
    if not config.tokenizer.path and not config.data.train:
        raise ConfigError(
            "model.vocab_size=auto needs tokenizer.path or data.train; give one, or the number of "
            "rows"
        )
    path = tokenizer_path(config)
    size = load_tokenizer(path).vocab_size
    rows = math.ceil(size / MULTIPLE) * MULTIPLE
    logger.info(
        "model.vocab_size: auto is %s: %s, the size of %s, rounded up to a multiple of "
        "%d for speed", f"{rows:,}", f"{size:,}", path, MULTIPLE,
    )  # fmt: skip
    return replace(config, model=replace(config.model, vocab_size=rows))
