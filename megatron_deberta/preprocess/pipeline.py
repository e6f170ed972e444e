"""Text to shards on one machine: blocks go out to worker processes, tokens come back in order.

Owns the processes, back-pressure and the writers. Refuses to go on after a bad record, a dead
worker or a full disk: then nothing appears under a final name.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.indexed_format import bin_path, idx_path, manifest_path
from megatron_deberta.data.indexed_writer import IndexedWriter, dtype_for_vocab, publish_shards
from megatron_deberta.data.manifest import Manifest, write_manifest
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.preprocess.cutting import Block, RecordReader
from megatron_deberta.preprocess.progress import ProgressDisplay
from megatron_deberta.preprocess.records import parse_block
from megatron_deberta.preprocess.sources import Source
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

BLOCKS_AHEAD = 3
"""Blocks a worker may have waiting or finished; bounds memory whatever the corpus's size."""


@dataclass(frozen=True, slots=True)
class EncodedKey:
    """One key's documents of a block.

    Attributes:
        tokens: ids of all documents in order, ``[tokens]`` in the shard's dtype.
        lengths: tokens a document, int64 ``[documents]``; documents without tokens left out.
    """

    tokens: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]


def shard_prefix(output: str, key: str) -> str:
    """Return Megatron's name of the shard of one key."""
    return f"{output}_{key}_document"


def preprocess(
    sources: Sequence[Source],
    blocks: Iterable[tuple[Source, Block]],
    tokenizer_path: str,
    output: str,
    *,
    keys: Sequence[str] = ("text",),
    workers: int = 0,
    force: bool = False,
) -> list[Manifest]:
    """Tokenize text into one shard a key: ``{output}_{key}_document.{bin,idx,manifest.json}``.

    Shards hold no special tokens; packing adds them. They do not depend on ``workers``.

    Args:
        sources: input files, for the manifest and the progress display.
        blocks: their text.
        tokenizer_path: see ``load_tokenizer``.
        output: beginning of the shards' names.
        keys: JSON keys to take, each into a shard of its own.
        workers: worker processes; 0 works in this one.
        force: replace shards that exist.

    Returns:
        What was recorded beside each shard.

    Raises:
        ConfigError: a shard exists, or a key cannot be part of a file name.
        DataError: an input, the tokenizer or the disk fails, a worker dies, or there is no text.
    """
    prefixes = {key: shard_prefix(output, key) for key in keys}
    _refuse_existing(prefixes, force)
    tokenizer = load_tokenizer(tokenizer_path)
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    total_bytes = sum(source.size_bytes for source in sources)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefixes[key], dtype)) for key in keys]
        display = stack.enter_context(ProgressDisplay(total_bytes))
        encoded = _encode_all(blocks, tokenizer, tokenizer_path, tuple(keys), workers)
        # Closing the generator stops the workers before the writers clean up.
        for (_, block), parts in stack.enter_context(contextlib.closing(encoded)):
            for writer, part in zip(writers, parts, strict=True):
                _write(writer, part)
            display.advance(
                file_bytes=len(block.content),
                text_bytes=len(block.content),
                tokens=sum(part.tokens.size for part in parts),
                documents=parts[0].lengths.size,
            )
        for key, writer in zip(keys, writers, strict=True):
            if not writer.num_documents:
                raise DataError(f"no text under key {key!r} in {len(sources)} input file(s)")
        manifests = [
            write_manifest(
                writer,
                tokenizer_fingerprint=tokenizer.fingerprint,
                tokenizer_path=os.path.abspath(tokenizer_path),
                vocab_size=tokenizer.vocab_size,
                sources=tuple(source.path for source in sources),
            )
            for writer in writers
        ]
        publish_shards(writers)
    return manifests


def read_blocks(sources: Iterable[Source]) -> Iterator[tuple[Source, Block]]:
    """Read files of text in blocks of whole records."""
    for source in sources:
        for block in RecordReader(source).blocks(0):
            yield source, block


def encode_block(
    source: Source, block: Block, tokenizer: Tokenizer, keys: Sequence[str]
) -> list[EncodedKey]:
    """Tokenize the documents of a block.

    Raises:
        DataError: a record is bad.
    """
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    arrays: list[list[npt.NDArray[np.int32]]] = [[] for _ in keys]
    documents, defects = parse_block(block, source.text_format, keys)
    for defect in defects:
        raise DataError(f"{source.name}: line {defect.line}: {defect.reason}: {defect.detail}")
    for document in documents:
        for array, text in zip(arrays, document.texts, strict=True):
            ids = tokenizer.encode_array(text)
            if ids.size:
                array.append(ids)
    return [
        EncodedKey(
            np.concatenate([np.empty(0, np.int32), *array]).astype(dtype),
            np.fromiter((ids.size for ids in array), np.int64, len(array)),
        )
        for array in arrays
    ]


def _write(writer: IndexedWriter, part: EncodedKey) -> None:
    for document in (
        np.split(part.tokens, np.cumsum(part.lengths)[:-1]) if part.lengths.size else ()
    ):
        writer.add_document(document)


def _encode_all(
    blocks: Iterable[tuple[Source, Block]],
    tokenizer: Tokenizer,
    tokenizer_path: str,
    keys: tuple[str, ...],
    workers: int,
) -> Generator[tuple[tuple[Source, Block], list[EncodedKey]], None, None]:
    """Encode blocks, in their order, here or in worker processes."""
    if not workers:
        for block in blocks:
            yield block, encode_block(*block, tokenizer, keys)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A forked copy of a process that runs threads, as the display does, can deadlock.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(tokenizer_path,),
    )
    waiting: deque[tuple[tuple[Source, Block], Future[list[EncodedKey]]]] = deque()
    try:
        for block in blocks:
            if len(waiting) == BLOCKS_AHEAD * workers:
                first, future = waiting.popleft()
                yield first, future.result()
            waiting.append((block, pool.submit(_encode_in_worker, *block, tokenizer_path, keys)))
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died (killed, or out of memory?); try --workers {workers // 2}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(tokenizer_path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer(tokenizer_path)


@functools.lru_cache(maxsize=1)
def _worker_tokenizer(tokenizer_path: str) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


def _encode_in_worker(
    source: Source, block: Block, tokenizer_path: str, keys: tuple[str, ...]
) -> list[EncodedKey]:
    return encode_block(source, block, _worker_tokenizer(tokenizer_path), keys)


def _refuse_existing(prefixes: dict[str, str], force: bool) -> None:
    for key, prefix in prefixes.items():
        if not key or os.sep in key:
            raise ConfigError(f"--input-key {key!r}: cannot be part of a file name")
        found = [
            p
            for p in (bin_path(prefix), idx_path(prefix), manifest_path(prefix))
            if os.path.exists(p)
        ]
        if found and not force:
            raise ConfigError(f"{found[0]}: exists; choose another --output or add --force")
