"""Comparison with Microsoft's public repository, of which a checkout is needed.

    git clone https://github.com/microsoft/DeBERTa CHECKOUT
    python -m benchmarks.judges.microsoft --checkout CHECKOUT

Writes one row of the table in docs/who-says-so.md per comparison, and ends with exit code 1 where
a difference is over its limit. None of Microsoft's code is part of this repository.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.judges import microsoft_masks, microsoft_rtd
from benchmarks.judges.models import (
    CLASSES,
    NUM_ARCHITECTURES,
    NUM_CHOICES,
    TaskHead,
    compare_head,
    copy_weights,
    difference,
    import_release,
    is_v1,
    judged_pair,
    paired_gradients,
    random_fields,
    random_rows,
    released_state,
    task_batch,
    their_labels,
    their_model,
    zero_biases_of_v1,
)
from benchmarks.judges.rows import Comparison, of_numbers, write_row
from benchmarks.judges.shims import load, microsoft_package
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.replaced_tokens import DebertaDiscriminator, discriminator_config
from megatron_deberta.objectives import MaskedLanguageModel, sift
from megatron_deberta.objectives.labelled import SIFT, TASK
from megatron_deberta.ops import RelativePositions
from megatron_deberta.tasks import load_task
from megatron_deberta.tasks.examples import Answer, Example, Prediction
from megatron_deberta.tasks.metrics import paired_metric

JUDGE = "Microsoft DeBERTa (repository)"
SEED = 20261126
LIMIT = 1e-5


def heads() -> Iterator[Comparison]:
    """Compare the heads of labelled tasks."""
    for head in CLASSES:
        draw, found = random.Random(SEED), []
        for number in range(NUM_ARCHITECTURES):
            fields = random_fields(draw, number, newest=True)
            case = compare_head(
                head, fields, SEED + number, dtype=torch.float64, backend="reference",
                replace_encoder=head == "tokens",
            )  # fmt: skip
            found.append((case.outputs, case.gradients))
        what = "Microsoft's head on our encoder" if head == "tokens" else "v1 and v2 architectures"
        yield of_numbers(f"{head}, {what}: states, logits, loss and all gradients", found, LIMIT)


def _language_model(fields: dict[str, Any], number: int) -> tuple[float, float]:
    """Compare the masked language model with mask decoder; return the largest differences."""
    torch.manual_seed(SEED + number)
    fields = fields | {"num_hidden_layers": fields["num_hidden_layers"] + 1}
    state = released_state(their_model("MaskedLanguageModel", fields), fields)
    theirs = their_model("MaskedLanguageModel", fields)
    zero_biases_of_v1(theirs)
    theirs.load_state_dict(state, strict=not is_v1(fields))
    config, weights = import_release(state, fields)
    ours = MaskedLanguageModel(config, RuntimeOptions(attention_backend="reference"))
    copy_weights(ours, weights)
    theirs, ours = theirs.double(), ours.double()
    rows = random_rows(fields, 4, torch.Generator().manual_seed(number))
    is_masked = rows.is_token & (torch.rand(rows.is_token.shape) < 0.3)
    is_masked[:, 0] = True
    expected = theirs(
        rows.input_ids, rows.is_token.long(), rows.input_ids * is_masked,
        position_ids=rows.position_ids,
    )  # fmt: skip
    batch = masked_batch(rows.input_ids, rows.is_token, is_masked, rows.position_ids)
    logits = ours.masked_logits(batch.inputs, batch.masked_positions)[batch.masked_positions >= 0]
    loss = ours(batch).losses["masked"].loss / is_masked.sum()
    outputs = max(difference(logits, expected["logits"]), difference(loss, expected["loss"].mean()))
    direction = torch.randn(logits.shape, dtype=logits.dtype)
    (expected["loss"].mean() + (expected["logits"] * direction).mean()).backward()
    (loss + (logits * direction).mean()).backward()
    gradients = [difference(a, b) for _, a, b in paired_gradients(ours, theirs, config)]
    return outputs, max(gradients)


def masked_batch(
    input_ids: Tensor, is_token: Tensor, is_masked: Tensor, position_ids: Tensor | None = None
) -> Batch:
    """Return the batch that predicts ``input_ids`` where ``is_masked``, bool ``[B, N]``."""
    count = int(is_masked.sum(1).max())
    order = torch.where(is_masked, 0, 1).argsort(dim=1, stable=True)[:, :count]
    chosen = is_masked.gather(1, order)
    return Batch(
        ModelInputs(input_ids, is_token, position_ids),
        order.masked_fill(~chosen, -1),
        input_ids.gather(1, order).masked_fill(~chosen, -100),
        torch.arange(len(input_ids)),
    )


def mask_decoder() -> Iterator[Comparison]:
    """Compare the enhanced mask decoder."""
    draw = random.Random(SEED)
    found = [
        _language_model(random_fields(draw, number, newest=True), number)
        for number in range(NUM_ARCHITECTURES)
    ]
    what = "MaskedLanguageModel with its mask decoder, v1 and v2 architectures: logits at masks, "
    yield of_numbers(f"{what}loss and all gradients", found, LIMIT)


def discriminator() -> Iterator[Comparison]:
    """Compare the discriminator alone."""
    draw, found = random.Random(SEED), []
    for number in range(NUM_ARCHITECTURES):
        torch.manual_seed(SEED + number)
        fields = random_fields(draw, number, newest=True) | {"position_biased_input": False}
        state = released_state(their_model("ReplacedTokenDetectionModel", fields), fields)
        theirs = their_model("ReplacedTokenDetectionModel", fields)
        zero_biases_of_v1(theirs)
        theirs.load_state_dict(state, strict=not is_v1(fields))
        config, weights = import_release(state, fields, adapt=discriminator_config)
        ours = DebertaDiscriminator(config, RuntimeOptions(attention_backend="reference"))
        copy_weights(ours, weights)
        theirs, ours = theirs.double(), ours.double()
        rows = random_rows(fields, 4, torch.Generator().manual_seed(number))
        expected = theirs(rows.input_ids, rows.is_token.long(), rows.input_ids, rows.position_ids)
        logits = ours(ModelInputs(rows.input_ids, rows.is_token, rows.position_ids))
        outputs = difference(logits * rows.is_token, expected["logits"] * rows.is_token)
        direction = torch.randn(logits.shape, dtype=logits.dtype) * rows.is_token
        (expected["logits"] * direction).sum().backward()
        (logits * direction).sum().backward()
        pairs = paired_gradients(ours, theirs, config)
        found.append((outputs, max(difference(a, b) for _, a, b in pairs)))
    yield of_numbers(
        "ReplacedTokenDetectionModel, v1 and v2 architectures: logits and all gradients",
        found, LIMIT,
    )  # fmt: skip


def scale_invariant() -> Iterator[Comparison]:
    """Compare SiFT's loss and gradients, given the same noise."""
    heads_and_losses: list[tuple[TaskHead, str]] = [
        ("classification", "symmetric-kl"), ("classification", "kl"), ("choices", "symmetric-kl"),
    ]  # fmt: skip
    for head, inner in heads_and_losses:
        draw, found = random.Random(SEED), []
        for number in range(NUM_ARCHITECTURES):
            # The release's noise and step, or larger ones, whose effect is far above rounding.
            noise, step = ((1e-2, 1e-4), (0.3, 0.1))[number % 2]
            fields = random_fields(draw, number, newest=True)
            found.append(_sift(head, inner, fields, number, noise, step))
        key = f"objective.sift_inner={inner.replace('-', '_')}"
        yield of_numbers(f"SiFT of {head}, {key}: loss and all gradients, same noise", found, LIMIT)
    yield _sift_of_scores()


def _sift(
    head: TaskHead, inner: str, fields: dict[str, Any], number: int, noise: float, step: float
) -> tuple[float, float]:
    torch.manual_seed(SEED + number)
    pair = judged_pair(head, fields, SEED + number)
    ours, theirs, rows = pair.ours, pair.theirs, pair.rows
    settings = sift.Sift(noise, step, inner.replace("-", "_"), True)  # type: ignore[arg-type]
    ours.sift = settings
    ours, theirs = ours.double().train(), theirs.double().train()
    drawn = torch.Generator().manual_seed(number)
    shape = (*rows.input_ids.shape, fields["hidden_size"])
    values = torch.empty(shape, dtype=torch.float64).normal_(0, noise, generator=drawn).float()
    batch = task_batch(head, rows)
    clamped = values.clamp(-2 * noise, 2 * noise)
    with mock.patch.object(sift, "initial_noise", return_value=clamped):
        losses = ours(batch, DropoutSeeds(0, 0, batch.dropout_keys)).losses
    count = ours.objective.count_targets(batch)[TASK]
    our_task, our_sift = losses[TASK].loss / count, losses[SIFT].loss / count
    (our_task + 5 * our_sift).backward()

    module = load("sift.sift")
    layers = module.hook_sift_layer(theirs, fields["hidden_size"], step, noise)
    learner = module.AdversarialLearner(theirs, layers)
    leading = (len(batch.labels), NUM_CHOICES) if head == "choices" else (len(batch.labels),)
    data = {**rows.theirs(leading), "labels": their_labels(head, rows)}
    output = theirs(**data)
    # Microsoft's code draws here.
    torch.manual_seed(number)
    divergence = learner.loss(
        output["logits"], lambda model, **named: model(**named)["logits"], inner, **data
    )
    (output["loss"] + 5 * divergence).backward()
    outputs = max(difference(our_task, output["loss"]), difference(our_sift, divergence))
    pairs = paired_gradients(ours, theirs, ours.config)
    return outputs, max(difference(a, b) for _, a, b in pairs)


def _sift_of_scores() -> Comparison:
    """Show that Microsoft's SiFT reads the scores of a batch as the logits of one distribution."""
    fields = random_fields(random.Random(SEED), 1, newest=True)
    pair = judged_pair("regression", fields, SEED)
    theirs, module = pair.theirs, load("sift.sift")
    layers = module.hook_sift_layer(theirs, fields["hidden_size"], 1e-4, 1e-5)
    leading = (len(pair.rows.input_ids),)
    data = {**pair.rows.theirs(leading), "labels": their_labels("regression", pair.rows)}
    scores = theirs(**data)["logits"]
    divergence = module.AdversarialLearner(theirs, layers).loss(
        scores, lambda model, **named: model(**named)["logits"], **data
    )
    entropy = torch.distributions.Categorical(logits=scores.flatten()).entropy()
    apart = abs(float((divergence - 2 * entropy).detach()))
    return Comparison(
        "SiFT of regression: Microsoft's divergence is that of the softmax over the scores of a "
        "batch, ours the squared error",
        f"{apart:.0e} from the former", "a known difference", 1, apart < 1e-3 < float(divergence),
    )  # fmt: skip


def distances() -> Iterator[Comparison]:
    """Compare the table rows of relative distances, within and beyond the largest distance."""
    build = load("deberta.da_utils").build_relative_position
    checked, apart = 0, 0
    beyond: set[tuple[int, int]] = set()
    sizes = [(256, 512), (32, 128), *((b, m) for b in (6, 10, 16, 64) for m in (48, 200, 512))]
    for buckets, largest in (*sizes, *((0, m) for m in (16, 128, 512))):
        positions = RelativePositions(largest, buckets)
        length = 2 * largest
        theirs = build(length, length, bucket_size=buckets or -1, max_position=largest)[0]
        slots = (theirs + positions.span).clamp(0, 2 * positions.span - 1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        ours, is_near = positions.slots(distance), distance.abs() < largest
        checked += 2 * largest - 1
        apart += len(distance[is_near & (ours != slots)].unique())
        far = ~is_near & (ours != slots)
        beyond |= {*zip(ours[far].tolist(), slots[far].tolist(), strict=True)}
    yield Comparison(
        "build_relative_position: slots of distances below max_relative_positions, with and "
        "without buckets", f"{apart} differ", "0", checked, apart == 0,
    )  # fmt: skip
    yield Comparison(
        "build_relative_position: slots of distances from max_relative_positions on, with buckets",
        f"(here, there): {sorted(beyond)}", "a known difference", len(sizes), beyond == {(0, 1)},
    )  # fmt: skip


_WORDS = (
    "the a an The Paris paris U.S. US river-bank riverbank co-op O'Neill's 1,000 1000 and new New "
    "York, York. (York) café naïve … -- the. A. An!"
).split()


def record_metric() -> Iterator[Comparison]:
    """Compare ReCoRD's exact match and F1."""
    evaluate, task = load("apps.tasks.record_eval").evaluate, load_task("record")
    generator, worst, cases = np.random.default_rng(SEED), 0.0, 200
    both_empty = 0
    for _ in range(cases):
        answers, found, examples, predictions = {}, {}, [], []
        for number in range(int(generator.integers(1, 12))):
            texts = [_phrase(generator) for _ in range(int(generator.integers(1, 4)))]
            guess = texts[0] if generator.random() < 0.3 else _phrase(generator)
            empty = [not _theirs_normalised(text) for text in (guess, *texts)]
            if empty[0] and any(empty[1:]):
                both_empty += 1
                continue
            name = str(number)
            answers[name], found[name] = [{"text": text} for text in texts], guess
            right = tuple(Answer(start=0, text=text) for text in texts)
            examples.append(Example(id=name, text_pair=" ".join(texts), answers=right))
            predictions.append(Prediction(id=name, value=guess))
        if not answers:
            continue
        expected = evaluate(answers, found)
        for ours, theirs in (("f1", "f1"), ("exact", "exact_match")):
            value = paired_metric(task, ours, examples, predictions, has_best_text=False).value()
            worst = max(worst, abs(value - expected[theirs] / 100))
    limit = 1e-12
    yield Comparison(
        "metric of ReCoRD: exact match and F1; articles, case, punctuation",
        f"{worst:.0e}", f"{limit:.0e}", cases, worst < limit and both_empty > 0,
    )  # fmt: skip


def _phrase(generator: np.random.Generator) -> str:
    return " ".join(generator.choice(_WORDS, int(generator.integers(1, 5))))


def _theirs_normalised(text: str) -> str:
    return str(load("apps.tasks.record_eval").normalize_answer(text))


COMPARISONS: tuple[Callable[[], Iterator[Any]], ...] = (
    distances, heads, mask_decoder, discriminator, scale_invariant, record_metric,
    microsoft_masks.masks, microsoft_rtd.loop, microsoft_rtd.schedule,
)  # fmt: skip


def main() -> None:
    """Run all comparisons and write their rows; exit code 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--checkout", type=Path, required=True, help="clone of microsoft/DeBERTa")
    parser.add_argument("--only", default="", help="names of comparisons, separated by commas")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    arguments = parser.parse_args()
    command = ["git", "-C", str(arguments.checkout), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    failed = False
    with microsoft_package(arguments.checkout):
        for compare in COMPARISONS:
            if arguments.only and compare.__name__ not in arguments.only.split(","):
                continue
            for found in compare():
                verdict = "ok" if found.holds else "OVER THE LIMIT"
                print(f"{verdict:14} {found.compared}: {found.worst} (allowed {found.limit})")
                failed |= not found.holds
                if not arguments.no_rows:
                    write_row(
                        JUDGE, revision, found.compared, found.worst, found.limit, found.cases
                    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
