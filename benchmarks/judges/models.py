"""Microsoft's models beside ours, with weights that our importer reads from Microsoft's files."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.judges.shims import load
from megatron_deberta.config.schema import (
    FinetuneConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    with_task_head,
)
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.hf.names import hf_tensors, standard_names
from megatron_deberta.hf.published import open_release
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.labelled import TASK, TaskModel

TaskHead = Literal["classification", "regression", "choices", "tokens"]
CLASSES: dict[TaskHead, str] = {
    "classification": "SequenceClassificationModel",
    "regression": "SequenceClassificationModel",
    "choices": "MultiChoiceModel",
    "tokens": "NERModel",
}
"""Microsoft's class of each head."""
NUM_ARCHITECTURES = 20
NUM_CHOICES = 3
_NUM_CLASSES = 4
_V1_ONLY = re.compile(r"attention\.self\.(key_proj|pos_key_proj)\.bias$")
"""Parameters that Microsoft's class adds to a v1 model, whose files have none; they start at 0."""


def random_fields(draw: random.Random, number: int, *, newest: bool = False) -> dict[str, Any]:
    """Return the content of a random small ``model_config.json``; every fourth is a v1 model.

    Args:
        draw: source of the choices.
        number: of the configuration.
        newest: only what Microsoft's newest code computes as its older one: with ``p2c`` alone it
            raises an error, and it cuts distances over ``max_relative_positions`` before they are
            put into buckets.
    """
    heads = draw.choice((1, 2, 3))
    size = heads * draw.choice((4, 8, 12))
    v1, has_types = number % 4 == 0, draw.random() < 0.5
    fields: dict[str, Any] = {
        "vocab_size": draw.randrange(40, 90),
        "hidden_size": size,
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice((16, 40)),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 48,
        "type_vocab_size": 2 if has_types else 0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-7,
        "position_biased_input": draw.random() < 0.3,
        "relative_attention": True,
        "max_relative_positions": draw.choice((-1, 12, 20)),
        "pos_att_type": "c2p|p2c",
        "padding_idx": 0,
    }
    if v1:
        return fields
    terms = draw.choice(("c2p|p2c", "p2c|c2p", "c2p", "p2c", ""))
    if newest and terms == "p2c":
        terms = "c2p"
    fields |= {
        "pos_att_type": terms,
        "relative_attention": bool(terms),
        "share_att_key": draw.random() < 0.5,
        "norm_rel_ebd": draw.choice(("layer_norm", "none")),
        "position_buckets": draw.choice((-1, 6, 10, 12)),
        "conv_kernel_size": draw.choice((0, 3, 5)),
        "conv_act": draw.choice(("gelu", "tanh")),
    }
    if newest and fields["position_buckets"] > 0:
        fields["max_relative_positions"] = -1
    return fields


@dataclass(frozen=True)
class Rows:
    """A batch with padding.

    Attributes:
        input_ids: int64 ``[B, N]``, 0 at padding.
        is_token: bool ``[B, N]``.
        token_type_ids: int64 ``[B, N]``, 0 at padding.
        position_ids: int64 ``[B, N]`` absolute positions; None: 0 to N-1.
    """

    input_ids: Tensor
    is_token: Tensor
    token_type_ids: Tensor
    position_ids: Tensor | None

    @property
    def inputs(self) -> ModelInputs:
        """The batch as our models read it."""
        return ModelInputs(self.input_ids, self.is_token, self.position_ids, self.token_type_ids)

    def theirs(self, leading: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the arguments of Microsoft's heads.

        Args:
            leading: dimensions in place of B.
        """
        named = {
            "input_ids": self.input_ids,
            "input_mask": self.is_token.long(),
            "type_ids": self.token_type_ids,
            "position_ids": self.position_ids,
        }
        return {
            name: None if tensor is None else tensor.reshape(*leading, -1)
            for name, tensor in named.items()
        }


def random_rows(fields: Mapping[str, Any], num_rows: int, generator: torch.Generator) -> Rows:
    """Return rows of different lengths, padded to the longest, which has no padding."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    longest = int(integers(9, fields["max_position_embeddings"] + 1, 1))
    lengths = integers(2, longest + 1, num_rows, 1)
    lengths[int(integers(0, num_rows, 1))] = longest
    is_token = torch.arange(longest) < lengths
    types = integers(0, 2, num_rows, longest) * is_token
    positions = None
    if fields["position_biased_input"] and int(integers(0, 2, 1)):
        positions = integers(0, fields["max_position_embeddings"], num_rows, longest)
    ids = integers(1, fields["vocab_size"], num_rows, longest) * is_token
    return Rows(ids, is_token, types, positions)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest expected value if that is over 1."""
    scale = max(1.0, float(expected.detach().abs().max()))
    return float((found.detach() - expected.detach()).abs().max()) / scale


def their_model(name: str, fields: Mapping[str, Any], **options: Any) -> Any:
    """Return one of Microsoft's models with random weights.

    Args:
        name: of the class, in ``apps.models``.
        fields: of ``model_config.json``.
        options: of the constructor.
    """
    config = load("deberta").ModelConfig.from_dict(dict(fields))
    model = getattr(load("apps.models"), name)(config, **options)
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    """Set all parameters to random values, those of norms around 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if re.search(r"[nN]orm\.weight$", name) else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))


def is_v1(fields: Mapping[str, Any]) -> bool:
    """Return whether a config is one of `random_fields` of v1."""
    return "share_att_key" not in fields


def released_state(model: nn.Module, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model in the names, and of v1 in the layout, of released files."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if not is_v1(fields):
        return state
    for name in [name for name in state if name.endswith(".query_proj.weight")]:
        stem = name.removesuffix("query_proj.weight")
        weights = [state.pop(f"{stem}{part}_proj.weight") for part in ("query", "key", "value")]
        by_head = [w.view(fields["num_attention_heads"], -1, w.size(1)) for w in weights]
        state[f"{stem}in_proj.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
        for old, new in (
            ("query_proj.bias", "q_bias"), ("value_proj.bias", "v_bias"), ("key_proj.bias", ""),
            ("pos_key_proj.weight", "pos_proj.weight"), ("pos_key_proj.bias", ""),
            ("pos_query_proj.weight", "pos_q_proj.weight"),
            ("pos_query_proj.bias", "pos_q_proj.bias"),
        ):  # fmt: skip
            tensor = state.pop(stem + old)
            if new:
                state[stem + new] = tensor
    return state


def import_release(
    state: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    adapt: Callable[[ModelConfig], ModelConfig] | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write Microsoft's files, and read them with our importer.

    Args:
        state: tensors in Microsoft's names.
        fields: of ``model_config.json``.
        adapt: changes the head of the architecture; None: that of a masked language model.

    Returns:
        The architecture without dropout, and every parameter by canonical name.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        path = Path(folder)
        (path / "model_config.json").write_text(json.dumps(dict(fields)))
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(contiguous, path / "pytorch.model.safetensors")
        release = open_release(path, "microsoft", Path(scratch), adapt=adapt)
        config = replace(
            release.config, hidden_dropout=0.0, attention_dropout=0.0, head_dropout=0.0
        )
        return config, dict(release.tensors())


def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set all parameters of one of our models by canonical name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def paired_gradients(
    ours: nn.Module, theirs: nn.Module, config: ModelConfig, *, encoder_only: bool = False
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name and gradients, ours and Microsoft's, of every parameter, or of the encoder's.

    Raises:
        AssertionError: a parameter has a gradient on one side only, and is not one of those that
            Microsoft's class adds to v1.
    """
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    new_names = standard_names(gradients, "deberta-v2")
    expected = {new_names[name]: gradient for name, gradient in gradients.items()}
    if encoder_only:
        expected = {name: each for name, each in expected.items() if name.startswith("deberta.")}
    parameters = dict(ours.named_parameters())
    found = {}
    for entry in hf_tensors(config, "deberta-v2"):
        (name,) = entry.canonical_names
        if name in parameters and (gradient := parameters[name].grad) is not None:
            found[entry.name] = gradient
    only = {name for name in expected.keys() - found.keys() if not _V1_ONLY.search(name)}
    only |= found.keys() - expected.keys()
    assert not only, f"gradients on one side only: {sorted(only)}"
    for name, gradient in found.items():
        yield name, gradient, expected[name]


class OurEncoder(nn.Module):
    """Our encoder with the calling convention of Microsoft's class ``DeBERTa``."""

    def __init__(self, model: Any, config: Any, *, as_dict: bool) -> None:
        super().__init__()
        self.model, self.config, self.as_dict = model, config, as_dict

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_all_encoded_layers: bool = True,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Return the states of the last layer ``[B, N, D]`` as Microsoft's class does."""
        inputs = ModelInputs(input_ids, attention_mask.bool(), position_ids, token_type_ids)
        layers = [self.model.encode(inputs)]
        return {"hidden_states": layers} if self.as_dict else layers


@dataclass(frozen=True)
class Found:
    """Largest differences of one comparison.

    Attributes:
        outputs: of hidden states, logits and loss.
        gradients: of every parameter.
        num_gradients: number of parameters.
    """

    outputs: float
    gradients: float
    num_gradients: int


@dataclass(frozen=True)
class JudgedPair:
    """A model of ours and Microsoft's with the same weights, in fp32.

    Attributes:
        ours: read by our importer.
        theirs: has loaded the same tensors.
        state: these, in Microsoft's names.
        rows: a batch.
        options: of the constructor of Microsoft's class.
    """

    ours: TaskModel
    theirs: Any
    state: dict[str, Tensor]
    rows: Rows
    options: dict[str, int]


def judged_pair(
    head: TaskHead,
    fields: Mapping[str, Any],
    seed: int,
    *,
    backend: str = "reference",
    encoder_only: bool = False,
) -> JudgedPair:
    """Return both models with a head.

    Args:
        head: of the labelled task.
        fields: of ``model_config.json``.
        seed: of weights and rows.
        backend: of our attention operator.
        encoder_only: our importer reads the encoder only, and our head has other weights.
    """
    torch.manual_seed(seed)
    options = {"num_labels": _NUM_CLASSES if head in ("classification", "tokens") else 1}
    state = released_state(their_model(CLASSES[head], fields, **options), fields)
    theirs = their_model(CLASSES[head], fields, **options)
    zero_biases_of_v1(theirs)
    theirs.load_state_dict(state, strict=not is_v1(fields))
    num_rows = 4 * NUM_CHOICES if head == "choices" else 5
    rows = random_rows(fields, num_rows, torch.Generator().manual_seed(seed))
    labels = tuple(str(number) for number in range(_NUM_CLASSES))
    labels = labels if head in ("classification", "tokens") else ()
    kept = {name for name in state if not encoder_only or re.match(r"(de)?bert(a)?\.", name)}
    config, weights = import_release(
        {name: state[name] for name in kept},
        fields,
        lambda model: with_task_head(model, head, labels, 0.0),
    )
    run = RunConfig(
        model=config,
        objective=ObjectiveConfig(name=config.head),
        finetune=FinetuneConfig(task="judged", data="none"),
    )
    ours = build_objective(run).build_model(RuntimeOptions(attention_backend=backend))
    assert isinstance(ours, TaskModel)
    copy_weights(ours, weights)
    return JudgedPair(ours, theirs, state, rows, options)


def compare_head(
    head: TaskHead,
    fields: Mapping[str, Any],
    seed: int,
    *,
    dtype: torch.dtype,
    backend: str,
    replace_encoder: bool,
) -> Found:
    """Compare hidden states, logits, loss and all gradients of a model with a head.

    Args:
        head: of the labelled task.
        fields: of ``model_config.json``.
        seed: of weights and rows.
        dtype: of both models.
        backend: of our attention operator.
        replace_encoder: compare Microsoft's head on our encoder with Microsoft's model; False: our
            own model, loss included.
    """
    pair = judged_pair(head, fields, seed, backend=backend, encoder_only=replace_encoder)
    ours, theirs, rows = pair.ours.to(dtype), pair.theirs.to(dtype), pair.rows
    arguments = {**rows.theirs(_leading(head, rows)), "labels": their_labels(head, rows)}
    expected = theirs(**arguments)
    as_dict = isinstance(expected, dict)
    logits, loss = (expected["logits"], expected["loss"]) if as_dict else expected
    states = ours.encode(rows.inputs)
    layers = _encoder(theirs)(
        rows.input_ids, rows.is_token.long(), rows.token_type_ids, position_ids=rows.position_ids
    )
    their_states = (layers["hidden_states"] if as_dict else layers)[-1]
    real = rows.is_token.unsqueeze(-1)
    worst = [difference(states * real, their_states * real)]
    direction = torch.randn(states.shape, dtype=dtype) * real
    ((their_states * direction).sum() + loss).backward()
    if replace_encoder:
        found = _with_our_encoder(head, fields, pair, as_dict=as_dict).to(dtype)(**arguments)
        our_logits, our_loss = (found["logits"], found["loss"]) if as_dict else found
    else:
        batch = task_batch(head, rows)
        count = ours.objective.count_targets(batch)[TASK]
        our_loss, our_logits = ours(batch).losses[TASK].loss / count, ours.logits(rows.inputs)
    visible = rows.is_token if head == "tokens" else torch.ones(logits.numel(), dtype=torch.bool)
    shape = (*rows.is_token.shape, -1) if head == "tokens" else (logits.numel(),)
    sides = [side.reshape(shape)[visible] for side in (our_logits, logits)]
    worst += [difference(*sides), difference(our_loss, loss)]
    ((states * direction).sum() + our_loss).backward()
    pairs = paired_gradients(ours, theirs, ours.config, encoder_only=replace_encoder)
    gradients = [difference(a, b) for _, a, b in pairs]
    return Found(max(worst), max(gradients), len(gradients))


def zero_biases_of_v1(model: nn.Module) -> None:
    """Undo `randomize` for the biases that v1's files lack: Microsoft's classes start at 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _V1_ONLY.search(name):
                parameter.zero_()


def _encoder(model: Any) -> Any:
    return model.bert if hasattr(model, "bert") else model.deberta


def _with_our_encoder(
    head: TaskHead, fields: Mapping[str, Any], pair: JudgedPair, *, as_dict: bool
) -> nn.Module:
    """Return Microsoft's model with our encoder in it."""
    model = their_model(CLASSES[head], fields, **pair.options)
    model.load_state_dict(pair.state, strict=False)
    new = OurEncoder(pair.ours, _encoder(model).config, as_dict=as_dict)
    setattr(model, "bert" if hasattr(model, "bert") else "deberta", new)
    result: nn.Module = model
    return result


def _leading(head: TaskHead, rows: Rows) -> tuple[int, ...]:
    count = len(rows.input_ids)
    return (count // NUM_CHOICES, NUM_CHOICES) if head == "choices" else (count,)


def _labels(head: TaskHead, rows: Rows) -> Tensor:
    """Return labels that are a function of the rows; -100: not scored."""
    first = rows.input_ids[:, 0]
    if head == "regression":
        return first / 10.0
    if head == "choices":
        return first[::NUM_CHOICES] % NUM_CHOICES
    if head == "tokens":
        classes = rows.input_ids % _NUM_CLASSES
        return classes.masked_fill(~rows.is_token | (rows.input_ids % 5 == 0), -100)
    return first % _NUM_CLASSES


def their_labels(head: TaskHead, rows: Rows) -> Tensor:
    """Return labels as Microsoft's classes read them; -1: not scored."""
    labels = _labels(head, rows)
    return labels if head == "regression" else labels.clamp(min=-1)


def task_batch(head: TaskHead, rows: Rows) -> TaskBatch:
    """Return the same batch with labels as our models read it."""
    count = len(rows.input_ids)
    choices = torch.arange(count).view(-1, NUM_CHOICES) if head == "choices" else None
    numbers = torch.arange(count)
    labels = _labels(head, rows)
    return TaskBatch(rows.inputs, labels, torch.arange(len(labels)), numbers, choices)
