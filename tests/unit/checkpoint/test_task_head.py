from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.checkpoint.reader import Slice
from megatron_deberta.checkpoint.task_head import TaskHead, class_order
from megatron_deberta.config.schema import ModelConfig, with_task_head


class Weights:
    """A head with three rows."""

    path = Path("model")
    shapes = {"classifier.weight": (3, 4), "classifier.bias": (3,), "pooler.dense.weight": (4, 4)}

    def tensor(self, name: str, *args: Any) -> Tensor:
        assert not args or args == ("weight", None) or args == ("weight",)
        rows = torch.arange(3.0)
        return rows if name.endswith("bias") else rows[:, None].expand(3, 4)


MODEL = with_task_head(ModelConfig(), "classification", ("yes", "no", "maybe"))


@pytest.mark.parametrize(
    ("own", "wanted", "order"),
    [
        ("a b c", "a b c", [0, 1, 2]),
        ("a b c", "c a b", [2, 0, 1]),
        ("A B C", "c a b", [2, 0, 1]),
        ("a A", "A a", [1, 0]),
        ("a A", "b a", None),
        ("a b c", "a b", None),
        ("a b", "a b c", None),
        ("a a", "a a", None),
        ("LABEL_0 LABEL_1", "no yes", None),
    ],
)
def test_class_order(own: str, wanted: str, order: list[int] | None) -> None:
    assert class_order(own.split(), wanted.split()) == order


def test_rows_are_permuted_by_name() -> None:
    head = TaskHead(Weights(), MODEL, replace(MODEL, labels=("no", "maybe", "yes")))
    assert head.tensor("classifier.bias").tolist() == [1, 2, 0]
    assert head.tensor("classifier.weight", part=Slice(0, 1, 3))[:, 0].tolist() == [2, 0]
    assert "rows permuted to the order of the task's classes: no, maybe, yes" in head.describe([])
    same = TaskHead(Weights(), MODEL, MODEL)
    assert same.tensor("classifier.bias").tolist() == [0, 1, 2]
    assert same.describe([]) == "the head is taken over unchanged"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (replace(MODEL, labels=("a", "b", "c")), "has the classes yes, no, maybe, not a, b, c"),
        (replace(MODEL, head="tokens"), "has the head classification, not tokens"),
    ],
)
def test_rows_of_another_meaning_start_anew(wanted: ModelConfig, why: str) -> None:
    """Also where their number is the same."""
    head = TaskHead(Weights(), MODEL, wanted)
    assert head.shapes.keys() == {"pooler.dense.weight"}
    assert why in head.describe(["classifier.weight"])
