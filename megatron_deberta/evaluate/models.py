"""Trained models on disk (run, checkpoint, export or release), and their parts on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_checkpoint, local_part
from megatron_deberta.checkpoint.views import (
    Part,
    TaskHead,
    are_placeholders,
    class_order,
    open_part,
)
from megatron_deberta.config import config_from_dict, validate_for_world
from megatron_deberta.config.loader import config_from_layers, config_to_dict
from megatron_deberta.config.schema import (
    CLASS_HEADS,
    LANGUAGE_MODEL_HEADS,
    Head,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    with_task_head,
)
from megatron_deberta.distributed.control import raise_on_all_ranks
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.parallelize.build import build_model
from megatron_deberta.distributed.topology import (
    ProcessGroups,
    choose_device,
    flush_denormal_numbers,
    init_process_groups,
    shutdown,
)
from megatron_deberta.errors import CheckpointError, ConfigError, DataError, MissingModelError
from megatron_deberta.hf.config import DTYPES, TOKENIZER_FIELD
from megatron_deberta.hf.heads import has_sigmoid, task_head
from megatron_deberta.hf.loading import (
    check_folder,
    check_tokenizer,
    load_export_tokenizer,
    load_model_tokenizer,
)
from megatron_deberta.hf.published import CONFIG_FILES, open_release, open_with_head, read_config
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.tokenizer import JSON_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A pretrained or fine-tuned model on disk.

    Attributes:
        path: its folder; of a run, its best or else its newest checkpoint.
        config: architecture, with the head that the model has.
        tokenizer_path: where its tokenizer is.
        run: config of the run that trained it; None: unknown.
        read: returns a logical fp32 tensor by canonical name.
        missing: canonical names of the parameters that the folder lacks, such as a head.
        why_untrained: why it cannot predict tokens, of a pretrained model; empty: it can.
        uses_sigmoid: each class, choice or passage has a probability of its own, where the head's
            usual ones are a softmax, or scores.
        checkpoint: the training checkpoint, whose files are not verified yet; None: another format.
        fields: ``config.json`` of another format.
    """

    path: Path
    config: ModelConfig
    tokenizer_path: str
    run: RunConfig | None
    read: Callable[[str], Tensor]
    missing: tuple[str, ...] = ()
    why_untrained: str = ""
    uses_sigmoid: bool = False
    checkpoint: CheckpointReader | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def verify(self, *, share: int = 0, num_shares: int = 1) -> None:
        """Verify the files of a checkpoint before its weights are read.

        Args:
            share: first file; with ``num_shares``, divides the work among ranks.
            num_shares: check every ``num_shares``-th file.

        Raises:
            CheckpointError: a file is missing, truncated or altered.
        """
        if self.checkpoint is not None:
            self.checkpoint.verify(share=share, num_shares=num_shares)

    def load_tokenizer(self, path: str = "") -> Tokenizer:
        """Load the model's tokenizer.

        Args:
            path: where it is; empty: ``tokenizer_path``.

        Raises:
            DataError: it is missing, or not the one that the model was trained with.
        """
        location = path or self.tokenizer_path
        if self.checkpoint is None:
            return load_export_tokenizer(self.fields, location)
        tokenizer = load_model_tokenizer(location)
        check_tokenizer(self.checkpoint.metadata.tokenizer_fingerprint, location, tokenizer)
        return tokenizer


def open_source_model(
    path: Path, tokenizer_path: str = "", part: Part = "discriminator"
) -> SourceModel:
    """Open a model.

    Args:
        path: run, checkpoint, export, or release of Hugging Face or Microsoft.
        tokenizer_path: its tokenizer; empty: its own.
        part: which model of a run of replaced-token detection.

    Raises:
        CheckpointError: the folder holds no model, or a damaged one.
    """
    check_folder(path, "an export, a downloaded model, a run or a checkpoint")
    if not any((path / name).is_file() for name in CONFIG_FILES):
        return _open_checkpoint(path, tokenizer_path, part)
    if not any(path.glob("*.safetensors")) and any(path.glob("*.bin")):
        raise MissingModelError(
            f"{path} has pickled weights; import them first: megatron-deberta convert --from hf "
            f"{path} --output NEW --allow-pickle-weights-only --sha256 HEX"
        )
    fields = read_config(path)
    release, own = open_with_head(path, fields), task_head(fields)
    location = tokenizer_path or str(path)
    return SourceModel(
        path,
        release.config,
        location,
        None,
        release.tensor,
        release.missing_names,
        release.why_untrained if own.head == "mlm" else "",
        uses_sigmoid=own.head == "rerank" and has_sigmoid(fields),
        fields=fields,
    )


def with_classes(source: SourceModel, labels: tuple[str, ...]) -> SourceModel:
    """Return a model whose outputs are those of a list of classes, which name the same ones.

    Names without meaning, as in a file without ``id2label``, stand for the classes in their order.

    Args:
        source: a fine-tuned model.
        labels: names of the classes; the model is returned unchanged if it has others.
    """
    own = source.config
    if labels == own.labels or len(labels) != len(own.labels):
        return source
    wanted = replace(own, labels=labels)
    run = None if source.run is None else replace(source.run, model=wanted)
    if are_placeholders(own.labels):
        logger.warning(
            "%s does not name its classes; taken to be, in this order: %s",
            source.path,
            ", ".join(labels),
        )
        return replace(source, config=wanted, run=run)
    order = class_order(own.labels, labels)
    if order is None:
        return source

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        return tensor[order] if name.startswith("classifier.") else tensor

    return replace(source, config=wanted, run=run, read=read)


def with_head(
    source: SourceModel,
    head: Head,
    read: Callable[[str], Tensor] | None = None,
    *,
    uses_sigmoid: bool,
) -> SourceModel:
    """Return a model whose outputs are taken for those of another head.

    Args:
        source: a fine-tuned model.
        head: the head.
        read: as in `SourceModel`, with the classifier's weight ``[1, D]``; None: the model's own.
        uses_sigmoid: as in `SourceModel`.
    """
    labels = source.config.labels if head in CLASS_HEADS else ()
    config = replace(source.config, head=head, labels=labels)
    run = source.run
    if run is not None:
        run = replace(run, model=config, objective=replace(run.objective, name=head))
    read = read or source.read
    return replace(source, config=config, run=run, read=read, uses_sigmoid=uses_sigmoid)


def _open_checkpoint(path: Path, tokenizer_path: str, part: Part) -> SourceModel:
    step = find_checkpoint(path)
    if step is None:
        raise MissingModelError(
            f"{path} holds neither config.json nor a committed checkpoint; give an export, a "
            "downloaded model, a run or a checkpoint"
        )
    reader = CheckpointReader(step)
    run = config_from_dict(reader.metadata.config, str(step))
    location = tokenizer_path or reader.metadata.tokenizer_path
    if not location:
        raise CheckpointError(f"{step} records no tokenizer; give --tokenizer")
    config, weights = open_part(reader, run.model, part)
    why = reader.metadata.why_untrained
    return SourceModel(
        step,
        config,
        location,
        run,
        weights.tensor,
        why_untrained=why,
        uses_sigmoid=config.head == "rerank" and run.finetune.ranking_loss == "bce",
        checkpoint=reader,
    )


def open_release_weights(path: Path, config: RunConfig) -> TaskHead:
    """Open the encoder of an export or release for a run with another head.

    Raises:
        CheckpointError: it is damaged or of another architecture.
        DataError: its tokenizer is not the one that it was exported with.
    """
    model = config.model

    def adapt(own: ModelConfig) -> ModelConfig:
        return with_task_head(own, model.head, model.labels, model.head_dropout)

    content = read_config(path)
    release = open_release(path, None, path, fields=content, adapt=adapt)
    _check_tokenizer(path, content, config.tokenizer.path or "")
    fields = task_head(content)
    own = replace(release.config, head=fields.head, labels=fields.labels)
    return TaskHead(release, own, model)


def _check_tokenizer(path: Path, fields: Mapping[str, Any], location: str) -> None:
    """Check that an export's own tokenizer is the recorded one; warn if another one was chosen."""
    if TOKENIZER_FIELD not in fields:
        return
    try:
        load_export_tokenizer(fields, location)
    except DataError:
        if Path(location).resolve() in (path.resolve(), path.resolve() / JSON_FILE):
            raise
        logger.warning(
            "%s was trained with another tokenizer than %s; its embeddings belong to other tokens",
            path,
            location,
        )


@contextmanager
def open_ranks(config: RunConfig, source: SourceModel) -> Iterator[tuple[nn.Module, ProcessGroups]]:
    """Build this rank's part of a trained model. Collective over the ranks of the launcher.

    Yields:
        The model in evaluation mode, and the rank grid, which ends with the context.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    environment = read_environment()
    # No batch has to divide over the ranks.
    batch = config.train.micro_batch_size * environment.world_size
    config = replace(config, train=replace(config.train, global_batch_size=batch))
    # The weights that are read contain the adapters.
    config = replace(config, finetune=replace(config.finetune, lora_rank=None))
    validate_for_world(config, environment.world_size)
    device = choose_device(config)
    if device.type == "cpu":
        flush_denormal_numbers()
    try:
        groups = init_process_groups(
            config.parallel.tensor_parallel_size,
            device,
            config.cluster.collective_timeout_minutes,
            environment,
        )
        with ThreadPoolExecutor(1) as pool:
            # Meanwhile the model is built; hashing leaves the interpreter to it.
            verified = pool.submit(
                source.verify, share=groups.rank, num_shares=environment.world_size
            )
            # An import has no format of its own.
            dtype = "fp32" if config.precision.dtype == "auto" else config.precision.dtype
            sharded = build_model(config, groups, DTYPES[dtype])
            with raise_on_all_ranks(groups):
                # First: a damaged file is named by its hash, not by what its tensors look like.
                verified.result()
                with torch.no_grad():
                    for name, parameter in sharded.module.named_parameters():
                        parameter.copy_(local_part(source.read(name), sharded.specs[name]))
        yield sharded.module.eval(), groups
    finally:
        shutdown()


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
    run = replace(run, train=replace(run.train, blimp_every=None))
    return evaluation_config(run, source, overrides)


def evaluation_config(run: RunConfig, source: SourceModel, overrides: Sequence[str]) -> RunConfig:
    """Return a run with one whole model per rank, without an engine.

    Args:
        run: the run that trained the model, or defaults.
        source: the model.
        overrides: ``section.key=value``.
    """
    run = replace(
        run,
        parallel=replace(
            run.parallel,
            engine="plain",
            offload_optimizer=False,
            tensor_parallel_size=1,
            sequence_parallel=False,
        ),
        precision=PrecisionConfig(dtype="fp32"),
        tokenizer=replace(run.tokenizer, path=source.tokenizer_path),
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
