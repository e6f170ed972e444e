"""Step of replaced-token detection against the same pair of models on transformers, on a CPU.

All sides take their steps in turns in one process, with the same batch, one thread and torch's
fused AdamW, so their ratios hold on a shared machine; absolute times do not. Medians of processor
time are compared beside those of elapsed time.

- ``ours``: both models in one step;
- ``generator`` and ``discriminator``: each of them alone, the discriminator on given samples;
- ``transformers``: two ``DebertaV2Model``s in plain torch, with the vocabulary projection at masked
  positions only, sampling, and token embeddings of generator plus delta. They have no mask decoder,
  which the generator of this project has.

    python -m benchmarks.step.replaced_tokens --output benchmarks/results/cpu/rtd_step.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DebertaV2ForMaskedLM, DebertaV2Model

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.lib.stock import stock_config
from benchmarks.step.batch import StepBatch, make_batch
from benchmarks.step.measure import Optimizer
from benchmarks.step.sides import without_mask_decoder
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.replaced_tokens import generator_config
from megatron_deberta.objectives.rtd import ReplacedTokenModel

CONFIG = ROOT / "configs/models/v3_xsmall_rtd.yaml"
TARGETS = {"transformers": 1.5, "both_alone": 1 / 1.05}


class SharedEmbedding(nn.Module):
    """Rows of the generator's table, without gradient, plus rows of a delta."""

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self._shared = (shared,)
        self.delta = nn.Embedding(*shared.weight.shape)
        nn.init.zeros_(self.delta.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings ``[B, N, D]``."""
        rows: Tensor = F.embedding(input_ids, self._shared[0].weight.detach())
        return rows + self.delta(input_ids)


class StockPair(nn.Module):
    """Generator and discriminator of transformers, written plainly."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        small, width = (
            without_mask_decoder(generator_config(config.model)),
            config.model.hidden_size,
        )
        large = replace(small, num_layers=config.model.num_layers)
        self.generator = DebertaV2ForMaskedLM(stock_config(small))
        self.discriminator = DebertaV2Model(stock_config(large))
        self.discriminator.embeddings.word_embeddings = SharedEmbedding(
            self.generator.deberta.embeddings.word_embeddings
        )
        self.norm, self.dense = nn.LayerNorm(width, eps=1e-7), nn.Linear(width, width)
        self.classifier = nn.Linear(width, 1)
        self.weight = config.rtd.discriminator_weight

    def forward(self, batch: StepBatch) -> Tensor:
        """Return the weighted sum of both mean losses."""
        mask = torch.ones_like(batch.input_ids)
        hidden = self.generator.deberta(batch.input_ids, mask).last_hidden_state
        index = batch.masked_positions.unsqueeze(-1).expand(-1, -1, hidden.size(-1))
        logits = self.generator.cls(hidden.gather(1, index).flatten(0, 1))
        loss = F.cross_entropy(logits, batch.labels.flatten())
        with torch.no_grad():
            samples = torch.multinomial(logits.softmax(-1), 1).view(batch.labels.shape)
        input_ids = batch.input_ids.scatter(1, batch.masked_positions, samples)
        original = batch.input_ids.scatter(1, batch.masked_positions, batch.labels)
        states = self.discriminator(input_ids, mask).last_hidden_state
        states = F.gelu(self.dense(self.norm(states[:, :1] + states)))
        detected = self.classifier(states).squeeze(-1)
        replaced = (input_ids != original).float()
        detection = F.binary_cross_entropy_with_logits(detected, replaced)
        return loss + self.weight * detection


class Side:
    """One side: its model, optimizer, and times of steps."""

    def __init__(self, model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        self._loss, self._optimizer = loss, Optimizer(model)
        self._steps = 0
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []

    def step(self) -> None:
        """Take one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._steps += 1
        self._loss(self._steps).backward()
        self._optimizer.step()
        self.seconds.append(time.perf_counter() - wall)
        self.processor_seconds.append(time.process_time() - cpu)


def our_model(config: RunConfig) -> ReplacedTokenModel:
    """Build this project's pair."""
    groups = single_process_groups(torch.device("cpu"))
    model = build_model(config, groups).module.train()
    assert isinstance(model, ReplacedTokenModel)
    return model


def sides(config: RunConfig, batch: StepBatch) -> dict[str, Side]:
    """Build all sides."""
    rows, weight = batch.unpadded(), config.rtd.discriminator_weight
    masked, tokens = batch.labels.numel(), batch.input_ids.numel()
    both, alone, stock = our_model(config), our_model(config), StockPair(config).train()
    samples = batch.labels.roll(1)

    def joint(step: int) -> Tensor:
        result = both(rows, DropoutSeeds(1, step, batch.samples))
        return result[0] / masked + weight * result[2] / tokens

    def generate(step: int) -> Tensor:
        return alone.generate(rows, DropoutSeeds(1, step, batch.samples))[0] / masked

    def detect(step: int) -> Tensor:
        seeds = DropoutSeeds(1, step, batch.samples)
        return weight * alone.detect(rows, samples, seeds)[0] / tokens

    return {
        "ours": Side(both, joint),
        "generator": Side(alone.generator, generate),
        "discriminator": Side(alone.discriminator, detect),
        "transformers": Side(stock, lambda step: stock(batch)),
    }


def summarize(contenders: dict[str, Side]) -> dict[str, Any]:
    """Return median times and ratios; the first two steps of each side are warm-up."""
    record: dict[str, Any] = {"sides": {}, "ratios": {}, "targets": TARGETS}
    for kind in ("seconds", "processor_seconds"):
        times = {name: getattr(side, kind)[2:] for name, side in contenders.items()}
        times["both_alone"] = [
            sum(pair) for pair in zip(times["generator"], times["discriminator"], strict=True)
        ]
        for name, values in times.items():
            record["sides"].setdefault(name, {})[kind] = statistics.median(values)
            record["sides"][name][f"all_{kind}"] = values
        record["ratios"][kind] = {
            # Of neighbouring steps, which ran at a similar load
            name: statistics.median(
                theirs / ours for theirs, ours in zip(times[name], times["ours"], strict=True)
            )
            for name in TARGETS
        }
    return record


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="default: v3_xsmall_rtd")
    parser.add_argument("--vocabulary", type=int, default=32000, help="pieces (default 32000)")
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default 512)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per step (default 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps per side (default 5)")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = load_config(args.config, [f"model.vocab_size={args.vocabulary}"])
    batch = make_batch(config.model, args.tokens, args.length, torch.device("cpu"))
    contenders = sides(config, batch)
    for _ in range(args.repeats + 2):
        for side in contenders.values():
            side.step()
    model = config.model
    result = {
        **provenance(),
        "threads": 1,
        "layers": model.num_layers,
        "generator_layers": generator_config(model).num_layers,
        "width": model.hidden_size,
        "vocab": model.vocab_size,
        "length": args.length,
        "tokens": args.tokens,
        **summarize(contenders),
    }
    write_json(args.output, result)
    print(result["ratios"])


if __name__ == "__main__":
    main()
