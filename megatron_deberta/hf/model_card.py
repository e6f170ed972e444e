"""Model card (``README.md``) of an export, and the lines that load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_deberta import __version__
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.config import THRESHOLDS_FIELD, has_own_class
from megatron_deberta.hf.heads import HEADS
from megatron_deberta.hf.names import ModelType

_CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
license: unknown
tags: [{tags}]
{results}---

# {name}

{family} model of {parameters:,} parameters, {trained} with
megatron-deberta {version}. Type in transformers: `{model_type}`.

| architecture | |
|---|---|
{architecture}

## Training

| training | |
|---|---|
{training}

## Evaluation

{evaluation}

Not evaluated: {not_evaluated}.

## Use

```python
{lines}
```
{whole_words}
## License

Not stated. Before publishing, name a license here and in the first lines of this file.
"""
_WHOLE_WORDS = """
The pipeline makes a word of its own of a lone `▁` before a word, which has further pieces. These
lines label each word by its first piece, as in training:

```python
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForTokenClassification.from_pretrained("{name}"{option})
text = "A sentence, its words separated by single spaces"
pieces = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
with torch.no_grad():
    scores = model(input_ids=torch.tensor([pieces["input_ids"]])).logits[0]
labels = {{}}
for (start, _), special, row in zip(
    pieces["offset_mapping"], pieces["special_tokens_mask"], scores
):
    if not special:
        labels.setdefault(text[:start].count(" "), model.config.id2label[int(row.argmax())])
print([(word, labels.get(number)) for number, word in enumerate(text.split(" "))])
```
"""
_LABELS = (
    f'thresholds = getattr(run.model.config, "{THRESHOLDS_FIELD}", {{}}); '
    # Of one text not in a list, some releases of transformers return a list of one list.
    'labels = [found["label"] for found in run(["A text."])[0] '
    'if found["score"] >= thresholds.get(found["label"], 0.5)]'
)
_OWN_CODE = ", trust_remote_code=True"
_KEYS = (
    "num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size",
    "max_position_embeddings", "position_terms", "position_buckets", "absolute_positions",
    "mask_decoder_passes", "conv_kernel_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One result of an evaluation.

    Attributes:
        metric: its type in the Hub's metadata, such as ``accuracy``; empty: not in the metadata.
        name: in the table, with its unit.
        value: the result.
        baseline: the same figure of a trivial prediction; None: not measured.
    """

    metric: str
    name: str
    value: float
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of exactly the exported weights.

    Attributes:
        dataset: name of the data in the Hub's metadata.
        split: its split, as in ``validation``.
        text: sentences that say how, and on what, the figures were measured.
        figures: the results.
        baseline: what the column of baselines has; empty: no figure has one.
    """

    dataset: str
    split: str
    text: str
    figures: tuple[Figure, ...]
    baseline: str = ""


@dataclass(frozen=True)
class TrainingFacts:
    """Training of an exported model. The defaults are those of weights of unknown origin."""

    trained: str = "of weights that were imported, and exported"
    """End of the card's first sentence."""
    rows: Mapping[str, str] = field(
        default_factory=lambda: {"training": "imported weights; their training is not recorded"}
    )
    """Table of the training: label and value."""
    evaluation: Evaluation | None = None
    why_not_evaluated: str = "the weights were imported"
    """Why there is no evaluation."""
    not_evaluated: str = "everything else; add what you measure"


def loading_lines(config: ModelConfig, model_type: ModelType, folder: str) -> dict[str, str]:
    """Return the Python lines that load an export correctly, by what they load.

    Args:
        config: the architecture.
        model_type: type of the export.
        folder: where the export is.
    """
    own_code = _own_code(config, model_type)
    encoder = ", add_pooling_layer=False" if model_type == "roberta" else own_code
    load_encoder = (
        "from transformers import AutoModel; "
        f'model = AutoModel.from_pretrained("{folder}"{encoder})'
    )
    head = HEADS[config.head]
    if config.head == "embed":
        return {"embeddings": _sentences_line(folder, own_code)}
    if not head.kind:
        return {"encoder": load_encoder}
    if not head.is_encoder:
        lines = {
            "model": f"from transformers import {head.auto_class}; "
            f'model = {head.auto_class}.from_pretrained("{folder}"{own_code})'
        }
        if config.head == "rerank":
            lines["scores"] = (
                "from sentence_transformers import CrossEncoder; "
                f'scores = CrossEncoder("{folder}"{own_code}).predict([("a query", "a passage")])'
            )
        if head.has_pipeline:
            lines[head.task] = (
                "from transformers import pipeline; "
                f'run = pipeline("{head.task}", model="{folder}"{own_code}{head.pipeline_options})'
            )
        if config.head == "multilabel":
            lines["labels"] = _LABELS
        return lines
    # transformers' own masked-LM classes have no mask decoder.
    decoder = _OWN_CODE if config.mask_decoder_passes else own_code
    return {
        "encoder": load_encoder,
        "fill-mask": "from transformers import pipeline; "
        f'fill = pipeline("fill-mask", model="{folder}"{decoder})',
    }


def _own_code(config: ModelConfig, model_type: ModelType) -> str:
    """Return the argument that loads the class in an export; empty: transformers has the class."""
    return _OWN_CODE if has_own_class(config, model_type) else ""


def _sentences_line(folder: str, own_code: str) -> str:
    return (
        "from sentence_transformers import SentenceTransformer; "
        f'sentences = SentenceTransformer("{folder}"{own_code})'
    )


def model_card(
    name: str, config: ModelConfig, model_type: ModelType, parameters: int, facts: TrainingFacts
) -> str:
    """Return the content of ``README.md``.

    Args:
        name: name of the model.
        config: the architecture.
        model_type: type of the export.
        parameters: number of parameters.
        facts: its training.
    """
    head = HEADS[config.head]
    tags: list[str] = [model_type]
    lines = list(loading_lines(config, model_type, name).values())
    own_code = _own_code(config, model_type)
    if head.is_encoder:
        tags += ["sentence-transformers", "feature-extraction"]
        # That of the head "embed" is there already.
        lines = list(dict.fromkeys([*lines, _sentences_line(name, own_code)]))
    if config.head == "rerank":
        tags += ["sentence-transformers", "cross-encoder"]
    return _CARD.format(
        name=name,
        pipeline=head.task,
        tags=", ".join(tags),
        results=_model_index(name, head.task, facts),
        trained=facts.trained,
        family="RoBERTa" if model_type == "roberta" else "DeBERTa",
        parameters=parameters,
        version=__version__,
        model_type=model_type,
        architecture=_rows(
            {key: "none" if (value := getattr(config, key)) is None else value for key in _KEYS}
        ),
        training=_rows(facts.rows),
        evaluation=_evaluation(facts),
        not_evaluated=facts.not_evaluated,
        lines="\n".join(lines),
        whole_words=(
            _WHOLE_WORDS.format(name=name, option=own_code) if config.head == "tokens" else ""
        ),
    )


def _rows(cells: Mapping[str, object]) -> str:
    # A line break or a bar in a name would end the row or the cell.
    texts = {name: " ".join(str(value).split()) for name, value in cells.items()}
    return "\n".join(
        f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in texts.items()
    )


def _evaluation(facts: TrainingFacts) -> str:
    """Return the section's text and table; without evaluation, the reason."""
    found = facts.evaluation
    if found is None:
        return f"These weights were not evaluated: {facts.why_not_evaluated}."
    header = ["figure", "value", *([f"baseline: {found.baseline}"] if found.baseline else [])]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for figure in found.figures:
        count = isinstance(figure.value, int)
        cells = [figure.name, f"{figure.value:,}" if count else f"{figure.value:.4f}"]
        if found.baseline:
            cells.append("-" if figure.baseline is None else f"{figure.baseline:.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([found.text, "", *lines])


def _model_index(name: str, pipeline: str, facts: TrainingFacts) -> str:
    """Return the Hub's metadata of the figures, as lines of YAML; empty without figures."""
    found = facts.evaluation
    figures = [figure for figure in found.figures if figure.metric] if found else []
    if found is None or not figures:
        return ""
    dataset = json.dumps(found.dataset)
    # JSON strings are YAML strings.
    lines = [
        "model-index:",
        f"- name: {json.dumps(name)}",
        "  results:",
        f"  - task: {{type: {pipeline}}}",
        f"    dataset: {{name: {dataset}, type: {dataset}, split: {found.split}}}",
        "    metrics:",
        *(f"    - {{type: {figure.metric}, value: {figure.value:.6g}}}" for figure in figures),
    ]
    return "\n".join(lines) + "\n"
