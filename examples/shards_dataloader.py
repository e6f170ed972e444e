"""Read tokenized shards, packed and masked, in a torch DataLoader.

Usage: python examples/shards_dataloader.py [SHARD_PREFIX TOKENIZER]

Without arguments a small shard of random tokens is written to a temporary folder.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.collate import BatchBuilder
from megatron_deberta.data.dataset.corpus import Corpus, open_shard
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.randomness import Purpose
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.tokenizer import load_tokenizer

LENGTH, SEED = 128, 1


def random_shard(folder: str) -> tuple[str, Vocabulary]:
    """Write a shard of random tokens; ids 0 to 4 are [PAD], [CLS], [SEP], [UNK] and [MASK]."""
    prefix, size = str(Path(folder) / "random"), 1000
    random = np.random.default_rng(SEED)
    documents = [random.integers(5, size, length) for length in random.integers(20, 400, 50)]
    write_shard(prefix, documents, np.uint16)
    vocabulary = Vocabulary(
        size=size,
        num_tokens=size,
        pad_id=0,
        cls_id=1,
        sep_id=2,
        mask_id=4,
        special_ids=(0, 1, 2, 3, 4),
        word_starts=np.ones(size, np.bool_),
        fingerprint="",
    )
    return prefix, vocabulary


with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 2:
        prefix, vocabulary = sys.argv[1], Vocabulary.of(load_tokenizer(sys.argv[2]))
    else:
        prefix, vocabulary = random_shard(folder)
    corpus = Corpus([open_shard(prefix, vocabulary)])
    rows = PackedRows(corpus, vocabulary, LENGTH, "full_sentences", SEED)
    masker = Masker(ObjectiveConfig(), vocabulary, LENGTH, SEED, Purpose.TRAINING_MASK)
    builder = BatchBuilder(rows, masker, vocabulary, LENGTH, attend_across_documents=True)
    # A sample is its index: rows and masks are pure functions of (seed, index).
    loader = DataLoader(range(rows.rows_per_epoch), batch_size=4, collate_fn=builder.build)
    print(f"{corpus.num_tokens:,} tokens, {rows.rows_per_epoch} rows per epoch")
    for batch in loader:
        print(f"input_ids {list(batch.inputs.input_ids.shape)}, {batch.num_targets} masked tokens")
