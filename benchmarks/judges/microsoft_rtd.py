"""Microsoft's training loop of replaced-token detection, with its optimizers, beside ours."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

from benchmarks.judges.microsoft_masks import judged_lines, judged_tokenizer
from benchmarks.judges.models import copy_weights
from benchmarks.judges.rows import Comparison
from benchmarks.judges.shims import load
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    RTDConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.engine.optimizer import UncorrectedAdamW, clip_coefficient, parameter_groups
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.hf.import_model import OBJECTIVE, WeightFile, import_pair
from megatron_deberta.hf.names import hf_tensors
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.replaced_tokens import (
    DELTA,
    DISCRIMINATOR,
    GENERATOR,
    discriminator_config,
    generator_config,
)
from megatron_deberta.model.sampling import GumbelMax
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.objective import ModelLosses
from megatron_deberta.objectives.rtd import ReplacedTokenModel
from megatron_deberta.train.step import TrainStep

STEPS, ROWS, LENGTH = 200, 4, 48
LIMIT, WIDE_LIMIT = 1e-4, 1e-5
_RATES = (1e-3, 5e-4)
_WEIGHT = 10.0
_CLIP = 1.0
_SEED = 3
_FIELDS = {
    "vocab_size": 2048, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 48,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64, "type_vocab_size": 0, "initializer_range": 0.02,
    "layer_norm_eps": 1e-7, "relative_attention": True, "position_biased_input": False,
    "max_relative_positions": -1, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": "p2c|c2p", "padding_idx": 0,
}  # fmt: skip
_LAYERS = (2, 4)
"""Of generator and discriminator."""


class _Judged:
    """Microsoft's models and trainers, and ours with the same weights.

    Args:
        folder: for files.
        dtype: of both; our engine computes in fp32, so fp64 needs a loop of ours.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        tokenizer, content = judged_tokenizer()
        tokenizer.save(str(folder / "tokenizer"))
        (folder / "spm.model").write_bytes(content)
        self.tokenizer = load("deberta.spm_tokenizer").SPMTokenizer(str(folder / "spm.model"))
        torch.manual_seed(_SEED)
        generator, discriminator = (_FIELDS | {"num_hidden_layers": n} for n in _LAYERS)
        task = load("apps.tasks.rtd_task")
        config = load("deberta").ModelConfig.from_dict(
            {"generator": generator, "discriminator": discriminator, "embedding_sharing": "gdes"}
        )
        self.theirs: Any = task.RTDModel(config)
        with torch.no_grad():
            # [PAD] is never drawn: Microsoft's tables give its row no gradient.
            self.theirs.generator.lm_predictions.lm_head.bias[0] = -50.0
        self.batches = _batches(self.tokenizer)
        with torch.no_grad():
            # Builds the discriminator's tables.
            self.theirs.discriminator(**self.batches[0])
        self.config, weights = _import(self.theirs, generator, discriminator, folder)
        self.ours = _our_model(self.config)
        copy_weights(self.ours, weights)
        self.theirs = self.theirs.to(dtype)
        if dtype == torch.float64:
            # Microsoft's takes the norm in fp32, which torch refuses.
            load("optims.fp16_optimizer").fused_norm = torch.linalg.vector_norm
        self.samples: list[Tensor] = []
        self.theirs.topk_sampling = self._recorded(self.theirs.topk_sampling)
        self.trainer = self._trainer(task, folder)

    def _recorded(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def topk_sampling(*arguments: Any, **named: Any) -> Any:
            drawn = draw(*arguments, **named)
            self.samples.append(drawn[0].flatten())
            return drawn

        return topk_sampling

    def _trainer(self, task: Any, folder: Path) -> Any:
        """Return Microsoft's trainer of the generator, whose steps train the discriminator too."""
        arguments = SimpleNamespace(
            output_dir=str(folder), vocab_path=str(folder / "spm.model"), rank=0, world_size=1,
            seed=_SEED, fp16=False, learning_rate=_RATES[0],
            discriminator_learning_rate=_RATES[1], rtd_lambda=_WEIGHT, adam_beta1=0.9,
            adam_beta2=0.999, epsilon=1e-6, weight_decay=0.01, max_grad_norm=_CLIP,
            warmup_proportion=0.0, lr_schedule="warmup_linear", lr_schedule_ends=0.0,
            num_train_epochs=1, num_training_steps=STEPS, train_batch_size=ROWS,
            dump_interval=10**9,
        )  # fmt: skip
        model, device = self.theirs, torch.device("cpu")
        rtd = task.RTDTask.__new__(task.RTDTask)

        def data(trainer: Any) -> tuple[Any, int, Any]:
            return self.batches, STEPS, range(len(self.batches))

        loss = rtd.get_decoupled_loss_fn(arguments, model, data, device, STEPS)
        return load("training.trainer").DistributedTrainer(
            arguments, str(folder), model.generator, device, data, loss_fn=loss, name="G"
        )

    def batch(self, step: int) -> Batch:
        """Return the batch of a step as ours reads it."""
        fields = self.batches[step]
        labels = fields["labels"].long()
        count = int((labels > 0).sum(1).max())
        order = torch.where(labels > 0, 0, 1).argsort(dim=1, stable=True)[:, :count]
        chosen = labels.gather(1, order)
        return Batch(
            ModelInputs(fields["input_ids"].long(), fields["input_mask"].bool()),
            order.masked_fill(chosen == 0, -1),
            chosen.masked_fill(chosen == 0, -100),
            torch.arange(ROWS) + ROWS * step,
        )

    def worst(self) -> tuple[float, int]:
        """Return the largest difference of a weight over its tensor's largest, and the number."""
        models = (
            (GENERATOR, self.theirs.generator, generator_config(self.config.model)),
            (DISCRIMINATOR, self.theirs.discriminator, discriminator_config(self.config.model)),
        )
        ours = dict(self.ours.named_parameters())
        found = []
        for prefix, model, config in models:
            theirs = model.state_dict()
            for entry in hf_tensors(config, "deberta-v2"):
                (name,) = entry.canonical_names
                expected = theirs[entry.name]
                if prefix == DISCRIMINATOR and name == "embeddings.token.weight":
                    name = DELTA
                    expected = theirs["deberta.embeddings.word_embeddings._weight"]
                apart = (ours.pop(prefix + name).detach() - expected).abs().max()
                found.append(float(apart / expected.abs().max()))
        assert not ours, f"not compared: {sorted(ours)}"
        return max(found), len(found)


def _batches(tokenizer: Any) -> list[dict[str, Tensor]]:
    """Return masked rows of text, of different lengths, from Microsoft's generator of masks."""
    masks = load("apps.tasks.mlm_task").NGramMaskGenerator(
        tokenizer, max_gram=1, keep_prob=0, mask_prob=1, max_seq_len=LENGTH
    )
    pieces = [piece for line in judged_lines() for piece in tokenizer.tokenize(line)]
    draw, batches = random.Random(_SEED), []
    for _ in range(STEPS):
        rows: dict[str, list[list[int]]] = {"input_ids": [], "input_mask": [], "labels": []}
        for number in range(ROWS):
            size = LENGTH - 2 if number == 0 else draw.randrange(8, LENGTH - 1)
            first = draw.randrange(len(pieces) - size)
            tokens = ["[CLS]", *pieces[first : first + size], "[SEP]"]
            masked, labels = masks.mask_tokens(tokens, draw)
            padding = [0] * (LENGTH - len(tokens))
            rows["input_ids"].append(tokenizer.convert_tokens_to_ids(masked) + padding)
            rows["input_mask"].append([1] * len(tokens) + padding)
            rows["labels"].append(labels + padding)
        batches.append({name: torch.tensor(v, dtype=torch.int32) for name, v in rows.items()})
    return batches


def _import(
    theirs: Any, generator: dict[str, Any], discriminator: dict[str, Any], folder: Path
) -> tuple[RunConfig, dict[str, Tensor]]:
    """Import Microsoft's files of both models; return a run, and every parameter."""
    files = []
    for name, model, fields in (
        ("discriminator", theirs.discriminator, discriminator),
        ("generator", theirs.generator, generator),
    ):
        path = folder / name
        path.mkdir(exist_ok=True)
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        save_file(state, path / "pytorch.model.safetensors")
        (path / "model_config.json").write_text(json.dumps(fields))
        files.append(WeightFile(path))
    result = import_pair(
        files[0],
        files[1],
        "microsoft",
        folder / "imported",
        tokenizer_path=str(folder / "tokenizer"),
    )
    reader = CheckpointReader(result.checkpoint)
    model = replace(result.config, hidden_dropout=0.0, attention_dropout=0.0)
    config = RunConfig(
        model=model,
        objective=OBJECTIVE,
        rtd=RTDConfig(
            update="alternating", discriminator_learning_rate=_RATES[1],
            discriminator_weight=_WEIGHT,
        ),
        optimizer=OptimizerConfig(
            learning_rate=_RATES[0], warmup_steps=0, schedule="microsoft", eps=1e-6,
            weight_decay=0.01, clip_grad_norm=_CLIP, bias_correction=False,
        ),
        parallel=ParallelConfig(engine="plain"),
        train=TrainConfig(
            steps=STEPS, seed=_SEED, global_batch_size=ROWS, micro_batch_size=ROWS
        ),
    )  # fmt: skip
    names = [name for name, _ in _our_model(config).named_parameters()]
    return config, {name: reader.tensor(name) for name in names}


def _our_model(config: RunConfig) -> ReplacedTokenModel:
    model = build_objective(config).build_model(RuntimeOptions(attention_backend="reference"))
    assert isinstance(model, ReplacedTokenModel)
    return model


def _with_samples(batch: Batch, drawn: Tensor) -> Tensor:
    """Return drawn pieces, in the order of the masks, as ``[B, M]``."""
    samples = torch.zeros_like(batch.masked_positions)
    samples[batch.masked_positions >= 0] = drawn
    return samples


def loop() -> Iterator[Comparison]:
    """Train both models by alternating updates from the same weights, on the same draws."""
    with tempfile.TemporaryDirectory() as folder:
        yield _through_the_engine(_Judged(Path(folder), torch.float32))
    with tempfile.TemporaryDirectory() as folder:
        judged = _Judged(Path(folder), torch.float64)
        yield _in_fp64(judged)
        yield _draws(judged)
        yield _padding_drawn(judged)


def _compared(what: str) -> str:
    return (
        f"RTD's loop of two XAdam optimizers, {STEPS} alternating steps, gdes, {what}: all weights "
        "(rtd.update=alternating, optimizer.bias_correction=false, optimizer.schedule=microsoft)"
    )


def _through_the_engine(judged: _Judged) -> Comparison:
    config, groups = judged.config, single_process_groups(torch.device("cpu"))
    engine = build_engine(config, judged.ours, build_model(config, groups).specs, groups)
    take_step = TrainStep(engine, config, groups)
    generate = ReplacedTokenModel.generate

    def with_their_draws(model: Any, batch: Batch, seeds: Any) -> ModelLosses:
        generated = generate(model, batch, seeds)
        return generated._replace(outputs=_with_samples(batch, judged.samples[-1]))

    losses = []
    for step in range(STEPS):
        judged.trainer._train_step(judged.batches[step], 1)
        with mock.patch.object(ReplacedTokenModel, "generate", with_their_draws):
            losses.append(take_step(step, [judged.batch(step)]).loss)
    worst, number = judged.worst()
    learns = np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.5
    return Comparison(
        _compared("our training step and engine, fp32"), f"{worst:.0e} relative", f"{LIMIT:.0e}",
        number, worst < LIMIT and bool(learns),
    )  # fmt: skip


def _in_fp64(judged: _Judged) -> Comparison:
    """Compare with our model, optimizer, groups, clipping and schedule in a plain loop."""
    model = judged.ours.double()
    optimizer_config = judged.config.optimizer
    parts = (model.generator, model.discriminator)
    optimizers = [
        UncorrectedAdamW(
            parameter_groups(part.named_parameters(), optimizer_config.weight_decay),
            rate, (optimizer_config.beta1, optimizer_config.beta2), optimizer_config.eps,
        )
        for part, rate in zip(parts, _RATES, strict=True)
    ]  # fmt: skip
    for step in range(STEPS):
        judged.trainer._train_step(judged.batches[step], 1)
        batch = judged.batch(step)
        samples = _with_samples(batch, judged.samples[-1])
        for number, optimizer in enumerate(optimizers):
            if number:
                found = model.detect(batch, samples, None).losses["discriminator"].loss
                loss = _WEIGHT * found / batch.inputs.is_token.sum()
            else:
                loss = model.generate(batch, None).losses["generator"].loss / batch.num_targets
            loss.backward()
            gradients = [p.grad for p in parts[number].parameters() if p.grad is not None]
            norm = float(torch.stack([g.norm() for g in gradients]).norm())
            for gradient in gradients:
                gradient *= clip_coefficient(norm, _CLIP)
            config = replace(optimizer_config, learning_rate=_RATES[number])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config, STEPS)
            optimizer.step()
            model.zero_grad()
    worst, count = judged.worst()
    return Comparison(
        _compared("fp64"), f"{worst:.0e} relative", f"{WIDE_LIMIT:.0e}", count, worst < WIDE_LIMIT
    )


def _draws(judged: _Judged) -> Comparison:
    """Compare the distributions of tokens that the trained generator samples at one mask."""
    with torch.no_grad():
        logits = judged.theirs.generator(**judged.batches[0])["logits"][:1].float()
    count = 40_000
    seeds = torch.arange(count)
    ours = GumbelMax.at(seeds, torch.zeros(count, 1, dtype=torch.int64))(logits.expand(count, -1))[
        1
    ]
    theirs = judged.theirs.topk_sampling(logits.expand(count, -1))[0].flatten()
    size = logits.size(1)
    table = torch.stack([ours.bincount(minlength=size), theirs.bincount(minlength=size)]).numpy()
    common = table.sum(axis=0) >= 20
    columns = np.concatenate([table[:, common], table[:, ~common].sum(axis=1)[:, None]], axis=1)
    p = float(stats.chi2_contingency(columns).pvalue)
    return Comparison(
        "RTD: distribution of the drawn pieces at one mask, own random numbers",
        f"chi-square p = {p:.2g}, {int(common.sum())} pieces", "p > 0.001", count, p > 0.001,
    )  # fmt: skip


def _padding_drawn(judged: _Judged) -> Comparison:
    """Draw [PAD] at every mask: its row has a gradient in ours only."""
    fields = dict(judged.batches[0])
    labels = fields["labels"]
    fields["input_ids"] = torch.where(labels > 0, 0, fields["input_ids"])
    judged.theirs.zero_grad()
    judged.theirs.discriminator(**fields)["loss"].mean().backward()
    embeddings = judged.theirs.discriminator.deberta.embeddings.word_embeddings
    theirs = float(embeddings._weight.grad[0].abs().max())
    batch = judged.batch(0)
    samples = _with_samples(batch, torch.zeros(batch.num_targets, dtype=torch.int64))
    judged.ours.zero_grad()
    loss = judged.ours.detect(batch, samples, None).losses["discriminator"].loss
    (loss / batch.inputs.is_token.sum()).backward()
    gradient = judged.ours.get_parameter(DISCRIMINATOR + DELTA).grad
    assert gradient is not None
    ours = float(gradient[0].abs().max())
    return Comparison(
        "RTD: gradient of the row of [PAD] where the generator draws it (not drawn with "
        "rtd.draw_special_tokens=false)",
        f"{theirs:.0e} there (padding_idx), {ours:.0e} here", "a known difference", 1,
        theirs == 0 < ours,
    )  # fmt: skip


def schedule() -> Iterator[Comparison]:
    """Compare learning rates."""
    total, warmup = 1000, 100
    schedules = load("optims.lr_schedulers").SCHEDULES
    for ours, theirs in (("microsoft", "warmup_linear"), ("linear", "warmup_linear_shift")):
        config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup, schedule=ours)  # type: ignore[arg-type]
        expected = [schedules[theirs](step, total, warmup / total, 0) for step in range(total)]
        found = [learning_rate(step, config, total) for step in range(total)]
        after = max(abs(a - b) for a, b in zip(found[warmup:], expected[warmup:], strict=True))
        # Ours has no update of rate 0: its warm-up is one step ahead.
        before = max(
            abs(a - b) for a, b in zip(found[: warmup - 1], expected[1:warmup], strict=True)
        )
        worst = max(after, before)
        yield Comparison(
            f"learning rates of {theirs} (optimizer.schedule={ours}); our warm-up is one step "
            "ahead, since no update has rate 0",
            f"{worst:.0e}", "1e-12", total, worst < 1e-12,
        )  # fmt: skip
