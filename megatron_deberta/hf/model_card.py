"""Model card (``README.md``) of an export, and the lines that load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_deberta import __version__
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.config import auto_class_name, has_own_class
from megatron_deberta.hf.names import ModelType

_CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
license: unknown
tags: [{tags}]
{results}---

# {name}

{family} encoder of {parameters:,} parameters, {trained} with
megatron-deberta {version}. Type in transformers: `{model_type}`.

| architecture | |
|---|---|
{architecture}

| training | |
|---|---|
{training}

## Use

```python
{lines}
```

## License

Not stated. Before publishing, name a license here and in the first lines of this file.
"""
_PIPELINES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "spans": "question-answering",
    "tokens": "token-classification",
    "autoregressive": "text-generation",
    "discriminator": "feature-extraction",
}
_TRAINING = {
    "mlm": ("masked language modelling", "pretrained by masked language modelling"),
    "autoregressive": ("autoregressive language modelling", "pretrained to predict next tokens"),
    "discriminator": (
        "replaced-token detection, the discriminator",
        "pretrained by replaced-token detection",
    ),
}
"""Objective and text of the first sentence, by head."""
_LOSS_UNITS = {"mlm": " nats per masked token", "autoregressive": " nats per predicted token"}
_KEYS = (
    "num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size",
    "max_position_embeddings", "position_terms", "position_buckets", "absolute_positions",
    "mask_decoder_passes", "conv_kernel_size",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingFacts:
    """Training of an exported model; empty or None where unknown."""

    data: tuple[str, ...] = ()
    step: int | None = None
    total_steps: int | None = None
    validation_loss: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last validation, by name."""
    batch_size: int | None = None
    """Sequences (examples of a task) per optimizer step."""
    learning_rate: float | None = None
    """Peak learning rate."""


def loading_lines(config: ModelConfig, model_type: ModelType, folder: str) -> dict[str, str]:
    """Return the Python lines that load an export correctly, by what they load.

    Args:
        config: the architecture.
        model_type: type of the export.
        folder: where the export is.
    """
    own_code = ", trust_remote_code=True"
    encoder = {"roberta": ", add_pooling_layer=False", "megatron-deberta": own_code}
    load_encoder = (
        "from transformers import AutoModel; "
        f'model = AutoModel.from_pretrained("{folder}"{encoder.get(model_type, "")})'
    )
    if config.head == "discriminator":
        return {"encoder": load_encoder}
    if config.head != "mlm":
        pipeline, auto_class = _PIPELINES.get(config.head), auto_class_name(config)
        option = own_code if has_own_class(config, model_type) else ""
        lines = {
            "model": f"from transformers import {auto_class}; "
            f'model = {auto_class}.from_pretrained("{folder}"{option})'
        }
        if pipeline:
            lines[pipeline] = (
                "from transformers import pipeline; "
                f'run = pipeline("{pipeline}", model="{folder}"{option})'
            )
        return lines
    # transformers' own masked-LM classes have no mask decoder.
    decoder = model_type == "megatron-deberta" or config.mask_decoder_passes > 0
    return {
        "encoder": load_encoder,
        "fill-mask": "from transformers import pipeline; "
        f'fill = pipeline("fill-mask", model="{folder}"{own_code if decoder else ""})',
    }


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
    objective, trained = _TRAINING.get(
        config.head, (f"fine-tuned, head {config.head}", "fine-tuned")
    )
    training = {
        "objective": objective,
        "data": ", ".join(facts.data) or "unknown",
        "optimizer steps": "unknown" if facts.step is None else f"{facts.step:,}",
        "validation loss": "unknown"
        if facts.validation_loss is None
        else f"{facts.validation_loss:.4f}" + _LOSS_UNITS.get(config.head, ""),
    }
    training |= {f"validation {n.replace('_', ' ')}": f"{v:.4f}" for n, v in facts.scores.items()}
    if facts.batch_size is not None:
        training["batch size"] = f"{facts.batch_size:,}"
    if facts.learning_rate is not None:
        training["peak learning rate"] = f"{facts.learning_rate:g}"
    if facts.total_steps is not None and facts.total_steps != facts.step:
        training["optimizer steps"] += f" of {facts.total_steps:,}"
    pipeline = (
        "fill-mask"
        if config.head == "mlm"
        else _PIPELINES.get(config.head, config.head.replace("choices", "multiple-choice"))
    )
    tags: list[str] = [model_type]
    lines = list(loading_lines(config, model_type, name).values())
    if config.head in ("mlm", "discriminator"):
        tags += ["sentence-transformers", "feature-extraction"]
        own_code = ", trust_remote_code=True" if model_type == "megatron-deberta" else ""
        lines.append(
            "from sentence_transformers import SentenceTransformer; "
            f'sentences = SentenceTransformer("{name}"{own_code})'
        )
    return _CARD.format(
        name=name,
        pipeline=pipeline,
        tags=", ".join(tags),
        results=_model_index(name, pipeline, facts),
        trained=trained,
        family="RoBERTa" if model_type == "roberta" else "DeBERTa",
        parameters=parameters,
        version=__version__,
        model_type=model_type,
        architecture=_rows({key: getattr(config, key) for key in _KEYS}),
        training=_rows(training),
        lines="\n".join(lines),
    )


def _rows(cells: Mapping[str, object]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in cells.items())


def _model_index(name: str, pipeline: str, facts: TrainingFacts) -> str:
    """Return the Hub's metadata of the scores, as lines of YAML; empty without scores."""
    if not facts.scores:
        return ""
    # JSON strings are YAML strings.
    lines = [
        "model-index:",
        f"- name: {json.dumps(name)}",
        "  results:",
        f"  - task: {{type: {pipeline}}}",
        f"    dataset: {{name: {json.dumps(', '.join(facts.data))}, "
        f"type: {json.dumps(', '.join(facts.data))}, split: validation}}",
        "    metrics:",
        *(
            f"    - {{type: {metric}, value: {value:.6g}}}"
            for metric, value in facts.scores.items()
        ),
    ]
    return "\n".join(lines) + "\n"
