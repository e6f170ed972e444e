"""Published DeBERTa-v3 classifiers on one thread of a CPU: stock, accelerated, compiled, as ONNX.

``speed`` takes a model of a published size with random weights and measures, in turns on the same
full rows: transformers in torch, the same with ``use_fast_attention``, both with ``torch.compile``
(compilation apart), torch's own ONNX export, the graphs of ``convert --from hf --to onnx`` in three
formats, and a graph of the layers' matrix products alone, which no graph in fp32 can beat. First,
the logits of each are compared with stock's, on a batch with padding.
``decisions`` trains a small classifier on SST-2, writes the graphs with ``--texts``, and compares
decisions, accuracy and speed on the dev sentences.

A shape is kept when it is complete, and is not measured again by the same code on the same machine
with the same versions, so the command can be stopped and repeated:

    python -m benchmarks.step.published --data glue/SST-2
    python -m benchmarks.tables --write
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lib.measuring import in_turns, read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance, version
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.hf.onnx.check import Batch, graph_runner
from megatron_deberta.hf.onnx.graph import OnnxDtype
from megatron_deberta.hf.onnx.libraries import export_stock
from megatron_deberta.hf.onnx.published import GRAPH_FILES, export_published
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece

V3: dict[str, Any] = {
    "vocab_size": 128100, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "relative_attention": True,
    "max_relative_positions": -1, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0, "layer_norm_eps": 1e-7, "pooler_hidden_size": 768, "pad_token_id": 0,
}  # fmt: skip
"""Of ``microsoft/deberta-v3-base`` and ``-small``, which differ by the number of layers."""
LAYERS = {"base": 12, "small": 6}
SHAPES = ((1, 128), (1, 384), (8, 128), (8, 384))
"""Batch sizes and lengths."""
FORMATS: tuple[OnnxDtype, ...] = ("fp32", "fp16", "int8")
MAX_DIFFERENCE = 1e-4
"""Of logits in fp32 from stock's, relative to the largest one or 1."""
DECISIONS = V3 | {
    "vocab_size": 4001, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
    "pooler_hidden_size": 256, "num_hidden_layers": 3,
}  # fmt: skip
"""Of the classifier that is trained."""
EXPECTED_ACCURACY, EXPECTED_AGREEMENT = 0.75, 0.99
TRAIN_BATCH, BATCH, MAX_TOKENS = 64, 8, 128


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        rounds: most rounds per shape.
        seconds: after which no round beyond the third starts.
        epochs: of the classifier's training.
    """

    rounds: int = 7
    seconds: float = 90.0
    epochs: int = 3


def timed(work: Callable[[], object]) -> Callable[[], list[float]]:
    """Return a job that does the work and returns wall-clock and processor seconds."""

    def job() -> list[float]:
        clocks = time.perf_counter, time.process_time
        start = [clock() for clock in clocks]
        work()
        return [clock() - begin for clock, begin in zip(clocks, start, strict=True)]

    return job


def take_turns(
    jobs: dict[str, Callable[[], object]], budget: Budget
) -> dict[str, dict[str, float]]:
    """Return the median ``seconds`` and ``cpu_seconds`` of jobs that take turns."""
    medians = in_turns(
        {name: timed(work) for name, work in jobs.items()},
        least=3, most=budget.rounds, budget=budget.seconds,
    )  # fmt: skip
    return {
        key: {name: times[place] for name, times in medians.items()}
        for place, key in enumerate(("seconds", "cpu_seconds"))
    }


def logits_of(model: Any) -> Callable[[Batch], Tensor]:
    """Return the function from a batch to the logits of a model of transformers."""

    def run(batch: Batch) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**batch).logits
        return logits

    return run


def matrix_products(layers: int, hidden: int, intermediate: int) -> Callable[[Batch], Tensor]:
    """Return a graph of the products with weights alone, without attention, on one thread.

    They are the six of a layer, one after the other; of the last layer, of which a classifier reads
    one token, only keys and values. The values have unit variance, so that none is denormal.
    """
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime import InferenceSession, SessionOptions

    square = [(hidden, hidden)]
    shapes = (4 * square + [(hidden, intermediate), (intermediate, hidden)]) * (layers - 1)
    shapes += 2 * square
    generator = torch.Generator().manual_seed(0)
    nodes, weights = [], []
    for number, (rows, columns) in enumerate(shapes):
        weight = torch.randn(rows, columns, generator=generator) / rows**0.5
        weights.append(numpy_helper.from_array(weight.numpy(), f"w{number}"))
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"x{number + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", hidden])
        for name in ("x0", f"x{len(shapes)}")
    ]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(batch: Batch) -> Tensor:
        states = torch.ones(batch["input_ids"].numel(), hidden)
        (found,) = session.run(None, {"x0": states.numpy()})
        return torch.from_numpy(found)

    return run


class Variants:
    """The forms of one classifier, as functions from a batch to logits.

    Args:
        fields: of its config.
        sentences: text for its tokenizer.
        folder: for the model and the graphs.
        compiled: measure ``torch.compile``, too.
        pieces: of the tokenizer.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        sentences: Sequence[str],
        folder: Path,
        *,
        compiled: bool,
        pieces: int = 1000,
    ) -> None:
        torch.manual_seed(0)
        config = transformers.DebertaV2Config(**fields)
        self.vocabulary = config.vocab_size
        self.stock = transformers.DebertaV2ForSequenceClassification(config).eval()
        self.fast = deepcopy(self.stock)
        use_fast_attention(self.fast)
        self.compiled = compiled
        self.skipped: dict[str, str] = {}
        self._graphs: dict[str, Callable[[Batch], Tensor]] = {}
        self._products = matrix_products(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size
        )
        train_sentencepiece(sentences, str(folder / "published"), vocab_size=pieces)
        self.stock.save_pretrained(folder / "published")
        export_published(folder / "published", folder / "onnx", dtypes=FORMATS, timing=False)
        for dtype in FORMATS:
            self._graphs[f"onnx_{dtype}"] = graph_runner(
                folder / "onnx" / "onnx" / GRAPH_FILES[dtype], "rows", 1
            )
        try:
            export_stock(self.stock, self.batch(2, 16), folder / "stock.onnx")
            self._graphs["torch_onnx"] = graph_runner(folder / "stock.onnx", "rows", 1)
        except ConfigError as error:
            self.skipped["torch_onnx"] = str(error)

    def batch(self, rows: int, length: int, *, padded: bool = False) -> Batch:
        """Return random tokens ``[rows, length]``; with padding, later rows are shorter."""
        generator = torch.Generator().manual_seed(rows * length)
        ids = torch.randint(5, self.vocabulary, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(rows if padded else 0):
            mask[row, length - row * length // (2 * rows) :] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}

    def measure(self, rows: int, length: int, budget: Budget) -> dict[str, Any]:
        """Compare and time all forms at one shape.

        Raises:
            SystemExit: the logits of a form in fp32 differ from stock's.
        """
        batch, padded = self.batch(rows, length), self.batch(max(2, rows), length, padded=True)
        sides = {"stock": logits_of(self.stock), "fast": logits_of(self.fast), **self._graphs}
        expected = sides["stock"](padded)
        scale = max(1.0, float(expected.abs().max()))
        difference = {
            name: float((run(padded) - expected).abs().max()) / scale for name, run in sides.items()
        }
        compile_seconds, skipped = {}, dict(self.skipped)
        for name, model in (("stock", self.stock), ("fast", self.fast)) if self.compiled else ():
            key = f"{name}_compiled"
            compiled = logits_of(torch.compile(model, dynamic=False))
            own = timed(lambda run=compiled: run(batch))  # type: ignore[misc]
            try:
                compile_seconds[key] = own()[0]
                found = compiled(batch)
            except Exception as error:  # whatever the compiler meets in a model
                skipped[key] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                continue
            sides[key] = compiled
            whole = sides["stock"](batch)
            difference[key] = float((found - whole).abs().max() / whole.abs().max().clamp(min=1))
        wrong = {
            name: value for name, value in difference.items()
            if not value <= MAX_DIFFERENCE and name not in ("onnx_fp16", "onnx_int8")
        }  # fmt: skip
        if wrong:
            raise SystemExit(f"{rows} x {length}: logits differ from stock's: {wrong}")
        sides["products"] = self._products
        jobs = {name: lambda run=run: run(batch) for name, run in sides.items()}  # type: ignore[misc]
        times = take_turns(jobs, budget)  # type: ignore[arg-type]
        torch.compiler.reset()  # the next shape is not one more variant of the same function
        return {
            "batch": rows, "length": length, **times, "difference": difference,
            "compile_seconds": compile_seconds, "skipped": skipped,
        }  # fmt: skip


def read_split(path: Path) -> tuple[list[str], list[int]]:
    """Return sentences and labels of a file of SST-2."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"].strip() for row in rows], [int(row["label"]) for row in rows]


def train(
    tokenizer: Tokenizer, sentences: Sequence[str], labels: Sequence[int],
    fields: dict[str, Any], epochs: int,
) -> Any:  # fmt: skip
    """Train a classifier from random weights, accelerated, and return it as transformers' own."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**fields)
    model = transformers.DebertaV2ForSequenceClassification(config).train()
    rows = [
        torch.tensor(
            [tokenizer.cls_id, *tokenizer.encode(text)[: MAX_TOKENS - 2], tokenizer.sep_id]
        )
        for text in sentences
    ]
    # Batches of similar length have little padding.
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    batches = [order[start : start + TRAIN_BATCH] for start in range(0, len(order), TRAIN_BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    steps = epochs * len(batches)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    targets = torch.tensor(labels)
    with use_fast_attention(model):
        for _ in range(epochs):
            for number in torch.randperm(len(batches)).tolist():
                chosen = batches[number]
                ids = torch.nn.utils.rnn.pad_sequence(
                    [rows[row] for row in chosen], True, tokenizer.pad_id
                )
                mask = (ids != tokenizer.pad_id).long()
                logits = model(input_ids=ids, attention_mask=mask).logits
                F.cross_entropy(logits, targets[chosen]).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return model.eval()


def decisions(data: Path, fields: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Train a classifier and compare the decisions of its forms on the dev sentences."""
    start = time.process_time()
    sentences, labels = read_split(data / "train.tsv")
    texts, expected = read_split(data / "dev.tsv")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = folder / "published"
        pieces = fields["vocab_size"] - 1
        tokenizer = train_sentencepiece(sentences[:20000], str(source), vocab_size=pieces)
        model = train(tokenizer, sentences, labels, fields, budget.epochs)
        model.save_pretrained(source)
        export = export_published(
            source, folder / "onnx", dtypes=FORMATS, texts=texts, timing=False
        )
        own = transformers.AutoTokenizer.from_pretrained(folder / "onnx")
        batches = [
            dict(own(texts[i : i + BATCH], padding=True, truncation=True, max_length=MAX_TOKENS,
                     return_tensors="pt", return_token_type_ids=False))
            for i in range(0, len(texts), BATCH)
        ]  # fmt: skip
        fast = deepcopy(model)
        use_fast_attention(fast)
        files = {dtype: folder / "onnx" / "onnx" / GRAPH_FILES[dtype] for dtype in FORMATS}
        sides = {"stock": logits_of(model), "fast": logits_of(fast)} | {
            f"onnx_{dtype}": graph_runner(path, "rows", 1) for dtype, path in files.items()
        }
        found = {
            name: torch.cat([run(batch) for batch in batches]).argmax(-1)
            for name, run in sides.items()
        }
        jobs = {
            name: lambda run=run: [run(batch) for batch in batches]  # type: ignore[misc]
            for name, run in sides.items()
        }
        times = take_turns(jobs, budget)  # type: ignore[arg-type]
        answers = torch.tensor(expected)
        report = export.reports["int8"].agreement
        return {
            "model": {key: fields[key] for key in ("num_hidden_layers", "hidden_size")},
            "sentences": len(texts),
            "accuracy": {
                name: float((own == answers).float().mean()) for name, own in found.items()
            },
            "same_as_fp32": {name: int((own == found["onnx_fp32"]).sum()) for name, own in
                             found.items()},
            "bytes": {f"onnx_{dtype}": path.stat().st_size for dtype, path in files.items()},
            "report": asdict(report) if report else None,
            **times,
            "processor_seconds": time.process_time() - start,
        }  # fmt: skip


def measure_speed(args: argparse.Namespace, record: dict[str, Any], where: dict[str, Any]) -> None:
    """Measure the shapes that are missing in the record."""
    layers = LAYERS[args.size]
    keep = ("size", "layers", "compiled")
    settings = {"size": args.size, "layers": layers, "compiled": not args.no_compile}
    same = ("hardware", "torch", "transformers", "onnxruntime", "source")
    rows = {
        (row["batch"], row["length"]): row for row in record.get("speed", [])
        if all(row[key] == settings[key] for key in keep)
        and all(row["provenance"][key] == where[key] for key in same)
    }  # fmt: skip
    left = [shape for shape in SHAPES if args.again or shape not in rows]
    if not left:
        print("all shapes are measured; --again repeats them")
        return
    sentences, _ = read_split(args.data / "train.tsv")
    with TemporaryDirectory() as folder:
        variants = Variants(
            V3 | {"num_hidden_layers": layers}, sentences[:20000], Path(folder),
            compiled=not args.no_compile,
        )  # fmt: skip
        for shape in left:
            row = variants.measure(*shape, Budget(args.rounds, args.seconds))
            rows[shape] = settings | row | {"provenance": describe()}
            record["speed"] = [rows[each] for each in SHAPES if each in rows]
            write_json(args.output, record)
            stock = row["cpu_seconds"]["stock"]
            ratios = {name: f"{stock / own:.2f}" for name, own in row["cpu_seconds"].items()}
            print(*shape, ratios, row["compile_seconds"], row["skipped"], flush=True)


def describe() -> dict[str, Any]:
    """Return hardware, versions and revision."""
    return provenance() | {name: version(name) for name in ("onnxruntime", "onnx")}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["speed", "decisions", "all"], default="all")
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2's files")
    parser.add_argument("--size", choices=LAYERS, default="base", help="shape of the v3 model")
    parser.add_argument("--rounds", type=int, default=Budget.rounds, help="most rounds per shape")
    parser.add_argument("--seconds", type=float, default=Budget.seconds, help="per shape")
    parser.add_argument("--epochs", type=int, default=Budget.epochs, help="of decisions")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--again", action="store_true", help="repeat shapes that are measured")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/cpu/published.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = read_json(args.output, {})
    if args.part != "decisions":
        measure_speed(args, record, describe())
    if args.part != "speed":
        found = decisions(args.data, DECISIONS, Budget(args.rounds, args.seconds, args.epochs))
        record["decisions"] = found | {"provenance": describe()}
        write_json(args.output, record)
        print(found)
        share = found["same_as_fp32"]["onnx_int8"] / found["sentences"]
        if share < EXPECTED_AGREEMENT or found["accuracy"]["onnx_fp32"] < EXPECTED_ACCURACY:
            raise SystemExit("int8's decisions or the accuracy are below what is expected")


if __name__ == "__main__":
    main()
