"""Fingerprints of all results that a refactoring must not change.

The program uses only the command line and files on disk, so it runs on any commit:

    python -m tests.golden.freeze --output after.json
    python -m tests.golden.freeze --compare before.json after.json

Fingerprints are losses and gradient norms (all bits), SHA-256 of shards, of checkpoint and export
tensors and of deduplication's output, and the values of ``plan --json``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXT, UNIGRAM, BYTE_LEVEL = HERE / "text.jsonl", HERE / "unigram.model", HERE / "byte_level.json"
TIMEOUT = 240.0
"""Maximum seconds of the ranks of a run."""
Json = dict[str, Any]

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": 600,
    "max_position_embeddings": 48, "max_relative_positions": 32,
}  # fmt: skip
COMMON: Json = {
    "tokenizer": {"path": str(UNIGRAM)},
    "optimizer": {"learning_rate": 1.0e-3, "warmup_steps": 3},
    "log": {"every": 1, "tensorboard": False},
}
LOG_BUCKETS = {"position_buckets": 8}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": "selective"}

RUNS: dict[str, Json] = {
    # Clipped linear distances, positions with their own projections.
    "v1": {"base": "v1_base.yaml", "steps": 20},
    # Log buckets, shared projections, convolution.
    "1.5b": {"base": "1.5b.yaml", "steps": 20, "model": LOG_BUCKETS},
    # Absolute positions at the input, no relative positions.
    "roberta": {"base": "roberta_base.yaml", "steps": 20, "model": LOG_BUCKETS},
    # Segment pairs, the plain engine, recomputation.
    "bert_plain": {
        "base": "bert_base.yaml",
        "model": LOG_BUCKETS,
        "steps": 5,
        "shard": "sentences_text_sentence",
        "parallel": {"recompute": "full"},
        "precision": {"engine": "plain"},
    },
    "1.5b_tp2": {
        "base": "1.5b.yaml",
        "steps": 5,
        "ranks": 2,
        "model": LOG_BUCKETS,
        "parallel": TENSOR_PARALLEL,
    },
    # ZeRO-2, packed documents with separate attention, Eq. 4 of the paper.
    "1.5b_dp2": {
        "base": "1.5b.yaml",
        "steps": 5,
        "ranks": 2,
        "model": LOG_BUCKETS | {"p2c_index": "paper"},
        "data": {"attend_across_documents": False},
        "precision": {"zero_stage": 2},
    },
}
PLANS = {"1.5b_dgx2": "dgx2", "1.5b_h100": "dgx_h100"}
EXPORTED = ("v1", "1.5b")


def command(*arguments: str) -> str:
    """Run a command of the package in this process; return its standard output."""
    from megatron_deberta.cli.main import main

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(list(arguments))
    if code != 0:
        raise SystemExit(f"{' '.join(arguments)}: exit {code}\n{errors.getvalue()[-4000:]}")
    return output.getvalue()


def ranks(count: int, log: Path, *arguments: str) -> None:
    """Run a command as several ranks connected by gloo, forked from a process with torch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "deepspeed"])
    processes = []
    for rank in range(count):
        values = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        values |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment = os.environ | {key: str(value) for key, value in values.items()}
        process = context.Process(target=run_rank, args=(dict(environment), log, arguments))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(code != 0 for code in codes):
        raise SystemExit(f"{' '.join(arguments)}: exit {codes}\n{log.read_text()[-4000:]}")


def run_rank(environment: dict[str, str], log: Path, arguments: tuple[str, ...]) -> None:
    """Run a command as a rank; ends the process."""
    with log.open("a") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(environment)
    code = 1
    try:
        from megatron_deberta.cli.main import main

        code = main(list(arguments))
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def environment() -> Json:
    """Return the versions and hardware on which bits depend."""
    import torch

    from megatron_deberta.ops.native.build import library

    kernels = library()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    keys = ("vendor_id", "cpu family", "model", "stepping")
    fields = dict(line.replace("\t", "").split(":", 1) for line in reversed(lines) if ":" in line)
    return {
        "processor": "/".join(fields.get(key, "").strip() for key in keys) or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "kernels": kernels and Path(kernels._name).stem,
    }


def shards(folder: Path) -> Json:
    """Return hashes of shards; runs train on the first or on the last."""
    kinds = {
        "unigram": ("--tokenizer", str(UNIGRAM)),
        "byte_level": ("--tokenizer", str(BYTE_LEVEL), "--normalize", "nfkc"),
        "sentences": ("--tokenizer", str(UNIGRAM), "--sentences", "en"),
    }
    found = {}
    for name, options in kinds.items():
        prefix = str(folder / name)
        inputs = ("--input", str(TEXT), "--output", prefix, "--workers", "0")
        command("preprocess", *inputs, *options)
        for suffix in (".bin", ".idx"):
            level = "sentence" if "--sentences" in options else "document"
            found[name + suffix] = sha256(Path(f"{prefix}_text_{level}{suffix}").read_bytes())
    return found


def deduplication(folder: Path) -> Json:
    """Return the kept documents of a text with planted duplicates, and the repetitions."""
    documents = [json.loads(line)["text"] for line in TEXT.read_text().splitlines()]
    planted = list(documents)
    for number, text in enumerate(documents):
        words = text.split(" ")
        if number % 3 == 0:
            planted.append(text.upper() if number % 2 else text)
        if number % 4 == 1:  # Every 29th word is changed.
            planted.append(" ".join("z" if i % 29 == 5 else word for i, word in enumerate(words)))
        if number % 5 == 2:
            planted.append(" ".join("z" if i % 7 == 3 else word for i, word in enumerate(words)))
    source = folder / "planted.jsonl"
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(planted)]
    source.write_text("\n".join(lines) + "\n")
    output = folder / "clean"
    command("deduplicate", "--input", str(source), "--output", str(output), "--workers", "0")
    summary = json.loads((output / "summary.json").read_text())
    parts = b"".join(path.read_bytes() for path in sorted(output.glob("part-*.jsonl")))
    removed = (output / "removed.jsonl").read_text().replace(str(folder), "")
    return {
        "documents": sha256(parts),
        "removed": sha256(removed.encode()),
        "clusters": sha256((output / "clusters.npy").read_bytes()),
        "counts": {key: summary[key] for key in ("documents", "kept", "removed")},
    }


def plan(name: str, cluster: str) -> Json:
    """Return numbers and one-word values of a plan; its sentences may change."""
    run = ROOT / "configs" / "runs" / f"{name}.yaml"
    values = json.loads(command("plan", str(run), "--cluster", cluster, "--json"))
    return {
        path: value
        for path, value in flatten(values)
        if not (isinstance(value, str) and " " in value)
    }


def pretrain(name: str, folder: Path) -> Json:
    """Train; return bits of the metrics and hashes of the final checkpoint."""
    settings = dict(RUNS[name])
    steps, count = settings.pop("steps"), settings.pop("ranks", 1)
    shard = settings.pop("shard", "unigram_text_document")
    run_dir = folder / "run"
    config: Json = COMMON | settings
    config["base"] = str(ROOT / "configs" / "models" / settings["base"])
    config["model"] = SIZES | settings.get("model", {})
    config["data"] = {"train": [str(folder.parent / shard)], "num_workers": 0}
    config["data"] |= {"sequence_length": 48, **settings.get("data", {})}
    config["train"] = {"run_dir": str(run_dir), "steps": steps, "device": "cpu", "eval_every": 0}
    config["train"] |= {"global_batch_size": 8, "micro_batch_size": 2}
    # The default when the golden file was written; now it is the plain engine for one process.
    config["precision"] = {"engine": "deepspeed", **settings.get("precision", {})}
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML.
    if count == 1:
        command("pretrain", str(path))
    else:
        ranks(count, folder / "log", "pretrain", str(path))
    checkpoint = run_dir / "checkpoints" / f"step_{steps:08d}"
    return {"metrics": metrics(run_dir), "checkpoint": checkpoint_contents(checkpoint)}


def metrics(run_dir: Path) -> Json:
    """Return the values of metrics records that do not depend on time, as bits."""
    keys = ("loss", "learning_rate", "grad_norm", "loss_scale", "unigram_loss", "masked_accuracy")
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in keys:
            if key in record:
                found[f"{record['kind']}.{record['step']:02d}.{key}"] = float(record[key]).hex()
    return found


def checkpoint_contents(checkpoint: Path) -> Json:
    metadata = json.loads((checkpoint / "manifest.json").read_text())["metadata"]
    keys = ("step", "consumed_samples", "tokenizer_fingerprint", "data_fingerprint", "scalars")
    found = {key: metadata[key] for key in keys}
    tensors: Json = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for key, value in tensor_contents(path).items():
            tensors[f"{path.stem}/{key}"] = value
    return found | {"tensors": tensors}


def tensor_contents(path: Path) -> Json:
    """Return shape and type, SHA-256, sum and absolute sum of each tensor."""
    import torch
    from safetensors.torch import load_file

    found: Json = {}
    for name, tensor in sorted(load_file(path).items()):
        data = tensor.contiguous().view(-1)
        wide = data.to(torch.float64)
        shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        digest = sha256(data.view(torch.uint8).numpy().tobytes())
        found[name] = [shape, digest, wide.sum().item(), wide.abs().sum().item()]
    return found


def export(run: Path, output: Path) -> Json:
    command("convert", "--checkpoint", str(run), "--to", "hf", "--output", str(output))
    return tensor_contents(output / "model.safetensors")


def freeze(runs: Sequence[str]) -> Json:
    """Return all fingerprints; only these runs are trained and exported."""
    found: Json = {"environment": environment(), "runs": {}, "exports": {}, "plans": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found["shards"] = shards(folder)
        found["deduplication"] = deduplication(folder)
        for name, cluster in PLANS.items():
            found["plans"][name] = plan(name, cluster)
        for name in runs:
            start = time.monotonic()
            (folder / name).mkdir()
            found["runs"][name] = pretrain(name, folder / name)
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
        for name in set(EXPORTED) & set(runs):
            found["exports"][name] = export(folder / name / "run", folder / name / "hf")
    return found


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of nested JSON by path."""
    if isinstance(value, dict):
        pairs: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in pairs:
        yield from flatten(inner, f"{path}/{key}" if path else str(key))


def compare(before: Json, after: Json, *, exact: bool) -> list[str]:
    """Describe differences.

    Args:
        before: fingerprints.
        after: fingerprints.
        exact: compare all bits; otherwise metrics within 1e-6 (relative) and tensors by their
            sums, within 1e-5 of the absolute sum.
    """
    old, new = (dict(flatten(_tensors_as_leaves(fingerprints))) for fingerprints in (before, after))
    differences = [f"{path}: only in the first" for path in old.keys() - new.keys()]
    differences += [f"{path}: only in the second" for path in new.keys() - old.keys()]
    for path in old.keys() & new.keys():
        if path.startswith("environment/"):
            continue
        if not _equal(path, old[path], new[path], exact):
            differences.append(f"{path}: {_plain(old[path])} != {_plain(new[path])}")
    return sorted(differences)


def _tensors_as_leaves(value: Any) -> Any:
    """Convert ``[shape, digest, sum, absolute sum]`` to a tuple, which is a leaf of ``flatten``."""
    if isinstance(value, dict):
        return {key: _tensors_as_leaves(inner) for key, inner in value.items()}
    if isinstance(value, list) and len(value) == 4 and isinstance(value[0], str):
        return tuple(value)
    return value


def _equal(path: str, old: Any, new: Any, exact: bool) -> bool:
    if path.startswith("plans/") and isinstance(old, float) and isinstance(new, (int, float)):
        return abs(old - new) <= 1e-9 * abs(old)
    if old == new:
        return True
    if exact:
        return False
    if isinstance(old, tuple):
        # Without position terms a key bias has no gradient: its values are rounding errors, 1e-10.
        tolerance = 1e-5 * old[3] + 1e-8
        sums = zip(old[2:], new[2:], strict=True)
        return bool(old[0] == new[0]) and all(abs(a - b) <= tolerance for a, b in sums)
    if "metrics/" in path:
        one, other = float.fromhex(old), float.fromhex(new)
        return abs(one - other) <= 1e-6 * abs(one)
    return False


def _plain(value: Any) -> str:
    """Add the decimal value to hexadecimal floats."""
    if isinstance(value, str) and "0x" in value:
        return f"{float.fromhex(value)!r} ({value})"
    return repr(value)


def main() -> int:
    """Write fingerprints, or compare two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="where to write the fingerprints as JSON")
    parser.add_argument(
        "--runs", nargs="*", choices=RUNS, default=list(RUNS), help="train only these"
    )
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="exit 1 if they differ"
    )
    parser.add_argument(
        "--tolerant", action="store_true", help="compare as if the processor were another"
    )
    args = parser.parse_args()
    if args.output:
        text = json.dumps(freeze(args.runs), indent=0, sort_keys=True)
        args.output.write_text(text + "\n")
    if args.compare:
        before, after = (json.loads(path.read_text()) for path in args.compare)
        differences = compare(before, after, exact=not args.tolerant)
        print("\n".join(differences) or "no difference")
        return bool(differences)
    return 0


if __name__ == "__main__":
    sys.exit(main())
