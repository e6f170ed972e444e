"""Tables of learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.learn.ablations import VARIANTS, mean_curves
from benchmarks.learn.forms import MODELS as FORMS
from benchmarks.learn.forms import PAPER as PAPER_FORMS
from benchmarks.learn.judge import BASELINE, description
from benchmarks.learn.same_batches import (
    EARLY_STEPS,
    PEER,
    WITH,
    WITHOUT,
    common_seeds,
    differences,
    mean_curve,
)
from benchmarks.tables.common import UNMEASURED, Result, markdown
from megatron_deberta.tasks.task import load_task

# MNLI-m/mm, SQuAD 1.1, SQuAD 2.0, RACE of He et al. 2021, Tables 4 and 13.
PAPER = {
    "RoBERTa": ("84.9/85.1", "91.1/84.8", "79.5/76.0", "66.8"),
    "DeBERTa": ("86.3/86.2", "92.1/86.1", "82.5/79.3", "71.7"),
    "-EMD": ("86.1/86.1", "91.8/85.8", "81.3/78.0", "70.3"),
    "-C2P": ("85.9/85.7", "91.6/85.8", "81.3/78.3", "69.3"),
    "-P2C": ("86.0/85.8", "91.7/85.7", "80.8/77.6", "69.6"),
    "+shared projections": ("86.3/86.3", "92.2/86.2", "82.3/79.5", ""),
    "+convolution": ("86.3/86.5", "92.5/86.4", "82.5/79.7", ""),
}
SHOWN_STEPS = (100, 200, 300, 400, 600, 800, 1000, 1500, 2000)
"""Validations in the table of learning curves on the same batches; the plot has all."""


def same_batches(record: Result) -> str:
    """Validation loss with and without mask decoder, and of transformers' DeBERTa."""
    seeds = common_seeds(record, record["steps"])
    every_seed = common_seeds(record, EARLY_STEPS)
    header = (
        "step", "tokens", "mask decoder", "none", "mask decoder - none", "transformers - none",
    )  # fmt: skip
    curves = [mean_curve(record, variant, "validation") for variant in (WITH, WITHOUT)]
    pairs = [differences(record, variant, WITHOUT, "validation", seeds) for variant in (WITH, PEER)]
    rows = [
        (
            f"{step:,}",
            f"{step * record['tokens_per_step'] / 1e6:.2f}M",
            *(f"{curve[step]:.3f}" for curve in curves),
            *(_with_interval(*pair[step]) if step in pair else "" for pair in pairs),
        )
        for step in SHOWN_STEPS
        if step in curves[0]
    ]
    early = ", ".join(
        f"{_with_interval(*found)} at step {step}"
        for step, found in differences(record, WITH, WITHOUT, "validation", every_seed).items()
        if step <= EARLY_STEPS
    )
    peers = sum(run["variant"] == PEER for run in record["runs"])
    more = f"With {len(every_seed)} seeds, mask decoder - none: {early}. "
    diverged = record["largest_training_differences"]
    growth = markdown(
        ("steps from the start", *diverged),
        (
            (steps, *(f"{found[steps]:.0e}" for found in diverged.values()))
            for steps in next(iter(diverged.values()))
        ),
    )
    return markdown(header, rows) + (
        f"\n(Mean of {len(seeds)} seeds, {peers} with transformers; differences with their 95 % "
        "interval, paired by seed. "
        f"{more if len(every_seed) > len(seeds) else ''}Unigram cross-entropy of the targets "
        f"{record['unigram_loss']:.3f} nat. {record['hardware']}, torch {record['torch']}, "
        f"transformers {record['transformers']}.)\n\n"
        "Largest difference of training losses from ours without mask decoder:\n\n"
        f"{growth}"
    )


def which_recipe(record: Result) -> str:
    """Scores of each recipe and its differences to the baseline after the same processor time."""
    baseline = next(found for found in record["comparison"] if found["recipe"] == BASELINE)
    steps = record["budget_seconds"] / record["seconds_per_step"][BASELINE]
    titles = {"bits_per_byte": "bits per byte", "blimp": "BLiMP", "sst2": "SST-2",
              "chunking": "chunking F1"}  # fmt: skip
    rows = [
        (
            f"`{BASELINE}`", description(BASELINE).partition(" The other")[0],
            str(baseline["seeds"]), f"{steps:,.0f}",
            *(f"{baseline['scores'][name]['mean']:.3f}" for name in titles), "",
        )
    ]  # fmt: skip
    others = [found for found in record["comparison"] if found["recipe"] != BASELINE]
    for found in sorted(others, key=lambda each: each["scores"]["bits_per_byte"]["difference"]):
        name = found["recipe"]
        scores = [found["scores"][score] for score in titles]
        rows.append(
            (
                f"`{name}`", description(name), str(found["seeds"]),
                f"{record['budget_seconds'] / record['seconds_per_step'][name]:,.0f}",
                *(_with_interval(each["difference"], each["half"] or math.inf) for each in scores),
                _verdict(scores[0]["difference"], scores[0]["half"]),
            )
        )  # fmt: skip
    header = ("recipe", "what it is", "seeds", "steps", *titles.values(), "verdict")
    minutes = record["budget_seconds"] / 60
    return markdown(header, rows) + (
        f"\n({minutes:.0f} minutes of processor time each; scores of the baseline, and differences "
        f"to it with their 95 % interval. {record['hardware']}, one thread, torch "
        f"{record['torch']}.)\n"
    )


def _verdict(difference: float, half: float | None) -> str:
    """Return what a difference in bits per byte says about a recipe."""
    if half is None:
        return "one seed"
    if abs(difference) < half:
        return "no difference seen"
    return "better" if difference < 0 else "worse"


def _with_interval(mean: float, half: float) -> str:
    return f"{mean:+.3f}" if math.isinf(half) else f"{mean:+.3f} ± {half:.3f}"


def _held_out(found: dict[str, int]) -> str:
    return f"{found['right_of_400'] / 400:.0%}, {found['most_frequent_of_400'] / 400:.1%}"


def quickstart_recipes(record: Result) -> str:
    """Loss and held-out words of the quickstart's recipes after equal processor time."""
    rows = [
        (
            name, f"{row['seconds_per_step']:.3f}", f"{row['steps']:,}",
            f"{row['unigram_loss'] - row['loss']:.2f}", f"{row['bits_per_byte']:.3f}",
            _held_out(row), _held_out(row["with_prior_weight"]),
        )
        for name, row in record["recipes"].items()
    ]  # fmt: skip
    header = (
        "recipe", "s per step", "steps", "nat below the unigram", "bits per byte",
        "held-out words right, most frequent answer", "the same with prior weight 0.5",
    )  # fmt: skip
    first = next(iter(record["recipes"].values()))
    return markdown(header, rows) + (
        f"\n({record['budget_seconds']:.0f} s of processor time each, two recipes at a time; "
        f"{first['hardware']}, revision {first['revision']}.)\n"
    )


def prior_weights(record: Result) -> str:
    """Right answers and uses of the most frequent answer, by steps, weight and floor."""
    rows = [
        (
            f"{row['steps']:,}", f"{row['weight']:g}", f"{row['floor']:g}" if row["floor"] else "",
            f"{row['right'] / 40:.1%} ± {row['right_error'] / 40:.1%}",
            f"{row['most_frequent']:.2f} ± {row['most_frequent_error']:.2f}",
        )
        for row in record["rows"]
    ]  # fmt: skip
    header = ("steps", "weight", "floor", "right", "most frequent answer, of 40")
    first = record["rows"][0]
    return markdown(header, rows) + (
        f"\n({first['tables']} tables of 40 words per row; mean and its standard error. "
        f"{first['hardware']}, revision {first['revision']}.)\n"
    )


def forms(record: Result) -> str:
    """Perplexity and BLiMP of masked, autoregressive and mixed training, beside Table 10."""
    header = (
        "model", "validation loss: masked", "autoregressive", "perplexity per word: masked",
        "autoregressive", "BLiMP", "paper, Table 10",
    )  # fmt: skip
    rows = [(name, *[""] * 5, of_paper) for name, of_paper in PAPER_FORMS.items()
            if name not in FORMS]  # fmt: skip
    for name, row in record["models"].items():
        validation, perplexity = row["validation"], row["perplexity"]
        losses = {"masked": validation["loss"]}
        if "autoregressive_loss" in validation:
            losses["autoregressive"] = validation["autoregressive_loss"]
        elif "masked" not in perplexity:
            losses = {"autoregressive": validation["loss"]}
        both = ("masked", "autoregressive")
        rows.append((
            name,
            *(f"{losses[form]:.3f}" if form in losses else "" for form in both),
            *(
                f"{perplexity[form]['perplexity_per_word']:,.0f}" if form in perplexity else ""
                for form in both
            ),
            f"{row['blimp']['accuracy']:.1%}",
            PAPER_FORMS.get(name, ""),
        ))  # fmt: skip
    first = next(iter(record["models"].values()))
    text = next(iter(first["perplexity"].values()))
    return markdown(header, rows) + (
        f"\n({record['steps']:,} steps = {record['tokens'] / 1e6:.2f} million tokens, vocabulary "
        f"{record['vocabulary']:,}, one seed; unigram cross-entropy of the masked targets "
        f"{first['unigram_loss']:.3f} nat; perplexity of {text['num_words']:,} words, "
        f"{text['num_pieces']:,} pieces, {text['num_unknown']:,} of them unknown, rows of "
        f"{text['sequence_length']}, stride {text['stride']}; BLiMP "
        f"{first['blimp']['num_pairs']:,} "
        f"pairs; {record['hardware']}, torch {record['torch']}.)\n"
    )


def replaced_tokens(
    record: Result, joint: Result | None = None, plain: Result | None = None
) -> str:
    """Replaced-token detection after the last step, and in two other recipes."""
    header = ("model", "generator's loss", "below the unigram", "precision", "recall", "F1",
              "F1 / F1 of all replaced", "replaced")  # fmt: skip
    rows = []
    for name, run in (
        ("slow generator, 1,000 pieces", record),
        ("one learning rate, 2,048 pieces", joint),
        ("the same without convolution", plain),
    ):
        if run is None:
            continue
        last = run["validation"][-1]
        shares = (last[f"discriminator_{score}"] for score in ("precision", "recall", "f1"))
        ratio = last["discriminator_f1"] / last["f1_of_all_replaced"]
        rows.append((
            name, f"{last['loss']:.3f}", f"{run['unigram_loss'] - last['loss']:.2f}",
            *(f"{share:.3f}" for share in shares), f"{ratio:.2f}",
            f"{last['replaced_fraction']:.1%}",
        ))  # fmt: skip
    tokens = record["steps"] * record["tokens_per_step"]
    return markdown(header, rows) + (
        f"\n({record['steps']:,} steps, {tokens / 1e6:.1f} million tokens, one seed; "
        f"{record['hardware']}, torch {record['torch']}, revision {record['revision']}.)\n"
    )


def learn(record: Result) -> str:
    """Final validation loss of the ablations beside the paper's fine-tuning results."""
    header = ("model", "seeds", "validation loss", "difference", "s per step",
              "paper: MNLI-m/mm", "SQuAD 1.1 F1/EM", "SQuAD 2.0 F1/EM", "RACE")  # fmt: skip
    last = {name: points[-1] for name, points in mean_curves(record)}
    steps, reference = record["steps"], last.get("DeBERTa", (0, 0.0))
    rows = []
    for name in VARIANTS:
        seeds = sum(
            run["variant"] == name and run["validation"][-1]["step"] == steps
            for run in record["runs"]
        )
        loss = against = ""
        if name in last:
            step, mean = last[name]
            loss = f"{mean:.3f}" if step == steps else f"{mean:.3f} at step {step}"
            if step == steps == reference[0]:
                against = f"{mean - reference[1]:+.3f}"
        seconds = record["seconds_per_step"].get(name)
        rows.append((
            name, str(seeds), loss or UNMEASURED, against,
            f"{seconds:.3g}" if seconds else UNMEASURED, *PAPER.get(name, ("", "", "", "")),
        ))  # fmt: skip
    tokens = record["steps"] * record["tokens_per_step"] / 1e6
    timed = f"; steps timed at load {record['timed']['load']}" if "timed" in record else ""
    return markdown(header, rows) + (
        f"\n({record['layers']} layers x {record['width']}, {tokens:.2f} million tokens; "
        f"unigram cross-entropy of the same targets {record['unigram_loss']:.3f} nat; "
        f"{record['hardware']}, torch {record['torch']}{timed}.)\n"
    )


def finetune_study(record: Result) -> str:
    """Scores of fine-tuned tasks from pretrained and random weights, and BLiMP by step."""
    rows = []
    for row in record["comparison"]:
        sides = [row["pretrained"], row["random"]]
        spread = ["" if side["stdev"] is None else f" ± {side['stdev']:.3f}" for side in sides]
        p = row["p"]
        rows.append((
            row["task"], load_task(row["task"]).metrics[0].replace("_", " "),
            str(min(side["seeds"] for side in sides)),
            *(f"{side['mean']:.3f}{s}" for side, s in zip(sides, spread, strict=True)),
            f"{row['difference']:+.3f}", "" if p is None else f"{p:.1g}",
        ))  # fmt: skip
    header = ("task", "score", "seeds", "pretrained", "random weights", "difference", "p")
    scores = [f"{row['accuracy']:.1%} at step {step}" for step, row in record["blimp"].items()]
    blimp = f"\nBLiMP, 50 pairs per paradigm: {', '.join(scores)}.\n" if scores else ""
    return (
        markdown(header, rows)
        + blimp
        + (
            f"\n({record['layers']} layers x {record['width']}, pretrained on "
            f"{record['pretraining_tokens'] / 1e6:.1f} million tokens; mean ± standard deviation "
            f"over seeds, Welch's t-test; {record['hardware']}, revision {record['revision']}.)\n"
        )
    )


def task_kinds(question: str) -> Callable[[Result], str]:
    """Return the table of one question of ``benchmarks.learn.task_kinds``."""

    def write(record: Result) -> str:
        rows = [
            (
                row["metric"].replace("_", " "), row["variant"], str(row["seeds"]),
                f"{row['mean']:.3f}" + ("" if row["stdev"] is None else f" ± {row['stdev']:.3f}"),
                f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
                if "low" in row else "",
                f"{row['p']:.1g}" if "p" in row else "",
            )
            for row in record["comparison"]
            if row["question"] == question
        ]  # fmt: skip
        header = ("score", "variant", "seeds", "mean", "difference to the first", "p")
        return markdown(header, rows) + (
            f"\n({record['layers']} layers x {record['width']}, pretrained on "
            f"{record['pretraining_tokens'] / 1e6:.1f} million tokens; mean ± standard deviation "
            "over seeds; difference with the 95 % interval of Welch's t-test; "
            f"{record['hardware']}, revision {record['revision']}.)\n"
        )

    return write


def attention_maps(record: Result) -> str:
    """The picture of attention maps, the models' losses, and how much their terms vary."""
    header = ("model", "validation loss", "c2c", "c2p", "p2c")
    rows = [
        (model["variant"], f"{model['loss']:.2f}",
         *("none" if value is None else f"{value:.2f}" for value in model["spread"].values()))
        for model in record["models"]
    ]  # fmt: skip
    names = ", ".join(model["variant"] for model in record["models"])
    image = f"![Attention maps of {names}](../benchmarks/results/cpu/attention_maps.png)\n\n"
    note = (
        f"\nTerms: standard deviation over the keys of a query, all layers and heads. Models of "
        f"{record['layers']} layers of {record['width']}, trained on {record['tokens'] / 1e6:.2f}M "
        f"tokens; unigram cross-entropy {record['models'][0]['unigram_loss']:.2f} nat.\n"
    )
    return image + markdown(header, rows) + note
