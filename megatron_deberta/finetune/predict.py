"""Prediction and evaluation with a fine-tuned model, on one or more ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from megatron_deberta.checkpoint.store import local_part
from megatron_deberta.config import validate_for_world
from megatron_deberta.config.loader import config_from_layers, config_to_dict
from megatron_deberta.config.schema import PrecisionConfig, RunConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import ProcessGroups, init_process_groups, shutdown
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.finetune.data import Split, check_task, class_names, read_split, run_split
from megatron_deberta.finetune.models import SourceModel, open_source_model, with_classes
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.hf.loading import load_model_tokenizer
from megatron_deberta.model.flops import is_task_head
from megatron_deberta.tasks.scoring import Outputs
from megatron_deberta.tasks.task import TaskConfig, load_task
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.train.setup import build_rank_model, choose_device


@dataclass(frozen=True, slots=True)
class Predictor:
    """A fine-tuned model on this rank, with its task.

    Attributes:
        config: the run.
        task: the task.
        tokenizer: the model's tokenizer.
        module: this rank's part of the model.
        groups: the rank grid.
        is_multi_label: each class has a probability of its own.
    """

    config: RunConfig
    task: TaskConfig
    tokenizer: Tokenizer
    module: nn.Module
    groups: ProcessGroups
    is_multi_label: bool = False

    def run(self, split: str) -> tuple[Split, Outputs, float]:
        """Return a split, the model's outputs for it, and the mean loss. Collective: all ranks."""
        found = read_split(self.config, self.task, split, self.tokenizer)
        result = run_split(self.module, self.config, found.encoded, self.tokenizer, self.groups)
        assert result is not None
        outputs, evaluation = result
        return found, outputs, evaluation.metrics["loss"]


@contextmanager
def open_predictor(
    task_name: str, model: Path, data: str, overrides: tuple[str, ...] = (), tokenizer: str = ""
) -> Iterator[Predictor]:
    """Load a fine-tuned model. Collective over the ranks of the launcher.

    Args:
        task_name: task file or name of a packaged task.
        model: run, checkpoint or export of a fine-tuned model.
        data: folder of the task's files.
        overrides: ``section.key=value``.
        tokenizer: the model's tokenizer; empty: its own.

    Raises:
        ConfigError: the model is not fine-tuned on this task.
    """
    source = open_source_model(model, tokenizer)
    if not is_task_head(source.config):
        raise ConfigError(f"{model} is not fine-tuned; run megatron-deberta finetune first")
    if source.missing:
        raise CheckpointError(
            f"{model} lacks {source.missing[0]} of the shape that its config.json says, so "
            "predictions would come from random weights; give a fine-tuned model"
        )
    task = load_task(task_name)
    source = with_classes(source, class_names(task))
    config = prediction_config(task_name, source, data, overrides)
    check_task(config, task)
    with open_ranks(config, source) as (module, groups):
        loaded = load_model_tokenizer(config.tokenizer.path)
        yield Predictor(config, task, loaded, module, groups, source.is_multi_label)


@contextmanager
def open_ranks(config: RunConfig, source: SourceModel) -> Iterator[tuple[nn.Module, ProcessGroups]]:
    """Build this rank's part of a trained model. Collective over the ranks of the launcher.

    Yields:
        The model in evaluation mode, and the rank grid, which ends with the context.
    """
    environment = read_environment()
    # No batch has to divide over the ranks.
    batch = config.train.micro_batch_size * environment.world_size
    config = replace(config, train=replace(config.train, global_batch_size=batch))
    validate_for_world(config, environment.world_size)
    try:
        groups = init_process_groups(
            config.parallel.tensor_parallel_size,
            choose_device(config),
            config.cluster.collective_timeout_minutes,
            environment,
        )
        sharded = build_rank_model(config, groups)
        with torch.no_grad():
            for name, parameter in sharded.module.named_parameters():
                parameter.copy_(local_part(source.read(name), sharded.specs[name]))
        yield sharded.module.eval(), groups
    finally:
        shutdown()


def prediction_config(
    task_name: str, source: SourceModel, data: str, overrides: tuple[str, ...]
) -> RunConfig:
    """Return the run of a fine-tuned model, with other data and one whole model per rank."""
    run = source.run or finetune_config(task_name, source, data, settings="none")
    if source.run is None:
        run = replace(
            run, model=source.config, objective=replace(run.objective, name=source.config.head)
        )
    run = replace(
        run,
        finetune=replace(run.finetune, task=task_name, data=data, epochs=0.0),
        parallel=replace(run.parallel, tensor_parallel_size=1, sequence_parallel=False),
        precision=PrecisionConfig(engine="plain"),
        tokenizer=replace(run.tokenizer, path=source.tokenizer_path),
        optimizer=replace(run.optimizer, warmup_steps=0),
    )
    return config_from_layers([(str(source.path), config_to_dict(run))], overrides)
