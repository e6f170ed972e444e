"""Fine-tuning of every head compared with transformers' classes: 20 optimizer steps, fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.checkpoint.store import local_part
from megatron_deberta.config.schema import Head, RunConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.base import ParameterState
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.engine.optimizer import decays
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.step import TrainStep
from tests.support.labelled import HEADS, encoded, labelled_run, labelled_steps
from tests.support.selection import every
from tests.support.stock_weights import randomize, stock_config, stock_name

GROUPS = single_process_groups(torch.device("cpu"))
STOCK = {
    "classification": transformers.DebertaV2ForSequenceClassification,
    "multilabel": transformers.DebertaV2ForSequenceClassification,
    "regression": transformers.DebertaV2ForSequenceClassification,
    "spans": transformers.DebertaV2ForQuestionAnswering,
    "tokens": transformers.DebertaV2ForTokenClassification,
    "choices": transformers.DebertaV2ForMultipleChoice,
    "rerank": transformers.DebertaV2ForSequenceClassification,
}


def stock_model(config: RunConfig) -> Any:
    head = config.model.head
    fields = stock_config(config.model)
    fields.num_labels = num_outputs(config.model)
    if head == "multilabel":
        fields.problem_type = "multi_label_classification"
    fields.hidden_dropout_prob = fields.attention_probs_dropout_prob = fields.cls_dropout = 0.0
    model = STOCK[head](fields)
    randomize(model)
    return model.train()


def padded(batches: Sequence[TaskBatch]) -> list[TaskBatch]:
    """Return the batches with rows as long as the longest of all."""
    longest = max(batch.inputs.input_ids.size(1) for batch in batches)

    def pad(values: Tensor, value: float) -> Tensor:
        return F.pad(values, (0, longest - values.size(1)), value=value)

    return [
        TaskBatch(
            ModelInputs(
                pad(batch.inputs.input_ids, 0),
                pad(batch.inputs.is_token, False),
                token_type_ids=torch.zeros(len(batch.row_index), longest).long(),
            ),
            pad(batch.labels, -100) if batch.labels.size(-1) == batch.inputs.input_ids.size(1)
            and batch.labels.dim() == 2 else batch.labels,
            batch.sample_index,
            batch.row_index,
            batch.choice_rows,
        )
        for batch in batches
    ]  # fmt: skip


def stock_loss(model: Any, head: Head, batches: Sequence[TaskBatch]) -> Tensor:
    """Return the loss of a whole global batch as transformers computes it.

    The softmax of spans is restricted to tokens, and missing choices are excluded, before
    transformers' own cross-entropies: its loss depends on the amount of padding.
    """
    parts = padded(batches)
    ids = torch.cat([part.inputs.input_ids for part in parts])
    mask = torch.cat([part.inputs.is_token for part in parts])
    if head == "spans":
        out = model(input_ids=ids, attention_mask=mask.long())
        labels = torch.cat([part.labels for part in parts])
        sides = [out.start_logits, out.end_logits]
        losses = [
            F.cross_entropy(logits.masked_fill(~mask, -1e9), labels[:, side])
            for side, logits in enumerate(sides)
        ]
        return (losses[0] + losses[1]) / 2
    if head == "choices":
        return choice_loss(model, parts)
    labels = torch.cat([part.labels for part in parts])
    if head == "rerank":
        return ranknet_loss(model(input_ids=ids, attention_mask=mask.long()).logits[:, 0], parts)
    labels = labels.float() if head == "multilabel" else labels
    loss: Tensor = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
    return loss


def choice_loss(model: Any, parts: Sequence[TaskBatch]) -> Tensor:
    """Return the loss over examples with unequal numbers of choices, padded by empty rows."""
    most = max(part.choice_rows.size(1) for part in parts if part.choice_rows is not None)
    ids, masks, present = [], [], []
    for part in parts:
        assert part.choice_rows is not None
        rows = F.pad(part.choice_rows, (0, most - part.choice_rows.size(1)), value=-1)
        ids.append(part.inputs.input_ids[rows.clamp(min=0)])
        masks.append(part.inputs.is_token[rows.clamp(min=0)])
        present.append(rows >= 0)
    logits = model(input_ids=torch.cat(ids), attention_mask=torch.cat(masks).long()).logits
    labels = torch.cat([part.labels for part in parts])
    return F.cross_entropy(logits.masked_fill(~torch.cat(present), -1e9), labels)


def ranknet_loss(scores: Tensor, parts: Sequence[TaskBatch]) -> Tensor:
    """Return the mean loss of the pairs of different relevance of all queries."""
    pairs: list[Tensor] = []
    start = 0
    for part in parts:
        assert part.choice_rows is not None
        for rows in part.choice_rows:
            places = rows[rows >= 0].tolist()
            pairs += [
                torch.log1p(torch.exp(scores[start + b] - scores[start + a]))
                for a in places
                for b in places
                if part.labels[a] > part.labels[b]
            ]
        start += len(part.row_index)
    return torch.stack(pairs).mean()


def stock_losses(config: RunConfig, model: Any, steps: Sequence[list[TaskBatch]]) -> list[float]:
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if is_decaying(n) == flag], "weight_decay": decay}
        for flag, decay in ((True, config.optimizer.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=config.optimizer.eps)
    losses = []
    for number, batches in enumerate(steps):
        for group in adam.param_groups:
            group["lr"] = learning_rate(number, config.optimizer, config.train.steps)
        loss = stock_loss(model, config.model.head, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def is_decaying(name: str) -> bool:
    return decays(name.replace("LayerNorm", "norm"))


def our_losses(config: RunConfig, stock: Any, steps: Sequence[list[TaskBatch]]) -> list[float]:
    model = build_model(config, GROUPS)
    engine = build_engine(config, model.module, model.specs, GROUPS)
    weights = dict(stock.named_parameters())

    def fetch(name: str) -> ParameterState:
        whole = weights[stock_name(name) or name].detach().clone()
        weight = local_part(whole, model.specs[name])
        return ParameterState(weight, torch.zeros_like(weight), torch.zeros_like(weight))

    engine.load_states(fetch)
    step = TrainStep(engine, config, GROUPS)
    return [step(number, batches).loss for number, batches in enumerate(steps)]


@pytest.mark.parametrize("head", every(3, HEADS))
def test_twenty_steps(head: Head) -> None:
    config = labelled_run(head)
    steps = list(labelled_steps(config, GROUPS))
    assert len({batch.inputs.input_ids.size(1) for batches in steps for batch in batches}) > 4
    stock = stock_model(config)
    ours = our_losses(config, stock, steps)
    expected = stock_losses(config, stock, steps)
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert abs(ours[0] - ours[-1]) > 1e-3


@pytest.mark.parametrize("head", ["spans", "choices"])
def test_the_loss_is_that_of_the_stock_class_where_nothing_is_padded(head: Head) -> None:
    config = labelled_run(head)
    data = encoded(head, choices=(3,), lengths=(12, 12))
    (batches, *_) = labelled_steps(config, GROUPS, data)
    stock = stock_model(config)
    ids = torch.cat([batch.inputs.input_ids for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    if head == "spans":
        out = stock(input_ids=ids, start_positions=labels[:, 0], end_positions=labels[:, 1])
    else:
        out = stock(input_ids=ids.view(-1, 3, 12), labels=labels)
    assert our_losses(config, stock, [batches])[0] == pytest.approx(out.loss.item(), rel=1e-5)
