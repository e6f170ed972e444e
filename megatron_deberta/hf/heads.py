"""Properties of each head in an export: transformers class, pipeline, model card, ONNX graph.

To add a head, add an entry to `HEADS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from megatron_deberta.config.schema import Head

GraphKind: TypeAlias = Literal["encoder", "fill-mask", "rows", "tokens", "spans", "choices"]


@dataclass(frozen=True, kw_only=True)
class ExportedHead:
    """Export of the models with one head.

    Attributes:
        kind: end of the name of transformers' class, after ``For``; empty: transformers has no
            class with this head, and the export loads as an encoder.
        task: ``pipeline_tag`` of the model card.
        has_pipeline: transformers has a pipeline of that name.
        objective: training objective, for the model card.
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
    objective: str
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


HEADS: Mapping[Head, ExportedHead] = MappingProxyType(
    {
        "mlm": ExportedHead(
            kind="MaskedLM",
            task="fill-mask",
            objective="masked language modelling",
            trained="pretrained by masked language modelling",
            loss_unit="nats per masked token",
            is_pretrained=True,
            is_encoder=True,
            graph="fill-mask",
        ),
        "autoregressive": ExportedHead(
            kind="CausalLM",
            task="text-generation",
            objective="autoregressive language modelling",
            trained="pretrained to predict next tokens",
            loss_unit="nats per predicted token",
            is_pretrained=True,
            graph=None,
        ),
        "discriminator": ExportedHead(
            kind="",
            task="feature-extraction",
            objective="replaced-token detection, the discriminator",
            trained="pretrained by replaced-token detection",
            is_pretrained=True,
            is_encoder=True,
            graph="encoder",
        ),
        "classification": ExportedHead(
            kind="SequenceClassification",
            task="text-classification",
            objective="fine-tuned, head classification",
            problem_type="single_label_classification",
            graph="rows",
        ),
        "regression": ExportedHead(
            kind="SequenceClassification",
            task="text-classification",
            objective="fine-tuned, head regression",
            problem_type="regression",
            graph="rows",
        ),
        "spans": ExportedHead(
            kind="QuestionAnswering",
            task="question-answering",
            # transformers 5 has removed it.
            has_pipeline=False,
            objective="fine-tuned, head spans",
            graph="spans",
        ),
        "tokens": ExportedHead(
            kind="TokenClassification",
            task="token-classification",
            objective="fine-tuned, head tokens",
            graph="tokens",
        ),
        "choices": ExportedHead(
            kind="MultipleChoice",
            task="multiple-choice",
            has_pipeline=False,
            objective="fine-tuned, head choices",
            graph="choices",
        ),
    }
)
"""The export of each head. ``rtd`` has none: its two models are exported one by one."""


def head_of(fields: Mapping[str, Any]) -> Head:
    """Return the head of a labelled task that a ``config.json`` names; ``mlm`` if it names none."""
    labels = fields.get("id2label") or ()
    is_score = fields.get("problem_type") == "regression" or len(labels) == 1
    for architecture in fields.get("architectures") or ():
        kind = str(architecture).rpartition("For")[2]
        if kind == "SequenceClassification":
            return "regression" if is_score else "classification"
        for head, export in HEADS.items():
            if export.kind == kind and not export.is_pretrained:
                return head
    return "mlm"
