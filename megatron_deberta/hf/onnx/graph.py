"""The ONNX graph of a DeBERTa: projected position tables are constants, sizes are dynamic.

Compared with a graph exported from transformers' classes: the position table is projected when the
graph is written, one index of relative positions serves all layers, the last layer of a head on
rows runs at the first token only, and the mask decoder runs at the masked positions only.

Shapes: B batch, N length, M selected positions, D hidden size, A heads, H head size, S slots of the
position table within reach, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.heads import HEADS, GraphKind
from megatron_deberta.hf.onnx.libraries import MAX_FILE_BYTES, GraphWriter
from megatron_deberta.model import count_parameters
from megatron_deberta.model.heads import num_outputs, pooler_activation
from megatron_deberta.model.task_models import parameter_shapes
from megatron_deberta.ops import RelativePositions

OnnxDtype: TypeAlias = Literal["fp32", "fp16", "int8"]
_MASKED = -3e4
"""Added to the scores of padding; within the range of float16."""
_MASK_ROWS = 8
"""Rows of the padding bias that are added to the keys: a multiple of 8 keeps matrices aligned."""
_BLOCK_SCORES = 1 << 18
"""Scores of a block of heads: 1 MiB, half of a core's cache on present servers."""
_INT8_LIMIT = 63
"""Largest quantised weight: with 7 bits, sums of two products fit into 16 bits on processors
without VNNI instructions."""


def graph_kind(config: ModelConfig, *, encoder: bool = False) -> GraphKind:
    """Return the graph that is written for a model: of its own head, or of its encoder.

    Raises:
        ConfigError: the head has no graph.
    """
    kind = "encoder" if encoder else HEADS[config.head].graph
    if kind is None:
        raise ConfigError(f"--to onnx has no graph for model.head={config.head}; use --to hf")
    return kind


def write_graph(
    path: Path,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    kind: GraphKind,
    dtype: OnnxDtype = "fp32",
    *,
    int8_layers: Collection[int] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the graph of a model, opset ``libraries.OPSET``.

    Inputs are int64: ``input_ids`` and ``attention_mask`` ``[B, N]`` (``[B, C, N]`` for multiple
    choice), ``token_type_ids`` if the model has token types, and for fill-mask
    ``masked_positions`` ``[B, M]`` (-1 = none). Outputs are float32: ``last_hidden_state``
    ``[B, N, D]``, ``logits`` (``[B, M, V]`` for fill-mask, ``[B, N, V]`` for masked-lm), or
    ``start_logits`` and ``end_logits``.

    Args:
        path: file to write; constants of models beyond ``max_file_bytes`` go to a second file.
        config: the architecture.
        read: returns the logical fp32 tensor of a canonical name.
        kind: head of the graph.
        dtype: fp16 stores and computes everything in 16 bits; int8 quantises the projections of
            the layers (weights per output channel, activations per tensor) and keeps embeddings,
            position terms, attention, convolution and head in fp32.
        int8_layers: layers whose projections int8 quantises; None: all.
        max_file_bytes: maximum size of the first file.

    Raises:
        CheckpointError: the graph is invalid.
    """
    torch_dtype = torch.float16 if dtype == "fp16" else torch.float32
    external = _constant_bytes(config, torch_dtype) > max_file_bytes
    writer = GraphWriter(path, torch_dtype, external=external)
    layers = range(config.num_layers) if int8_layers is None else int8_layers
    _Model(writer, config, read, layers if dtype == "int8" else ()).write(kind)
    writer.save({"kind": kind, "dtype": dtype})


def _constant_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of the weights and of the projected position tables."""
    span = RelativePositions(config.max_relative_positions, config.position_buckets or 0).span
    terms = 0 if config.position_terms == "none" else config.position_terms.count("+") + 1
    tables = config.num_layers * terms * 2 * span * config.hidden_size
    return (count_parameters(config) + tables) * dtype.itemsize


@dataclass(frozen=True)
class _RelativeIndex:
    """Where the position terms of some queries are found; names of values in the graph.

    Attributes:
        c2p: int32 ``[.., M, N]``: slot of each query and key among the position keys.
        p2c: likewise among the position queries.
        first: first slot within reach of the length, int64 ``[1]``.
        last: slot after the last one, int64 ``[1]``.
    """

    c2p: str
    p2c: str
    first: str
    last: str


@dataclass(frozen=True)
class _Keys:
    """What some heads attend to; names of values in the graph.

    Attributes:
        key: transposed keys ``[.., H, N]``.
        value: values ``[.., N, H]``.
        mask: padding bias ``[.., R, N]``: R rows to be appended to the keys for the p2c term, or
            without this term one.
        index: of the position terms; None: there are none.
        key_table: transposed position keys of all heads and slots, ``[A, H, 2 * span]``; empty: no
            c2p term.
        query_table: position queries likewise, ``[A, 2 * span, H + R]``; empty: no p2c term.
        heads: first head, and the one after the last, int64 ``[1]``; None: all heads.
    """

    key: str
    value: str
    mask: str
    index: _RelativeIndex | None
    key_table: str = ""
    query_table: str = ""
    heads: tuple[str, str] | None = None


class _Model:
    """Adds a model to a graph; methods take and return names of values in the graph."""

    def __init__(
        self,
        g: GraphWriter,
        config: ModelConfig,
        read: Callable[[str], Tensor],
        int8_layers: Collection[int],
    ) -> None:
        self.g, self.config, self.read, self.int8_layers = g, config, read, int8_layers
        self.shapes = parameter_shapes(config)
        self.positions = RelativePositions(
            config.max_relative_positions, config.position_buckets or 0
        )
        self.head_size = config.hidden_size // config.num_heads
        self.c2p = config.position_terms in ("c2p", "c2p+p2c")
        self.p2c = config.position_terms in ("p2c", "c2p+p2c")
        self.scale = (self.head_size * (1 + self.c2p + self.p2c)) ** -0.5
        # Blocks keep a processor's cache; GPUs, for which float16 is, prefer large operations.
        self.in_blocks = g.dtype == torch.float32

    def write(self, kind: GraphKind) -> None:
        """Add all inputs, nodes and outputs."""
        g, config = self.g, self.config
        sizes = ("batch", "choices", "length") if kind == "choices" else ("batch", "length")
        names = ["input_ids", "attention_mask"]
        names += ["token_type_ids"] if config.type_vocab_size else []
        inputs = {name: g.input(name, *sizes) for name in names}
        if kind == "choices":
            length = g.op("Shape", "input_ids", start=2, end=3)
            rows = g.op("Concat", g.integers(-1), length, axis=0)
            inputs = {name: g.op("Reshape", name, rows) for name in names}
        self.ids = inputs["input_ids"]
        self._common(inputs["attention_mask"])
        hidden = self._embed(inputs.get("token_type_ids"))
        if kind == "fill-mask":
            self._fill_mask(hidden)
        elif kind in ("rows", "choices"):
            self._rows(hidden, kind)
        else:
            self._per_token(self._layers(hidden, config.num_layers), kind)

    def _common(self, mask: str) -> None:
        """Add values that all layers share."""
        g = self.g
        self.length = g.op("Shape", self.ids, start=1, end=2)
        count = g.op("Squeeze", self.length)
        self.range = g.op("Range", g.index(0), count, g.index(1))
        # Any non-zero value marks a token.
        is_token = g.op("Cast", mask, to=g.types.BOOL)
        keep = g.op("Cast", is_token, to=g.float_type)
        self.token_mask = g.op("Unsqueeze", keep, g.integers(-1))
        bias = g.op("Where", is_token, g.number(0.0), g.number(_MASKED))
        self.padding_bias = g.op("Unsqueeze", bias, g.integers(1, 2))
        heads, batch = g.integers(self.config.num_heads), g.op("Shape", self.ids, end=1)
        rows = g.integers(_MASK_ROWS if self.p2c else 1)
        shape = g.op("Concat", batch, heads, rows, self.length, axis=0)
        self.mask_rows = g.op("Expand", self.padding_bias, shape)
        # Heads per block: the most that divide their number and whose scores fit into the cache.
        sizes = [n for n in range(1, self.config.num_heads + 1) if self.config.num_heads % n == 0]
        area = g.op("Mul", g.op("Mul", self.length, self.length), g.integers(*sizes))
        fits = g.op("LessOrEqual", area, g.integers(_BLOCK_SCORES))
        fitting = g.op("Where", fits, g.integers(*sizes), g.integers(1))
        self.block_heads = g.op("ReduceMax", fitting, keepdims=1)
        self.num_blocks = g.op("Div", g.op("Mul", batch, heads), self.block_heads)

    def _embed(self, types: str | None) -> str:
        g = self.g
        hidden = g.op("Gather", self._weight("embeddings.token"), self.ids)
        if self.config.absolute_positions == "input":
            position = self._weight("embeddings.position")
            hidden = g.op("Add", hidden, g.op("Gather", position, self.range))
        if types is not None:
            hidden = g.op(
                "Add", hidden, g.op("Gather", self._weight("embeddings.token_type"), types)
            )
        return g.op("Mul", self._norm(hidden, "embeddings.norm"), self.token_mask)

    def _layers(self, hidden: str, count: int) -> str:
        """Run the first layers at every token, ``[B, N, D]``."""
        embedded = hidden
        index = self._relative_index(None)
        for layer in range(count):
            keys = self._project_keys(layer, hidden, index)
            hidden = self._layer(layer, hidden, keys, in_blocks=self.in_blocks)
            if layer == 0 and self.config.conv_kernel_size:
                hidden = self._convolve(embedded, hidden)
        return hidden

    def _last_layer(self, hidden: str, selected: str, query: str, passes: int) -> str:
        """Run the last layer at positions ``selected`` ``[B, M]`` with keys from ``hidden``."""
        layer = self.config.num_layers - 1
        index = self._relative_index(selected)
        keys = self._project_keys(layer, hidden, index)
        for _ in range(passes):
            query = self._layer(layer, query, keys)
        return query

    def _fill_mask(self, hidden: str) -> None:
        g, config = self.g, self.config
        chosen = g.op("Max", g.input("masked_positions", "batch", "masks"), g.index(0))
        passes = config.mask_decoder_passes
        hidden = self._layers(hidden, config.num_layers - (1 if passes else 0))
        states = self._gather_tokens(hidden, chosen)
        if passes:
            query = states
            if config.absolute_positions == "decoder":
                table = self._weight("mask_decoder.position")
                query = g.op("Add", query, g.op("Gather", table, chosen))
            states = self._last_layer(hidden, chosen, query, passes)
        g.output("logits", self._token_logits(states, chosen), "batch", "masks", config.vocab_size)

    def _token_logits(self, states: str, positions: str) -> str:
        """Return logits ``[B, M, V]`` of states ``[B, M, D]`` at ``positions`` ``[B, M]``."""
        g, config = self.g, self.config
        states = self._norm(g.op("Gelu", self._linear(states, "head.transform")), "head.norm")
        rows = g.op("Reshape", states, g.integers(-1, config.hidden_size))
        table = self._weight("embeddings.token")
        logits = g.op("Gemm", rows, table, self._weight("head", "bias"), transB=1)
        shape = g.op("Concat", g.op("Shape", positions), g.integers(config.vocab_size), axis=0)
        # No masks (or no rows) give no logits; without allowzero, a 0 means "as in the input".
        return g.op("Reshape", logits, shape, allowzero=1)

    def _rows(self, hidden: str, kind: GraphKind) -> None:
        """Add the head on the first token, with the last layer at this token only."""
        g, config = self.g, self.config
        batch = g.op("Shape", self.ids, end=1)
        first = g.op("Expand", g.index(0), g.op("Concat", batch, g.integers(1), axis=0))
        if config.num_layers == 1 and config.conv_kernel_size:
            # The convolution is added to the first layer's output at every token.
            state = self._gather_tokens(self._layers(hidden, 1), first)
        else:
            hidden = self._layers(hidden, config.num_layers - 1)
            state = self._last_layer(hidden, first, self._gather_tokens(hidden, first), 1)
        pooled = self._linear(g.op("Squeeze", state, g.integers(1)), "pooler.dense")
        pooled = g.op("Tanh" if pooler_activation(config) == "tanh" else "Gelu", pooled)
        logits = self._linear(pooled, "classifier")
        if kind == "choices":
            shape = g.op("Shape", "input_ids", end=2)
            g.output("logits", g.op("Reshape", logits, shape, allowzero=1), "batch", "choices")
        else:
            g.output("logits", logits, "batch", num_outputs(config))

    def _per_token(self, hidden: str, kind: GraphKind) -> None:
        g, config = self.g, self.config
        if kind == "encoder":
            g.output("last_hidden_state", hidden, "batch", "length", config.hidden_size)
        elif kind == "masked-lm":
            logits = self._token_logits(hidden, self.ids)
            g.output("logits", logits, "batch", "length", config.vocab_size)
        elif kind == "tokens":
            logits = self._linear(hidden, "classifier")
            g.output("logits", logits, "batch", "length", num_outputs(config))
        else:
            logits = self._linear(hidden, "qa_outputs")
            for number, name in enumerate(("start_logits", "end_logits")):
                g.output(name, g.op("Gather", logits, g.index(number), axis=2), "batch", "length")

    def _layer(self, layer: int, query: str, keys: _Keys, *, in_blocks: bool = False) -> str:
        """Run one layer for queries ``[B, M, D]``."""
        g, name = self.g, f"encoder.layers.{layer}"
        heads = self._heads(self._linear(query, f"{name}.attention.query", self.scale, int8=True))
        context = (self._attend_in_blocks if in_blocks else self._attend)(heads, keys)
        context = g.op("Transpose", context, perm=[0, 2, 1, 3])
        context = g.op("Reshape", context, g.integers(0, 0, self.config.hidden_size))
        out = self._linear(context, f"{name}.attention.output", int8=True)
        attended = self._norm(g.op("Add", out, query), f"{name}.attention.norm")
        inner = g.op("Gelu", self._linear(attended, f"{name}.ffn.up", int8=True))
        out = self._linear(inner, f"{name}.ffn.down", int8=True)
        return self._norm(g.op("Add", out, attended), f"{name}.ffn.norm")

    def _attend(self, query: str, keys: _Keys) -> str:
        """Return ``[.., M, H]`` of queries ``[.., M, H]``."""
        g, start = self.g, keys.mask
        if keys.index is not None and keys.query_table:
            # The product has slots before keys, so that queries come before keys in what is
            # gathered, and includes the padding bias: either would be a pass over all scores.
            masked = g.op("Concat", keys.key, keys.mask, axis=-2)
            by_slot = g.op("MatMul", self._within_reach(keys, keys.query_table, 1), masked)
            start = g.op("GatherElements", by_slot, keys.index.p2c, axis=-2)
        scores = g.op("Add", g.op("MatMul", query, keys.key), start)
        if keys.index is not None and keys.key_table:
            by_slot = g.op("MatMul", query, self._within_reach(keys, keys.key_table, 2))
            scores = g.op("Add", scores, g.op("GatherElements", by_slot, keys.index.c2p, axis=-1))
        return g.op("MatMul", g.op("Softmax", scores, axis=-1), keys.value)

    def _within_reach(self, keys: _Keys, table: str, axis: int) -> str:
        """Return the slots of a table, which are along an axis, within reach of the length."""
        g, index = self.g, keys.index
        assert index is not None
        if keys.heads is None:
            return g.op("Slice", table, index.first, index.last, g.integers(axis))
        begin, end = (
            g.op("Concat", head, slot, axis=0)
            for head, slot in zip(keys.heads, (index.first, index.last), strict=True)
        )
        return g.op("Slice", table, begin, end, g.integers(0, axis))

    def _attend_in_blocks(self, query: str, keys: _Keys) -> str:
        """Do as `_attend` for ``[B, A, N, H]``, a block of heads after another.

        The scores of all heads exceed the cache of a processor, so each operation on them would
        wait for memory.
        """
        g = self.g

        def blocks(value: str) -> str:
            sizes = g.op("Shape", value, start=2)
            shape = g.op("Concat", self.num_blocks, self.block_heads, sizes, axis=0)
            return g.op("Reshape", value, shape, allowzero=1)

        scanned = [blocks(value) for value in (query, keys.key, keys.value, keys.mask)]
        every = g.op("Range", g.index(0), g.op("Squeeze", self.num_blocks), g.index(1))
        of_row = g.op("Div", g.integers(self.config.num_heads), self.block_heads)

        def attend(block: str, query: str, key: str, value: str, mask: str) -> str:
            first = g.op("Mul", block, self.block_heads)
            heads = (first, g.op("Add", first, self.block_heads))
            return self._attend(query, replace(keys, key=key, value=value, mask=mask, heads=heads))

        def context() -> str:
            stacked = g.scan(attend, g.op("Mod", every, of_row), *scanned)
            return g.op("Reshape", stacked, g.op("Shape", query))

        # onnxruntime's Scan needs a block, an empty batch has none.
        is_empty = g.op("Squeeze", g.op("Equal", self.num_blocks, g.integers(0)))
        return g.choose(is_empty, lambda: g.op("Identity", query), context)

    def _project_keys(self, layer: int, hidden: str, index: _RelativeIndex | None) -> _Keys:
        g, name = self.g, f"encoder.layers.{layer}.attention"
        key = self._heads(self._linear(hidden, f"{name}.key", int8=True))
        value = self._heads(self._linear(hidden, f"{name}.value", int8=True))
        return _Keys(
            g.op("Transpose", key, perm=[0, 1, 3, 2]),
            value,
            self.mask_rows,
            index,
            self._table(layer, "key") if index is not None and self.c2p else "",
            self._table(layer, "query") if index is not None and self.p2c else "",
        )

    def _table(self, layer: int, which: Literal["key", "query"]) -> str:
        """Return a projected position table.

        Returns:
            Position keys ``[A, H, 2 * span]``, or position queries ``[A, 2 * span, H + R]`` whose
            last R features sum up the mask's rows.
        """
        g, config = self.g, self.config
        attention = f"encoder.layers.{layer}.attention"
        table = self._position_table()
        shared = config.share_position_projections
        stem = f"{attention}.{which}" if shared else f"{attention}.position_{which}"
        bias = self.read(f"{stem}.bias").float() if f"{stem}.bias" in self.shapes else None
        projected = F.linear(table, self.read(f"{stem}.weight").float(), bias)
        by_head = projected.unflatten(-1, (config.num_heads, -1)).transpose(0, 1)
        if which == "query":
            ones = by_head.new_full((*by_head.shape[:2], _MASK_ROWS), 1 / _MASK_ROWS)
            by_head = torch.cat([by_head * self.scale, ones], -1)
        else:
            by_head = by_head.transpose(1, 2)
        return g.constant(by_head, f"{attention}.{which}_positions")

    def _position_table(self) -> Tensor:
        """Return the (normalised) position table ``[2 * span, D]``."""
        table = self.read("encoder.relative_positions.weight").float()
        if not self.config.normalize_position_table:
            return table
        norm = "encoder.relative_positions.norm"
        weight, bias = (self.read(f"{norm}.{part}").float() for part in ("weight", "bias"))
        return F.layer_norm(table, table.shape[-1:], weight, bias, self.config.layer_norm_eps)

    def _relative_index(self, selected: str | None) -> _RelativeIndex | None:
        """Return the index for queries at ``selected`` ``[B, M]``; None: at every token."""
        if not (self.c2p or self.p2c):
            return None
        g = self.g
        keys = g.op("Unsqueeze", self.range, g.integers(0, 1))
        queries = self.range if selected is None else selected
        queries = g.op("Unsqueeze", queries, g.integers(-1))
        distance = g.op("Sub", queries, keys)
        farthest = g.op("Sub", self.length, g.integers(1))
        first = self._slot(g.op("Neg", farthest))
        last = g.op("Add", self._slot(farthest), g.integers(1))
        sign = g.op("Neg", distance) if self.config.p2c_index == "paper" else distance
        if selected is None and self.in_blocks:
            shape = g.op("Concat", self.block_heads, self.length, self.length, axis=0)
        else:
            batch, heads = g.op("Shape", self.ids, end=1), g.integers(self.config.num_heads)
            size = g.op("Shape", queries, start=-2, end=-1)
            shape = g.op("Concat", batch, heads, size, self.length, axis=0)

        def expand(distances: str) -> str:
            slots = g.op("Cast", g.op("Sub", self._slot(distances), first), to=g.types.INT32)
            if selected is not None or not self.in_blocks:
                slots = g.op("Unsqueeze", slots, g.integers(1))
            return g.op("Expand", slots, shape)

        return _RelativeIndex(
            c2p=expand(distance) if self.c2p else "",
            p2c=expand(sign) if self.p2c else "",
            first=first,
            last=last,
        )

    def _slot(self, distance: str) -> str:
        """Return the slots of distances, int64."""
        g, reach = self.g, self.positions.reach
        slots = g.constant(self.positions.slots(torch.arange(-reach, reach + 1)), "slots")
        near = g.op("Clip", distance, g.index(-reach), g.index(reach))
        return g.op("Gather", slots, g.op("Add", near, g.index(reach)))

    def _convolve(self, embedded: str, hidden: str) -> str:
        g, config = self.g, self.config
        assert config.conv_kernel_size is not None
        pad = config.conv_kernel_size // 2
        weight, bias = (self._weight("encoder.conv.conv", part) for part in ("weight", "bias"))
        by_channel = g.op("Transpose", embedded, perm=[0, 2, 1])
        convolved = g.op("Conv", by_channel, weight, bias, pads=[pad, pad])
        convolved = g.op("Mul", g.op("Transpose", convolved, perm=[0, 2, 1]), self.token_mask)
        activated = g.op("Gelu" if config.conv_activation == "gelu" else "Tanh", convolved)
        out = self._norm(g.op("Add", hidden, activated), "encoder.conv.norm")
        return g.op("Mul", out, self.token_mask)

    def _gather_tokens(self, hidden: str, chosen: str) -> str:
        """Return ``[B, M, D]`` of ``[B, N, D]`` at positions ``[B, M]``."""
        index = self.g.op("Unsqueeze", chosen, self.g.integers(-1))
        return self.g.op("GatherND", hidden, index, batch_dims=1)

    def _heads(self, projected: str) -> str:
        """``[B, M, D]`` -> ``[B, A, M, H]``."""
        g = self.g
        shape = g.integers(0, 0, self.config.num_heads, self.head_size)
        return g.op("Transpose", g.op("Reshape", projected, shape), perm=[0, 2, 1, 3])

    def _norm(self, hidden: str, name: str) -> str:
        weight, bias = (self._weight(name, part) for part in ("weight", "bias"))
        epsilon = self.config.layer_norm_eps
        return self.g.op("LayerNormalization", hidden, weight, bias, axis=-1, epsilon=epsilon)

    def _weight(self, stem: str, part: str = "weight") -> str:
        name = f"{stem}.{part}"
        return self.g.constant(self.read(name), name)

    def _linear(self, inputs: str, name: str, scale: float = 1.0, *, int8: bool = False) -> str:
        """Project ``[..., in]`` to ``[..., out]``, times a constant."""
        g = self.g
        weight = self.read(f"{name}.weight").float().t() * scale
        # Of a name "encoder.layers.LAYER."
        if int8 and int(name.split(".")[2]) in self.int8_layers:
            out = self._quantised(inputs, weight, name)
        else:
            out = g.op("MatMul", inputs, g.constant(weight, f"{name}.weight"))
        if f"{name}.bias" not in self.shapes:
            return out
        bias = self.read(f"{name}.bias").float() * scale
        return g.op("Add", out, g.constant(bias, f"{name}.bias"))

    def _quantised(self, inputs: str, weight: Tensor, name: str) -> str:
        """Multiply by an int8 weight ``[in, out]``; onnxruntime fuses these nodes to one."""
        g = self.g
        scale = weight.abs().amax(0).clamp(min=1e-12) / _INT8_LIMIT
        quantised = (weight / scale).round().clamp(-_INT8_LIMIT, _INT8_LIMIT).to(torch.int8)
        values, input_scale, zero = g.ops("DynamicQuantizeLinear", 3, inputs)
        product = g.op(
            "MatMulInteger",
            values,
            g.constant(quantised, f"{name}.weight"),
            zero,
            g.constant(torch.zeros(len(scale), dtype=torch.int8), f"{name}.zero_point"),
        )
        factor = g.op("Mul", input_scale, g.constant(scale, f"{name}.scale"))
        return g.op("Mul", g.op("Cast", product, to=g.types.FLOAT), factor)
