"""Evaluation of minimal pairs with a pretrained model on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_deberta.config.loader import config_from_layers, config_to_dict
from megatron_deberta.config.rules import trained_forms
from megatron_deberta.config.schema import LANGUAGE_MODEL_HEADS, PrecisionConfig, RunConfig
from megatron_deberta.errors import ConfigError, MissingModelError
from megatron_deberta.finetune.models import SourceModel, open_source_model
from megatron_deberta.finetune.predict import open_ranks
from megatron_deberta.tasks.minimal_pairs import MinimalPairScores, read_minimal_pairs
from megatron_deberta.train.minimal_pairs import build_minimal_pairs
from megatron_deberta.train.pseudo_likelihood import Metric


def evaluate_minimal_pairs(
    model: Path,
    data: str,
    *,
    limit: int = 0,
    metric: Metric = "original",
    tokenizer: str = "",
    overrides: Sequence[str] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[MinimalPairScores, bool]:
    """Compute the accuracies of a pretrained model. Collective over the ranks of the launcher.

    Args:
        model: run, checkpoint, export or release with a masked-language-model head; of replaced-
            token detection, the generator is evaluated.
        data: folder of BLiMP's JSON Lines.
        limit: first pairs of each paradigm; 0: all.
        metric: what is masked with a scored token.
        tokenizer: the model's tokenizer; empty: its own.
        overrides: ``section.key=value``, such as ``train.micro_batch_size=64``.
        advance: called on every rank with the batches done and their number.

    Returns:
        The accuracies, and whether this is rank 0.

    Raises:
        CheckpointError: the folder holds no model, or one without a trained head.
        ConfigError: the model is fine-tuned.
        DataError: the data or the tokenizer is missing or malformed.
    """
    source = open_source_model(model, tokenizer, "generator")
    config = language_model_config(source, overrides)
    if "masked" not in trained_forms(config.objective) and metric != "original":
        raise ConfigError(f"--metric {metric} is for masked language models; remove it")
    pairs = read_minimal_pairs(data, limit)
    loaded = source.load_tokenizer(config.tokenizer.path or "")
    task = build_minimal_pairs(config, loaded, pairs, metric)
    with open_ranks(config, source) as (module, groups):
        scores = task.score(module, groups, advance=advance)
        assert scores is not None
        return scores, groups.rank == 0


def language_model_config(source: SourceModel, overrides: Sequence[str]) -> RunConfig:
    """Return the run of a pretrained model with one whole model per rank.

    Args:
        source: the model.
        overrides: ``section.key=value``.

    Raises:
        MissingModelError: it has no trained head.
        ConfigError: it is fine-tuned.
    """
    if source.config.head not in LANGUAGE_MODEL_HEADS:
        raise ConfigError(
            f"{source.path} is fine-tuned and predicts no tokens; give the pretrained model"
        )
    if source.why_untrained:
        raise MissingModelError(
            f"{source.path} cannot predict tokens before it is trained to, so predictions would be "
            f"noise: {source.why_untrained}; give a model trained for masked language modelling"
        )
    run = source.run or _run_of_model(source)
    if run.model.head != source.config.head:
        # A part of the run's model
        objective = replace(run.objective, name=source.config.head)
        run = replace(run, model=source.config, objective=objective)
    run = replace(
        run,
        parallel=replace(run.parallel, tensor_parallel_size=1, sequence_parallel=False),
        precision=PrecisionConfig(engine="plain"),
        tokenizer=replace(run.tokenizer, path=source.tokenizer_path),
        train=replace(run.train, blimp_every=None),
    )
    return config_from_layers([(str(source.path), config_to_dict(run))], overrides)


def _run_of_model(source: SourceModel) -> RunConfig:
    default, model = RunConfig(), source.config
    length = default.data.sequence_length
    if model.absolute_positions != "none":
        length = min(length, model.max_position_embeddings)
    packing = "segment_pair" if model.next_sentence_head else default.data.packing
    data = replace(default.data, sequence_length=length, packing=packing)
    return replace(default, model=model, data=data)
