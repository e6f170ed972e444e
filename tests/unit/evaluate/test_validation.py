"""Evaluation leaves a model in the mode in which it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.evaluate.likelihood import WindowRows, score_rows
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.objectives import MaskedLanguageModel, build_objective
from tests.support.tiny_models import V2, tiny_tokenizer

GROUPS = single_process_groups(torch.device("cpu"))


def rows() -> WindowRows:
    ids, _ = tiny_tokenizer().encode_texts(["the cat sat on the mat"])
    return WindowRows.of_text(ids.astype("int64"), Vocabulary.of(tiny_tokenizer()), 8, 2, 1)


def batches(module: MaskedLanguageModel, *, fails: bool) -> Iterator[Any]:
    for numbers in rows().batches(16, 1):
        assert not module.training
        yield rows().batch(numbers)
    if fails:
        raise OSError("a disk is gone")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_mode_is_that_of_before(training: bool, fails: bool) -> None:
    module = MaskedLanguageModel(V2).train(training)
    objective = build_objective(RunConfig(model=V2))

    def validate() -> None:
        found = evaluate(module, batches(module, fails=fails), GROUPS, objective)
        assert found is not None
        assert found.metrics["loss"] > 0

    def stop() -> bool:
        if fails:
            raise OSError("a disk is gone")
        return True

    if fails:
        for call in (validate, lambda: score_rows(module, rows(), GROUPS, 16, should_abort=stop)):
            with pytest.raises(OSError, match="a disk is gone"):
                call()
            assert module.training == training
        return
    validate()
    assert module.training == training
    assert evaluate(module, batches(module, fails=False), GROUPS, objective, stop) is None
    assert score_rows(module, rows(), GROUPS, 16, should_abort=stop) is None
    assert module.training == training
