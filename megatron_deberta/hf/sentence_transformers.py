"""Files that make an export of an encoder a sentence-transformers model with mean pooling.

The keys of ``1_Pooling/config.json`` are those that all versions of sentence-transformers and
text-embeddings-inference read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_deberta.config.schema import ModelConfig

POOLING_FOLDER = "1_Pooling"
_MODES = (
    "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
    "lasttoken",
)  # fmt: skip


def write_pooling(folder: Path, config: ModelConfig) -> None:
    """Write ``modules.json``, ``sentence_bert_config.json`` and ``1_Pooling/config.json``.

    Mean pooling, because no objective here trains the state of the first token for sentences.

    Args:
        folder: an export whose ``AutoModel`` is the encoder.
        config: the architecture.
    """
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": POOLING_FOLDER,
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": config.hidden_size}
    pooling |= {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in _MODES}
    length = {"max_seq_length": config.max_position_embeddings, "do_lower_case": False}
    (folder / POOLING_FOLDER).mkdir()
    for name, content in (
        ("modules.json", modules),
        ("sentence_bert_config.json", length),
        (f"{POOLING_FOLDER}/config.json", pooling),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
