"""Model card (``README.md``) of an export, and the lines that load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_deberta import __version__
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.config import has_own_class
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
    head = HEADS[config.head]
    if not head.kind:
        return {"encoder": load_encoder}
    if not head.is_encoder:
        option = own_code if has_own_class(config, model_type) else ""
        lines = {
            "model": f"from transformers import {head.auto_class}; "
            f'model = {head.auto_class}.from_pretrained("{folder}"{option})'
        }
        if head.has_pipeline:
            lines[head.task] = (
                "from transformers import pipeline; "
                f'run = pipeline("{head.task}", model="{folder}"{option}{head.pipeline_options})'
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
    head = HEADS[config.head]
    training = {
        "objective": head.objective,
        "data": ", ".join(facts.data) or "unknown",
        "optimizer steps": "unknown" if facts.step is None else f"{facts.step:,}",
        "validation loss": "unknown"
        if facts.validation_loss is None
        else f"{facts.validation_loss:.4f} {head.loss_unit}".rstrip(),
    }
    training |= {f"validation {n.replace('_', ' ')}": f"{v:.4f}" for n, v in facts.scores.items()}
    if facts.batch_size is not None:
        training["batch size"] = f"{facts.batch_size:,}"
    if facts.learning_rate is not None:
        training["peak learning rate"] = f"{facts.learning_rate:g}"
    if facts.total_steps is not None and facts.total_steps != facts.step:
        training["optimizer steps"] += f" of {facts.total_steps:,}"
    tags: list[str] = [model_type]
    lines = list(loading_lines(config, model_type, name).values())
    if head.is_encoder:
        tags += ["sentence-transformers", "feature-extraction"]
        own_code = ", trust_remote_code=True" if model_type == "megatron-deberta" else ""
        lines.append(
            "from sentence_transformers import SentenceTransformer; "
            f'sentences = SentenceTransformer("{name}"{own_code})'
        )
    return _CARD.format(
        name=name,
        pipeline=head.task,
        tags=", ".join(tags),
        results=_model_index(name, head.task, facts),
        trained=head.trained,
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
