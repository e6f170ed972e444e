"""ONNX graphs of published models, in a folder that other libraries open.

The folder has the model's own ``config.json``, its tokenizer and its files for
sentence-transformers, and the graphs under the names of transformers.js: ``onnx/model.onnx``,
``model_fp16.onnx`` and ``model_quantized.onnx`` (int8).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from torch import Tensor

from megatron_deberta.errors import CheckpointError, ConfigError, DataError
from megatron_deberta.hf.config import choose_model_type, has_own_class
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.heads import HEADS, GraphKind, task_head
from megatron_deberta.hf.loading import (
    build_with_head,
    load_export_tokenizer,
    load_pretrained,
    quiet_transformers,
)
from megatron_deberta.hf.onnx.check import (
    Batch,
    compare_graph,
    graph_runner,
    our_output,
    stock_class,
    stock_output,
    time_graph,
)
from megatron_deberta.hf.onnx.export import FOLDER, Agreement, OnnxReport, write_report
from megatron_deberta.hf.onnx.graph import OnnxDtype, write_graph
from megatron_deberta.hf.onnx.libraries import require_libraries
from megatron_deberta.hf.published import Release, open_with_head, read_config, safetensors_folder
from megatron_deberta.hf.verify import pad_rows
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.tokenizer import CONFIG_FILE

GRAPH_FILES: dict[OnnxDtype, str] = {
    "fp32": "model.onnx", "fp16": "model_fp16.onnx", "int8": "model_quantized.onnx",
}  # fmt: skip
_COPIED = (
    "config.json", "LICENSE*", "README.md", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip
MIN_AGREEMENT = 0.99
"""Share of the fp32 graph's decisions that an int8 graph keeps; layers stay in fp32 for it."""
_SENSITIVITY_TEXTS = 64
_TEXT_TOKENS = 256
"""Tokens at which the texts for decisions are cut."""
_TEXT_BATCH = 8


@dataclass(frozen=True)
class PublishedExport:
    """Graphs of a published model.

    Attributes:
        kind: what they compute.
        judge: the model they were compared with.
        reports: of each graph, by format.
    """

    kind: GraphKind
    judge: str
    reports: dict[OnnxDtype, OnnxReport]


def export_published(
    directory: Path,
    output: Path,
    *,
    dtypes: Sequence[OnnxDtype] = ("fp32",),
    encoder: bool = False,
    timing: bool = True,
    texts: Sequence[str] = (),
    tokenizer_path: str = "",
    allow_pickle: bool = False,
    sha256: str = "",
) -> PublishedExport:
    """Write ONNX graphs of a published model, and compare them with transformers' class.

    Args:
        directory: its folder, of a DeBERTa, DeBERTa-v2 or -v3, or RoBERTa with or without a head.
        output: folder to create; must not exist, or be empty.
        dtypes: formats of the graphs.
        encoder: write the graph of the encoder, not of the model's own head.
        timing: compare the speed with transformers.
        texts: texts on which decisions are compared with the fp32 graph's. An int8 graph that
            keeps fewer than ``MIN_AGREEMENT`` gets its most sensitive layers in fp32.
        tokenizer_path: the model's tokenizer; empty: the one in ``directory``.
        allow_pickle: read a ``.bin`` file (see ``hf/legacy_bin.py``).
        sha256: expected digest of the weight file; empty: unchecked, and pickles are rejected.

    Raises:
        CheckpointError: the model cannot be read or lacks its head, or a graph computes other
            values than transformers' class.
        ConfigError: ``output`` is in use, or onnx is not installed.
        DataError: there is no usable tokenizer.
    """
    require_libraries()
    with output_folder(output) as folder, TemporaryDirectory(dir=folder.parent) as scratch:
        source = safetensors_folder(
            directory, Path(scratch), allow_pickle=allow_pickle, sha256=sha256
        )
        fields = read_config(source)
        if "model_type" not in fields:
            raise CheckpointError(
                f"{directory}: config.json has no model_type, so it is in Microsoft's format; "
                f"import it with: megatron-deberta convert --from microsoft {directory}"
            )
        release = open_with_head(source, fields)
        kind = _kind(release, directory, encoder=encoder)
        tokenizer = load_export_tokenizer(fields, tokenizer_path or directory)
        location = tokenizer_path or str(directory)
        _copy_files(source, folder, location, with_types=release.config.type_vocab_size > 0)
        (folder / FOLDER).mkdir()
        writer = _Writer(
            folder, source, release, kind, tokenizer, texts, timing=timing,
            is_multi_label=task_head(fields).head == "multilabel",
        )  # fmt: skip
        reports = {dtype: writer.write(dtype) for dtype in dtypes}
    return PublishedExport(kind, writer.judge, reports)


def _kind(release: Release, directory: Path, *, encoder: bool) -> GraphKind:
    """Return the graph of a published model.

    Raises:
        CheckpointError: the file lacks a part of the head.
        ConfigError: the head has no graph.
    """
    head = release.config.head
    if encoder or (head == "mlm" and release.why_untrained):
        return "encoder"
    if release.missing:
        raise CheckpointError(
            f"{directory}: the weights lack {release.missing[0].name}, so the head is not trained; "
            "give the fine-tuned model, or --encoder for the graph of the encoder"
        )
    if head == "mlm" and not release.config.mask_decoder_passes:
        return "masked-lm"
    kind = HEADS[head].graph
    if kind is None:
        raise ConfigError(f"--to onnx has no graph for the head {head}; use --encoder")
    return kind


def _copy_files(source: Path, folder: Path, tokenizer: str, *, with_types: bool) -> None:
    """Copy config, card and pooling, and save the tokenizer with its ``tokenizer.json``.

    Args:
        source: folder of the published model.
        folder: of the export.
        tokenizer: folder of the tokenizer.
        with_types: the graph has the input ``token_type_ids``, so the tokenizer returns them.

    Raises:
        DataError: transformers cannot load the tokenizer.
    """
    for pattern in _COPIED:
        for path in source.glob(pattern):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text(f"# {source.name}\n", encoding="utf-8")
    try:
        with quiet_transformers():
            loaded = transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            if with_types and "token_type_ids" not in loaded.model_input_names:
                loaded.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
            loaded.save_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise DataError(
            f"tokenizer {tokenizer} cannot be loaded by transformers: {error}; give the model's "
            "tokenizer with --tokenizer"
        ) from error
    path = folder / CONFIG_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        # The name of the same class before transformers 5, which optimum still needs.
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass
class _Writer:
    """Writes graphs of a model and measures them.

    Attributes:
        folder: of the export.
        source: the published model, in safetensors.
        release: the same, opened.
        kind: what the graphs compute.
        tokenizer: the model's tokenizer.
        texts: for decisions.
        timing: compare the speed with transformers.
        is_multi_label: each class is decided for itself.
        judge: name of the model that graphs are compared with.
    """

    folder: Path
    source: Path
    release: Release
    kind: GraphKind
    tokenizer: Tokenizer
    texts: Sequence[str]
    timing: bool
    is_multi_label: bool

    def __post_init__(self) -> None:
        """Open the model that graphs are compared with, and encode the texts."""
        self.config = self.release.config
        self.judge, self._reference = self._open_judge()
        self._batches = self._text_batches() if self.kind != "choices" else []
        self._fp32: list[Tensor] = []

    def write(self, dtype: OnnxDtype) -> OnnxReport:
        """Write a graph and its report.

        Raises:
            CheckpointError: it computes other values than the judge.
        """
        path = self.folder / FOLDER / GRAPH_FILES[dtype]
        self._write_graph(path, dtype)
        agreement = self._agreement(path, dtype) if self._batches else None
        parity = compare_graph(
            path, self._reference, self.config, self.kind, self.tokenizer, dtype, self.judge
        )
        speed = {}
        if self.timing:
            speed = time_graph(path, self.source, self.config, self.kind, self.tokenizer)
        return write_report(path, self.kind, dtype, parity, speed=speed, agreement=agreement)

    def _write_graph(
        self, path: Path, dtype: OnnxDtype, int8_layers: Collection[int] | None = None
    ) -> None:
        read = self.release.tensor
        write_graph(path, self.config, read, self.kind, dtype, int8_layers=int8_layers)

    def _open_judge(self) -> tuple[str, Callable[[Batch], Tensor]]:
        """Return the model that graphs are compared with, and its name.

        Where transformers has no class with this head, it is our model.
        """
        model_type, _ = choose_model_type(self.config)
        if self.kind == "fill-mask" or has_own_class(self.config, model_type):
            ours = build_with_head(self.config, self.release.tensor)
            return "our model", partial(our_output, ours, self.kind)
        chosen, options = stock_class(self.config, self.kind), {}
        if self.config.position_terms == "none" and self.kind == "encoder":
            # RoBERTa's pooler, which is not in every file.
            options["add_pooling_layer"] = False
        stock = load_pretrained(chosen, self.source, dtype=torch.float32, **options)
        return f"transformers' {type(stock).__name__}", partial(stock_output, stock, self.kind)

    def _text_batches(self) -> list[Batch]:
        """Return padded batches of the texts, ``[B, N]``."""
        tokenizer = self.tokenizer
        limit = min(_TEXT_TOKENS, self.config.max_position_embeddings) - 2
        rows = []
        for text in self.texts:
            ids = [tokenizer.cls_id, *tokenizer.encode(text)[:limit], tokenizer.sep_id]
            types = {"token_type_ids": [0] * len(ids)} if self.config.type_vocab_size else {}
            rows.append({"input_ids": ids, **types})
        return [
            pad_rows(rows[start : start + _TEXT_BATCH], tokenizer.pad_id)
            for start in range(0, len(rows), _TEXT_BATCH)
        ]

    def _outputs(self, path: Path, batches: Sequence[Batch]) -> list[Tensor]:
        """Return a graph's outputs; those at padding are zero."""
        run = graph_runner(path, self.kind)
        outputs = [run(batch) for batch in batches]
        if self.kind == "rows":
            return outputs
        masks = (batch["attention_mask"].bool() for batch in batches)
        return [out.where(mask[..., None], 0.0) for out, mask in zip(outputs, masks, strict=True)]

    def _decisions(self, output: Tensor, batch: Batch) -> Tensor | None:
        """Return the decisions of an output ``[B, K]`` or ``[B, N, K]``; None: it has none."""
        if self.kind == "encoder" or output.shape[-1] == 1:
            return None
        if self.kind == "rows":
            return output > 0 if self.is_multi_label else output.argmax(-1)
        mask = batch["attention_mask"].bool()
        if self.kind == "spans":
            return output.masked_fill(~mask[..., None], -math.inf).argmax(1)
        return output.argmax(-1)[mask]

    def _agreement(self, path: Path, dtype: OnnxDtype) -> Agreement | None:
        """Compare decisions with the fp32 graph's; an int8 graph may be written again.

        Returns:
            What was found; None for the fp32 graph itself, or if the graph decides nothing.
        """
        if not self._fp32:
            with TemporaryDirectory(dir=self.folder) as scratch:
                fp32 = path if dtype == "fp32" else Path(scratch) / "model.onnx"
                if fp32 != path:
                    self._write_graph(fp32, "fp32")
                self._fp32 = self._outputs(fp32, self._batches)
        if dtype == "fp32" or self._decisions(self._fp32[0], self._batches[0]) is None:
            return None
        found = self._count(path, ())
        if dtype == "int8" and found.share < MIN_AGREEMENT:
            order = self._sensitive_layers()
            low, high = 0, len(order)
            # With `high` layers in fp32 enough decisions are kept: all layers are fp32's graph.
            while high - low > 1:
                middle = (low + high) // 2
                enough = self._with_fp32_layers(path, order[:middle]).share >= MIN_AGREEMENT
                low, high = (low, middle) if enough else (middle, high)
            found = self._with_fp32_layers(path, order[:high])
        return found

    def _with_fp32_layers(self, path: Path, fp32_layers: Collection[int]) -> Agreement:
        layers = set(range(self.config.num_layers)) - set(fp32_layers)
        self._write_graph(path, "int8", layers)
        return self._count(path, tuple(sorted(fp32_layers)))

    def _count(self, path: Path, fp32_layers: tuple[int, ...]) -> Agreement:
        same = total = texts = 0
        outputs = self._outputs(path, self._batches)
        for expected, output, batch in zip(self._fp32, outputs, self._batches, strict=True):
            ours, theirs = self._decisions(output, batch), self._decisions(expected, batch)
            assert ours is not None
            assert theirs is not None
            same, total = same + int((ours == theirs).sum()), total + ours.numel()
            texts += len(output)
        return Agreement(texts, total, same, fp32_layers)

    def _sensitive_layers(self) -> list[int]:
        """Return the layers by the outputs' error when only this one is int8, largest first."""
        batches = self._batches[: _SENSITIVITY_TEXTS // _TEXT_BATCH]
        errors = []
        with TemporaryDirectory(dir=self.folder) as scratch:
            path = Path(scratch) / "model.onnx"
            for layer in range(self.config.num_layers):
                self._write_graph(path, "int8", {layer})
                pairs = zip(self._outputs(path, batches), self._fp32, strict=False)
                errors.append(sum((a - b).square().sum().item() for a, b in pairs))
        return sorted(range(len(errors)), key=lambda layer: -errors[layer])
