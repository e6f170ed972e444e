"""Ablations of DeBERTa; see ``benchmarks.learn.ablations``.

One item per variant, in the order of the table. A run that exceeds the time saves a checkpoint and
resumes from it the next time.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.record import Item, Record, UnfinishedError
from benchmarks.learn.ablations import VARIANTS, Experiment, collect, time_steps, train
from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT
from benchmarks.lib.shards import prepare_shards

SMALL_RUN = """
base: {base}
train: {{steps: 8, eval_every: 4, eval_batches: 2, device: {device}}}
checkpoint: {{save_every: 4}}
optimizer: {{warmup_steps: 1}}
"""


def run(record: Record) -> None:
    """Run one item per variant, then time the steps of all variants."""
    options = record.options
    names = list(VARIANTS)[: 1 if options.small else None]
    whole = experiment(record, names)
    for name in names:
        record.run(name, lambda n=name: learn(record, experiment(record, [n])))
    record.run(
        "seconds of a step", lambda: {"seconds": time_steps(whole, 1 if options.small else 5)}
    )
    result = collect(whole, options.out / "learning_curves")
    result["seconds_per_step"] = record.items.get("seconds of a step", {}).get("seconds", {})
    write_json(options.out / "learning_curves.json", result)


def experiment(record: Record, variants: list[str]) -> Experiment:
    """Return an experiment with some variants in the work folder."""
    options = record.options
    configs = ROOT / "configs" / "runs"
    config = configs / ("learn_gpu.yaml" if options.device == "cuda" else "learn_cpu.yaml")
    if options.small:
        base, config = config, options.work / "learn_small.yaml"
        config.write_text(SMALL_RUN.format(base=base, device=options.device))
    if options.corpus is None:
        shards = prepare_shards(options.work, *((0.6, 500) if options.small else (8.0, 8192)))
        corpus = str(shards.prefix), str(shards.tokenizer)
    else:
        corpus = options.corpus
    folder = Path(options.work) / ("learn_small" if options.small else "learn")
    return Experiment(config, *corpus, folder, tuple(variants), (1,))


def learn(record: Record, one: Experiment) -> Item:
    """Train one variant until it is done or the time is up."""
    train(one, max(record.seconds_left, 1.0))
    (run,) = one.runs()
    points = run.validations()
    if not points or points[-1]["step"] != one.config(run).train.steps:
        raise UnfinishedError
    unigram = run.unigram_loss()
    losses = [point["loss"] for point in points]
    is_falling = losses[-1] < losses[0] if len(losses) > 1 else True
    wrong = [] if is_falling else [f"validation loss does not fall: {losses}"]
    return {"validation": points, "unigram_loss": unigram, "wrong": wrong}


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal: the last validation of each variant."""
    return [
        f"  {name:22} validation {item['validation'][-1]['loss']:.4f} "
        f"(unigram {item['unigram_loss']:.4f})"
        for name, item in items.items()
        if item.get("validation")
    ]
