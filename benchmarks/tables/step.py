"""Tables of training-step benchmarks: other models, time by part, the 1.5B model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.step.launches import LAUNCHES
from benchmarks.step.parts import part_rows
from benchmarks.tables.common import UNMEASURED, Result, gib, markdown, place

TITLES = {
    "ours": "DeBERTa, ours",
    "huggingface": "transformers",
    "disentangled_flash": "transformers with DisentangledFlash",
    "modernbert": "ModernBERT-base",
    "roberta": "RoBERTa-base",
    "bert": "BERT-base",
    "plain_attention": "ours with plain flash attention",
}
PARTS = ("attention", "ffn", "head", "optimizer")
CLOCKS = ("seconds", "processor_seconds")


def summary(record: Result) -> str:
    """Speed-up and peak memory against transformers, for the README."""
    header = ("one pretraining step against `transformers`", "speed-up",
              "peak memory, GiB: ours / theirs")  # fmt: skip
    rows = record["results"]
    return markdown(
        header,
        [
            (case_title(row), f"{row['speedup']['huggingface']:.1f}x",
             f"{gib(row['sides']['ours']['peak_bytes'])} / "
             f"{gib(row['sides']['huggingface']['peak_bytes'])}")
            for row in rows
        ],
    ) + _caption(record, rows)  # fmt: skip


def comparison(record: Result) -> str:
    """Every model of each case, ours first, and what could not be measured."""
    header = ("case", "model", "parameters, M", "GFLOP per token", "s per step", "tokens/s", "MFU",
              "our speed / theirs", "target", "peak memory, GiB",
              "attention / FFN / head / optimizer, %")  # fmt: skip
    cells = []
    for row in record["results"]:
        first_other = next((name for name in row["sides"] if name != "ours"), "")
        for name, side in row["sides"].items():
            ratio = row["speedup"].get(name)
            aimed = f"{row['target']:.3g}" if row["target"] and name == first_other else ""
            cells.append((
                case_title(row) if name == "ours" else "", TITLES[name],
                _number(side, "parameters", "{:.0f}", 1e6),
                _number(side, "gflop_per_token", "{:.2f}"),
                f"{side['seconds']:.3g}", f"{side['tokens_per_second']:,.0f}",
                _number(side, "mfu", "{:.0%}"), f"{ratio:.2f}" if ratio else "", aimed,
                gib(side["peak_bytes"]), _shares(side.get("seconds_by_part", {})),
            ))  # fmt: skip
    notes = "".join(f"\nNot measured: {note}.\n" for note in sorted(_missing(record)))
    return markdown(header, cells) + _caption(record, record["results"]) + notes


def _missing(record: Result) -> set[str]:
    """Models and settings that could not be measured, with the reason."""
    found = set()
    for row in record["results"]:
        for name, reason in row.get("missing", {}).items():
            found.add(f"{TITLES[name]}: {reason}")
        for name, tried in row.get("attention_tried", {}).items():
            for variant, reason in tried.items():
                if isinstance(reason, str):
                    found.add(f"{TITLES[name]}, {variant}: {reason}")
    return found


def profile(record: Result) -> str:
    """Step time by part of the model."""
    table = markdown(
        ("part", "s per step", "share", "largest operators, s"), part_rows(dict(record))
    )
    return f"{table}\n{record['name']}.\n{place(record['provenance'])}"


def large_step(record: Result) -> str:
    """The 1.5B model's training step with DeepSpeed, from the GPU suite's part ``step``."""
    header = ("step", "tokens/s", "ms", "MFU", "micro batch",
              "peak memory, GiB: measured / by formula")  # fmt: skip
    rows = [
        (name, f"{item['tokens_per_second']:,.0f}", f"{1e3 * item['seconds_per_step']:,.0f}",
         f"{item['mfu']:.1%}", str(item["micro_batch_size"]),
         f"{item['peak_gib']:.1f} / {item['predicted_gib']:.1f}")
        for name, item in record["items"].items()
        if "tokens_per_second" in item
    ]  # fmt: skip
    return markdown(header, rows) + place(record)


def operators(record: Result) -> str:
    """Operators that one micro batch dispatches, now and at an older revision."""
    header = (
        "model", "revision", "per layer: forward, backward", "all layers and heads",
        "kernels, at most",
    )  # fmt: skip
    cells = []
    for name, now in record["models"].items():
        for side, title in ((record["before"]["models"][name], "before"), (now, "now")):
            layer = ", ".join(str(count) for count in side["by_layer"].values())
            total = sum(side["micro_batch"].values())
            # The last layer has two passes.
            passes = side["layers"] - 1 + 2
            further = sum(
                count * (LAUNCHES.get(operator, 1) - 1)
                for counts in side["operators"].values()
                for operator, count in counts.items()
            )
            cells.append((name, title, layer, f"{total:,}", f"{total + passes * further:,}"))
    revisions = [x["provenance"]["revision"] for x in (record["before"], record)]
    return markdown(header, cells) + f"\n(Revisions {revisions[0]} and {revisions[1]}.)\n"


def packed_rows(record: Result) -> str:
    """Forward and backward passes on packed rows against padded ones."""
    header = ("task, head, rows per batch", "batches", "tokens", "places: padded / packed",
              "s: padded / packed", "speed-up", "difference of losses")  # fmt: skip
    cells = []
    for task, found in record["tasks"].items():
        name = f"{task}, {found['head']}, {found['rows']}"
        for order in ("random rows", "rows of similar length"):
            row = found[order]
            times = (f"{statistics.median(row['seconds'][side]):.2f}" for side in row["places"])
            cells.append((
                name if order == "random rows" else "", order, f"{row['tokens']:,}",
                " / ".join(f"{count:,}" for count in row["places"].values()), " / ".join(times),
                f"{row['speedup']:.2f}x", f"{row['difference']:.0e}",
            ))  # fmt: skip
    layers = f"\n{record['layers']} layers of base width, dropout on.\n"
    return markdown(header, cells) + layers + place(record["provenance"])


REVISED_PARTS = {
    "step": "pretraining step, 4 layers, 128K pieces",
    "encoder": "encoder, 4 layers, rows of 512",
    "finetuning": "fine-tuning, SST-2",
    "fast_attention": "`Trainer` with `use_fast_attention`",
}


def revisions(record: Result) -> str:
    """Time and memory of this revision divided by those of an earlier one."""

    def with_quartiles(ratio: Result) -> str:
        return f"{ratio['median']:.3f} ({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f})"

    rows = [
        (REVISED_PARTS[row["name"]], row["before"], str(row["pairs"]),
         with_quartiles(row["seconds_ratio"]), with_quartiles(row["cpu_seconds_ratio"]),
         f"{row['memory_ratio']:.2f}")
        for row in record["results"]
    ]  # fmt: skip
    header = ("what", "before", "pairs", "time, now / before", "processor time", "peak memory")
    first = record["results"][0]
    note = f"\n(Medians and quartiles; revision {first['revision']}, one thread.)\n"
    return markdown(header, rows) + note + place(first)


def synchronizations(record: Result) -> str:
    """Waits for the device per optimizer step, now and at an older revision."""
    sides = ((record["before"], "before"), (record, "now"))
    rows = [
        (title, f"{side['per_step']:g}", ", ".join(f"{k} {v:g}" for k, v in _waits(side).items()),
         f"{sum(side['update_operators'].values())}")
        for side, title in sides
    ]  # fmt: skip
    revisions = [side["provenance"]["revision"] for side, _ in sides]
    header = ("revision", "waits per step", "of which", "operators of clipping and AdamW")
    return markdown(header, rows) + (
        "\nThe number of operators now does not grow with the model; before, two per parameter "
        "tensor did.\n"
        f"\n(DeepSpeed ZeRO-1, bf16, {record['micro_batches']} micro batches; revisions "
        f"{revisions[0]} and {revisions[1]}.)\n"
    )


def _waits(side: Result) -> dict[str, float]:
    """Waits by the function that waits."""
    found: dict[str, float] = {}
    for line, count in side["places"].items():
        name = f"`{line.split(' in ')[0]}`"
        found[name] = found.get(name, 0) + count
    return found


def predicted(record: Result) -> str:
    """Predicted time of a micro batch by kind of kernel."""
    header = ("model", "device", "kind of kernel", "kernels", "TFLOP", "GB", "ms", "share")
    cells = []
    for name, sides in record["models"].items():
        for side, found in sides.items():
            total = sum(kind["seconds"] for kind in found["kinds"].values())
            titles = [f"{name}, {found['rows']} rows", side]
            for kind, cost in found["kinds"].items():
                cells.append((
                    *titles, kind, f"{cost['kernels']:,.0f}", f"{cost['flops'] / 1e12:.2f}",
                    f"{cost['bytes'] / 1e9:.1f}", f"{1e3 * cost['seconds']:.2f}",
                    f"{cost['seconds'] / total:.0%}",
                ))  # fmt: skip
                titles = ["", ""]
            kernels = sum(kind["kernels"] for kind in found["kinds"].values())
            cells.append(("", "", "total", f"{kernels:,.0f}", "", "", f"{1e3 * total:.1f}", ""))
    rates = "; ".join(
        f"{side}: {rate['flops_per_second'] / 1e12:g} TFLOP/s, "
        f"{rate['bytes_per_second'] / 1e12:g} TB/s"
        for side, rate in record["devices"].items()
    )
    return markdown(header, cells) + f"\n({rates}.)\n"


def step_kernels(record: Result) -> str:
    """Resources of the compiled kernels outside of attention."""
    versions: dict[str, Any] = record["by_triton_version"]
    newest = max(versions, key=lambda version: tuple(map(int, version.split("."))))
    header = ("kernel", "registers: sm_80", "sm_90", "sm_100", "largest stack, bytes",
              "largest shared memory, bytes", "loads and stores below 8 bytes")  # fmt: skip
    by_kernel: dict[str, dict[str, Any]] = {}
    for name, variant in versions[newest].items():
        kernel, architecture, dtype, *width = name.split()
        by_kernel.setdefault(" ".join([kernel, dtype, *width]), {})[architecture] = variant
    rows = [
        (
            f"`{kernel}`",
            *(str(found[sm]["registers"]) for sm in ("sm_80", "sm_90", "sm_100")),
            *(
                str(max(variant[key] for variant in found.values()))
                for key in ("stack_bytes", "shared_bytes", "narrow_accesses")
            ),
        )
        for kernel, found in by_kernel.items()
        if "bf16" in kernel
    ]
    variants = len(versions[newest])
    return markdown(header, rows) + (
        f"\n(bfloat16; {variants} variants with fp16 and fp32 were compiled, Triton {newest}.)\n"
    )


FINETUNE_TITLES = {
    "ours": "ours",
    "ours_deepspeed": "ours, DeepSpeed",
    "group_by_length": "`Trainer`, `group_by_length`",
    "random": "`Trainer`, random rows",
}


def save_stalls(record: Result) -> str:
    """Stall per save by kind, and the same as a multiple of a synchronous save's."""
    medians = record["medians"]
    whole = medians["synchronous"]["stall_seconds"]
    cells = [
        (kind, f"{values['stall_seconds']:.3f}", f"{values['stall_seconds'] / whole:.2f}",
         f"{values['save_seconds']:.3f}")
        for kind, values in medians.items()
    ]  # fmt: skip
    header = ("save", "stall, s", "of a synchronous save's", "until it is finished, s")
    place = f"{record['hardware']}, {record['cores']} cores, load {record['load']}"
    layout = f"{record['parameters'] / 1e6:.1f} million parameters, {record['layout']}"
    return markdown(header, cells) + f"\n({layout}; {place}; revision {record['revision']}.)\n"


def denormals(record: Result) -> str:
    """Attention with denormal numbers kept and taken as zero."""
    header = ("standard deviation of scores", "denormal probabilities",
              "native: kept, ms", "zero, ms", "eager: kept, ms", "zero, ms")  # fmt: skip
    cells = [
        (f"{row['spread']}", f"{row['denormal_share']:.1%}",
         *(f"{1e3 * row[backend][name]:.1f}"
           for backend in ("native", "reference") for name in ("kept", "zero")))
        for row in record["results"]
    ]  # fmt: skip
    return (
        markdown(header, cells) + f"\n({record['hardware']}, one thread, load {record['load']}.)\n"
    )


def finetune(record: Result) -> str:
    """Fine-tuning steps against transformers' Trainer."""
    header = ("task", "side", "s per step", "our speed / theirs", "by processor time", "required",
              "goal", "tokens per batch", "padding per batch", "peak memory, GiB")  # fmt: skip
    cells = []
    for row in record["results"]:
        for name, side in row["sides"].items():
            ratios = [
                f"{row[key][name]:.2f}" if name in row[key] else ""
                for key in ("speedup", "cpu_speedup", "required", "goal")
            ]
            title = (
                f"{row['name']}, {row['layers']} layers, rows of {row['row_length']['mean']:.0f}"
            )
            cells.append((
                title if name == "ours" else "", FINETUNE_TITLES[name],
                f"{side['seconds_per_step']:.3g}", *ratios,
                f"{side['tokens_per_batch']:,.0f}", f"{side['padding_per_batch']:,.1f}",
                gib(side["peak_bytes"]),
            ))  # fmt: skip
    places = {
        f"{row['hardware']}, {row['cores']} cores, torch {row['torch']}, transformers "
        f"{row['transformers']}, threads: {row['threads']}, load {row['load']}"
        for row in record["results"]
    }
    return markdown(header, cells) + f"\n({'; '.join(sorted(places))}.)\n"


def replaced_tokens(record: Result) -> str:
    """A step of replaced-token detection against transformers' pair and each model alone."""
    titles = {
        "transformers": "two `DebertaV2Model`s of transformers",
        "both_alone": "generator alone + discriminator alone",
    }
    header = ("against", "speed / theirs", "by processor time", "required")
    rows = [
        (title, *(f"{record['ratios'][kind][name]:.2f}" for kind in CLOCKS),
         f"{record['targets'][name]:.2f}")
        for name, title in titles.items()
    ]  # fmt: skip
    return markdown(header, rows) + (
        f"\n({record['generator_layers']} and {record['layers']} layers of {record['width']}, "
        f"vocabulary {record['vocab']:,}, {record['tokens']:,} tokens in rows of "
        f"{record['length']}; {record['hardware']}, {record['threads']} thread, "
        f"load {record['load']}, torch {record['torch']}, transformers {record['transformers']}.)\n"
    )


ACCELERATE_TITLES = {
    "train_spread": "fine-tuning step, B8, real lengths up to 256",
    "train_full": "fine-tuning step, B4, full rows of 512",
    "infer_spread": "inference, B8, real lengths up to 256",
    "infer_full": "inference, B4, full rows of 512",
}


def accelerate(record: Result) -> str:
    """Models with fast attention against stock ones."""
    header = ("case", "speed / stock", "by processor time",
              "peak memory of the process, GiB: fast / stock")  # fmt: skip
    cells, profiles = [], ""
    for row in record["results"]:
        ratios = [f"{row[key]:.2f}" for key in ("speedup", "cpu_speedup")]
        peaks = [gib(row["sides"][side]["peak_bytes"]) for side in ("accelerated", "stock")]
        memory = f"{' / '.join(peaks)} ({100 * row['memory']:.0f} %)"
        cells.append((ACCELERATE_TITLES[row["name"]], *ratios, memory))
    for row in record["results"]:
        for side, seconds in row.get("profile", {}).items():
            largest = ", ".join(f"`{name}` {value:.2f}" for name, value in seconds.items())
            title = {"accelerated": "`use_fast_attention`"}.get(side, side)
            profiles += (
                f"\n{ACCELERATE_TITLES[row['name']]}, {title}, s by operator, "
                f"forward and backward: {largest}.\n"
            )
    places = {
        f"{row['hardware']}, {row['cores']} cores, torch {row['torch']}, "
        f"transformers {row['transformers']}, threads: {row['threads']}, {row['layers']} layers"
        for row in record["results"]
    }
    loads = [row["load"] for row in record["results"]]
    places.add(f"load of the machine, this benchmark included, {min(loads)} to {max(loads)}")
    return markdown(header, cells) + profiles + f"\n({'; '.join(sorted(places))}.)\n"


def published_models(record: Result, graphs: Result | None) -> str:
    """Models with fast attention and ONNX graphs against stock models, in short."""
    cells = [
        (f"`use_fast_attention`: {ACCELERATE_TITLES[row['name']]}", "torch",
         f"{row['speedup']:.1f}x", f"{100 * row['memory']:.0f} %")
        for row in record["results"]
    ]  # fmt: skip
    places = {f"{row['hardware']}, {row['threads']} threads" for row in record["results"]}
    found = [] if graphs is None else graphs["speed"]["results"]
    for row in found:
        if (row["graph"], row["dtype"]) != ("rows", "fp32"):
            continue
        places.add(f"ONNX: {graphs['speed']['provenance']['hardware']}, {row['threads']} thread")  # type: ignore[index]
        for case in row["cases"]:
            seconds = case["cpu_seconds"]
            for peer, title in (("transformers", "torch"), ("transformers_onnx", "its own ONNX")):
                cells.append((
                    f"ONNX export: inference, B{case['batch']}, rows of {case['length']}", title,
                    f"{seconds[peer] / seconds['onnx']:.1f}x", "",
                ))  # fmt: skip
    header = (
        "use of a DeBERTa-v3 of base width",
        "`transformers` in",
        "speed-up",
        "memory of theirs",
    )
    return (
        markdown(header, cells)
        + f"\n(4 layers; {'; '.join(sorted(places))}; ONNX by processor time.)\n"
    )


def _number(side: dict[str, Any], key: str, form: str, unit: float = 1.0) -> str:
    return form.format(side[key] / unit) if key in side else UNMEASURED


def _shares(seconds: dict[str, float]) -> str:
    """Percentages of the step time by part."""
    if not seconds:
        return UNMEASURED
    whole = sum(seconds.values())
    return " / ".join(f"{100 * seconds[name] / whole:.0f}" for name in PARTS)


def _caption(record: Result, rows: Iterable[dict[str, Any]]) -> str:
    """Hardware and versions of the measurements."""
    places = {f"{row['hardware']}, {row['cores']} cores, torch {row['torch']}" for row in rows}
    threads = f", {record['threads']} threads" if "+cpu" in "".join(places) else ""
    return f"\n({'; '.join(sorted(places))}{threads}; {record['tokens']:,} tokens per step.)\n"


def case_title(row: dict[str, Any]) -> str:
    """The name of a case with its sequence length."""
    length = f"N={row['length']}"
    name: str = row["name"]
    return name if length in name else f"{name}, {length}"
