"""Head of a labelled task for a model with other classes, or the same ones in another order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_deberta.checkpoint.layout import WEIGHT
from megatron_deberta.checkpoint.reader import Slice
from megatron_deberta.checkpoint.store import WeightSource
from megatron_deberta.config.schema import ModelConfig

_CLASSIFIER = ("classifier.weight", "classifier.bias")
_OUTPUTS = (*_CLASSIFIER, "qa_outputs.weight", "qa_outputs.bias")
"""Parameters whose rows are the outputs of a head."""


def class_order(own: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return the index in ``own`` of each wanted class; None: the names are not the same.

    Upper and lower case are the same if no two names then are.
    """
    for key in (str, str.casefold):
        names = {key(name): index for index, name in enumerate(own)}
        order = [names.get(key(name), -1) for name in wanted]
        if len(names) == len(own) and sorted(order) == list(range(len(own))):
            return order
    return None


def are_placeholders(labels: Sequence[str]) -> bool:
    """Return whether classes have transformers' default names, which say nothing."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


class TaskHead:
    """Weights of a model whose outputs are those of another list of classes.

    Rows of the last projection are permuted by the names of the classes. The projection is left
    out, so that it starts anew, if the classes are not the same or the head is of another kind.

    Args:
        source: the weights.
        own: their architecture, with the model's own head and classes.
        wanted: the architecture to load.

    Attributes:
        path: where the weights are stored.
        shapes: logical shape by canonical name.
        order: index of each class in the weights; None: there are no rows to permute.
        why_new: why the last projection is left out; empty: it is not.
    """

    def __init__(self, source: WeightSource, own: ModelConfig, wanted: ModelConfig) -> None:
        self._source = source
        self.path = source.path
        self.order: list[int] | None = None
        self.why_new = ""
        if own.head != wanted.head:
            self.why_new = f"{self.path} has the head {own.head}, not {wanted.head}"
        elif own.labels != wanted.labels:
            self.order = class_order(own.labels, wanted.labels)
            if self.order is None:
                self.why_new = (
                    f"{self.path} has the classes {_shown(own.labels)}, not {_shown(wanted.labels)}"
                )
        left_out = _OUTPUTS if self.why_new else ()
        self.shapes = {name: s for name, s in source.shapes.items() if name not in left_out}
        self._labels = wanted.labels

    def describe(self, new: Sequence[str]) -> str:
        """Return what becomes of the head, for the log.

        Args:
            new: names of the parameters that start from new weights.
        """
        if new:
            why = f" ({self.why_new})" if self.why_new else ""
            return f"the head starts from new weights: {', '.join(new)}{why}"
        if self.order is not None:
            return (
                "the head is taken over, its rows permuted to the order of the task's classes: "
                f"{_shown(self._labels)}"
            )
        return "the head is taken over unchanged"

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter; arguments as in `CheckpointReader.tensor`."""
        if self.order is None or name not in _CLASSIFIER:
            return self._source.tensor(name, kind, part)
        tensor = self._source.tensor(name, kind)[self.order]
        return tensor if part is None else part.of(tensor)


def _shown(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:8])
    return f"{shown}, ... ({len(labels)})" if len(labels) > 8 else shown
