"""Architecture of a pretrained encoder with the head of a labelled task."""

from __future__ import annotations

from dataclasses import replace

from megatron_deberta.config.schema import Head, ModelConfig


def with_task_head(
    model: ModelConfig, head: Head, labels: tuple[str, ...] = (), head_dropout: float = 0.1
) -> ModelConfig:
    """Return the encoder's architecture with another head, and without the mask decoder.

    Args:
        model: architecture of a pretrained or fine-tuned model.
        head: head of a labelled task.
        labels: names of the classes.
        head_dropout: dropout before the last projection.
    """
    at_input = model.absolute_positions == "input"
    return replace(
        model,
        head=head,
        labels=labels,
        head_dropout=head_dropout,
        next_sentence_head=False,
        mask_decoder_passes=0,
        absolute_positions="input" if at_input else "none",
        generator_layers=0,
        embedding_sharing="gdes",
    )
