"""Properties of each head in an export: transformers class, pipeline, model card, ONNX graph.

To add a head, add an entry to `HEADS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_deberta.config.schema import (
    CLASS_HEADS,
    SINGLE_OUTPUT_HEADS,
    Head,
    ModelConfig,
    RankingLoss,
)
from megatron_deberta.errors import CheckpointError

_DROPOUTS = ("cls_dropout", "classifier_dropout", "hidden_dropout_prob")
"""Fields of the dropout before the last projection; the first that is given counts."""
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
_MAX_LABELS = 100_000
EMBEDDINGS_FIELD = "normalize_embeddings"
"""In ``config.json`` of an export of the head ``embed``, whose class is that of its encoder."""
_CROSS_ENCODER, _FORMER_ACTIVATION = "sentence_transformers", "sbert_ce_default_activation_function"
"""Fields of sentence-transformers from version 4, and before."""
_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_IDENTITY = "torch.nn.modules.linear.Identity"

GraphKind: TypeAlias = Literal[
    "encoder", "fill-mask", "masked-lm", "rows", "tokens", "spans", "choices"
]
"""``fill-mask`` computes logits at masked positions, ``masked-lm`` at every token."""


@dataclass(frozen=True, kw_only=True)
class ExportedHead:
    """Export of the models with one head.

    Attributes:
        kind: end of the name of transformers' class, after ``For``; empty: transformers has no
            class with this head, and the export loads as an encoder.
        task: ``pipeline_tag`` of the model card.
        has_pipeline: transformers has a pipeline of that name.
        pipeline_options: further arguments of ``pipeline`` in Python code.
        objective: training objective, for the model card; empty: that of fine-tuning.
        trained: end of the card's first sentence.
        loss_unit: unit of the validation loss; empty: not stated.
        is_pretrained: trained on text without labels.
        is_encoder: the encoder of the export is of use by itself, for sentence-transformers too.
        problem_type: ``problem_type`` in ``config.json``; empty: none.
        graph: its ONNX graph; None: there is none.
    """

    kind: str
    task: str
    has_pipeline: bool = True
    pipeline_options: str = ""
    objective: str = ""
    trained: str = "fine-tuned"
    loss_unit: str = ""
    is_pretrained: bool = False
    is_encoder: bool = False
    problem_type: str = ""
    graph: GraphKind | None

    @property
    def auto_class(self) -> str:
        """Name of transformers' Auto class that loads the model."""
        return f"AutoModelFor{self.kind}" if self.kind else "AutoModel"


HEADS: Mapping[Head, ExportedHead] = {
    "mlm": ExportedHead(
        kind="MaskedLM", task="fill-mask", graph="fill-mask", is_encoder=True,
        objective="masked language modelling", loss_unit="nats per masked token",
        trained="pretrained by masked language modelling", is_pretrained=True,
    ),
    "autoregressive": ExportedHead(
        kind="CausalLM", task="text-generation", graph=None,
        objective="autoregressive language modelling", loss_unit="nats per predicted token",
        trained="pretrained to predict next tokens", is_pretrained=True,
    ),
    "discriminator": ExportedHead(
        kind="", task="feature-extraction", graph="encoder", is_encoder=True,
        objective="replaced-token detection, the discriminator",
        trained="pretrained by replaced-token detection", is_pretrained=True,
    ),
    "classification": ExportedHead(
        kind="SequenceClassification", task="text-classification", graph="rows",
        problem_type="single_label_classification",
    ),
    "multilabel": ExportedHead(
        kind="SequenceClassification", task="text-classification", graph="rows",
        problem_type="multi_label_classification",
        # The scores of all labels
        pipeline_options=", top_k=None",
    ),
    "regression": ExportedHead(
        kind="SequenceClassification", task="text-classification", graph="rows",
        problem_type="regression",
    ),
    # transformers 5 has removed its pipeline.
    "spans": ExportedHead(
        kind="QuestionAnswering", task="question-answering", graph="spans", has_pipeline=False,
    ),
    "tokens": ExportedHead(
        kind="TokenClassification", task="token-classification", graph="tokens",
        # Whole words; the model is trained on the first piece of each.
        pipeline_options=', aggregation_strategy="first"',
    ),
    "choices": ExportedHead(
        kind="MultipleChoice", task="multiple-choice", graph="choices", has_pipeline=False,
    ),
    "embed": ExportedHead(
        kind="", task="sentence-similarity", graph="encoder", is_encoder=True, has_pipeline=False,
    ),
    "rerank": ExportedHead(
        kind="SequenceClassification", task="text-ranking", graph="rows", has_pipeline=False,
    ),
}  # fmt: skip
"""The export of each head. ``rtd`` has none: its two models are exported one by one."""


def head_of(fields: Mapping[str, Any]) -> Head:
    """Return the head of a labelled task that a ``config.json`` names; ``mlm`` if it names none."""
    if EMBEDDINGS_FIELD in fields:
        return "embed"
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.get("num_labels")
    problem = fields.get("problem_type")
    of_classes: Head = "multilabel" if problem == "multi_label_classification" else "classification"
    is_ranking = "problem_type" not in fields and "activation_fn" in _cross_encoder(fields)
    of_score: Head = "rerank" if is_ranking else "regression"
    architectures = fields.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        kind = str(architecture).rpartition("For")[2]
        if kind == "SequenceClassification":
            return of_score if problem == "regression" or count == 1 else of_classes
        for head, export in HEADS.items():
            if export.kind == kind and not export.is_pretrained:
                return head
    return "mlm"


class HeadFields(NamedTuple):
    """Head of a labelled task that a ``config.json`` names.

    Attributes:
        head: ``mlm`` where it names none.
        labels: names of the classes, of `CLASS_HEADS`; ``LABEL_0`` and so on where the file has
            none.
        dropout: before the last projection.
    """

    head: Head
    labels: tuple[str, ...] = ()
    dropout: float = ModelConfig().head_dropout


def malformed(what: str) -> CheckpointError:
    """Return the error about a ``config.json`` whose fields are wrong or contradict each other."""
    return CheckpointError(f"config.json: {what}; give the model's own config file")


def task_head(fields: Mapping[str, Any]) -> HeadFields:
    """Return the head of a labelled task that ``config.json`` names.

    Raises:
        CheckpointError: fields about the head contradict each other.
    """
    head = head_of(fields)
    if head in ("mlm", "embed"):
        return HeadFields(head)
    labels = _labels(fields)
    problem = fields.get("problem_type")
    if problem is not None and head in ("classification", "multilabel", *SINGLE_OUTPUT_HEADS):
        if problem not in _PROBLEM_TYPES:
            raise CheckpointError(
                f"config.json: problem_type={problem!r} is not supported; only "
                f"{', '.join(_PROBLEM_TYPES)} can be imported"
            )
        if (problem == "regression") != (len(labels) == 1):
            raise malformed(
                f"problem_type={problem!r} contradicts the {len(labels)} classes of "
                "id2label or num_labels"
            )
    if head == "spans" and len(labels) != 2:
        raise CheckpointError(
            f"config.json: num_labels={len(labels)} of a model for question answering; only 2, "
            "start and end, can be imported"
        )
    # transformers' classes use the dropout of hidden states where the file has none of its own.
    given = {key: fields[key] for key in _DROPOUTS if fields.get(key) is not None}
    key, dropout = next(iter(given.items()), ("", ModelConfig().hidden_dropout))
    if type(dropout) not in (int, float):
        raise malformed(f"{key}={dropout!r} is not a number below 1, or null")
    return HeadFields(head, labels if head in CLASS_HEADS else (), float(dropout))


def cross_encoder_fields(loss: RankingLoss = "bce") -> dict[str, Any]:
    """Return what ``CrossEncoder`` of sentence-transformers reads in the ``config.json`` of scores.

    Args:
        loss: that the model was trained with; of ``bce`` the scores are probabilities.
    """
    return {_CROSS_ENCODER: {"activation_fn": _SIGMOID if loss == "bce" else _IDENTITY}}


def _cross_encoder(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    found = fields.get(_CROSS_ENCODER)
    return found if isinstance(found, dict) else {}


def has_sigmoid(fields: Mapping[str, Any]) -> bool:
    """Return whether ``CrossEncoder`` computes the sigmoid of scores, as it does by default."""
    former = fields.get(_FORMER_ACTIVATION) or _SIGMOID
    return str(_cross_encoder(fields).get("activation_fn") or former).endswith("Sigmoid")


def _labels(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the outputs, as transformers reads them.

    Raises:
        CheckpointError: ``id2label``, ``label2id`` and ``num_labels`` are malformed or contradict
            each other.
    """
    id2label, label2id = fields.get("id2label"), fields.get("label2id") or {}
    count = fields.get("num_labels")
    if count is not None and (type(count) is not int or not 1 <= count <= _MAX_LABELS):
        raise malformed(f"num_labels={count!r} is not a number of classes")
    if not isinstance(label2id, dict):
        label2id = {"": label2id}
    if id2label is None:
        names = [f"LABEL_{number}" for number in range(count or 2)]
        if label2id and sorted(label2id.values(), key=str) == sorted(range(len(label2id)), key=str):
            names = [str(name) for name in sorted(label2id, key=label2id.__getitem__)]
    else:
        by_number = {}
        if isinstance(id2label, dict):
            by_number = {str(key): str(name) for key, name in id2label.items()}
        numbers = [str(number) for number in range(len(by_number))]
        if not 1 <= len(by_number) <= _MAX_LABELS or set(by_number) != set(numbers):
            raise malformed(
                f"id2label={str(id2label)[:80]} is not an object with a name for each of the ids "
                "0, 1, 2 ..."
            )
        names = [by_number[number] for number in numbers]
    if count is not None and count != len(names):
        raise malformed(f"num_labels={count} contradicts the {len(names)} classes of id2label")
    for name, number in label2id.items():
        is_id = isinstance(number, int) and number in range(len(names))
        if name in names and (not is_id or names[number] != name):
            raise malformed(f"label2id says {name!r}: {number!r}, which contradicts id2label")
    return tuple(names)
