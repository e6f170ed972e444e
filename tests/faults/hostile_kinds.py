"""Kinds of files that ``tests.faults.hostile_files`` changes: how to write and how to read each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from megatron_deberta.checkpoint import layout
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.resume import changes
from megatron_deberta.cli.status import describe
from megatron_deberta.cluster import node_check, profile, run_lock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import BadNodes, JobHistory
from megatron_deberta.cluster.slurm.status import gather
from megatron_deberta.cluster.slurm.submit import JobSpec, make_spec
from megatron_deberta.cluster.watchdog.detection import Diagnosis, RankView
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat, read_beat
from megatron_deberta.cluster.watchdog.reports import NodeReport, ReportStore
from megatron_deberta.config import config_from_dict, load_config
from megatron_deberta.data.dataset import index_cache
from megatron_deberta.data.sample_log import SampleLog, check_sample_log
from megatron_deberta.data.shards.manifest import check_counts, read_manifest
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import printable
from megatron_deberta.hf.config import SpecialIds
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.published import open_release
from megatron_deberta.observe.metrics import MetricsWriter, terminal_loss_curve
from megatron_deberta.observe.progress import Section
from megatron_deberta.text.jobs.folder import JobFolder, plan_digest
from megatron_deberta.text.preprocess.worker import Chunk, read_record
from megatron_deberta.text.readers.checks import name_damaged
from megatron_deberta.text.readers.records import DAMAGED
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.train.stability import rollback
from tests.faults.shard_damage import make_shard
from tests.support.checkpoints import save_alone
from tests.support.tiny_models import V2, random_weights, tiny_tokenizer

Syntax = Literal["json", "lines", "yaml", "binary"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file.

    Attributes:
        name: of the kind.
        syntax: which values in it can be changed; ``binary``: bytes only.
        make: writes a valid file, and what is read with it, into an empty folder; returns its path.
        read: reads the file in the folder, in all the ways in which the package does.
    """

    name: str
    syntax: Syntax
    make: Callable[[Path], Path]
    read: Callable[[Path], object]


def _file(write: Callable[[Path], object], name: str) -> Callable[[Path], Path]:
    """Return the ``make`` of a kind: writes files into a folder, and returns one of them."""

    def make(folder: Path) -> Path:
        write(folder)
        return folder / name

    return make


_CONFIG = """\
model: {num_layers: 2, hidden_size: 64, num_heads: 2, ffn_hidden_size: 128, vocab_size: auto}
data: {train: [a, '0.5', b], sequence_length: 64, packing: full_sentences}
optimizer: {learning_rate: 0.001, warmup_steps: 10, beta1: 0.9}
cluster: {nodes: 2, bad_node_hours: 24.0}
train: {run_dir: runs/a, steps: 1000, exit_step: 0, global_batch_size: 8, micro_batch_size: 4}
"""


def _no_slurm(command: Any) -> str:
    if any("\0" in argument for argument in command):
        raise ValueError("embedded null byte")
    raise slurm.SlurmError(f"{command[0]} is not installed")


def make_run(folder: Path) -> None:
    """Write the records of a run under SLURM into a folder."""
    history = JobHistory(folder)
    history.append("submit", links=2, nodes=2)
    history.append("jobs", jobs=["7", "8"])
    history.start_attempt("7.0", "node[1-2]")
    slow = {"rank": 1, "host": "node2", "part": "data", "factor": 2.5, "lost_seconds": 0.1}
    history.append("slow", link="7.0", ranks=[slow])
    history.end_attempt("7.0", history.decide(75), 75)
    history.start_attempt("7.1", "node[1-2]")
    bad = BadNodes(folder, 24)
    bad.add("node3", "hangs", certain=True)
    metrics = MetricsWriter(folder, tensorboard=False)
    for step in range(1, 4):
        speed = {"tokens_per_second": 1e4, "seconds_left": 50.0}
        metrics.write(step, {"loss": 2.5 - step / 9, "learning_rate": 1e-4, **speed})
    metrics.write(3, {"loss": 2.0, "perplexity": 7.4}, kind="validation")
    metrics.write(3, {"skip": "loss spike"}, kind="guard")
    metrics.write(2, {"event": "rollback", "skipped": 1}, kind="guard")
    metrics.close()
    (folder / "lock").mkdir()
    holder = run_lock.Holder.this_process()
    (folder / "lock" / "00000003.json").write_bytes(holder.to_json())


def _make_run_with_config(folder: Path) -> None:
    """Reading the config takes most of the time of a status, so the other files do without."""
    make_run(folder)
    (folder / "config.yaml").write_text(_CONFIG)


def _status(folder: Path) -> None:
    with mock.patch.object(slurm, "call", _no_slurm):
        status = gather(folder)
    json.dumps(asdict(status))
    assert printable(describe(status)).replace("\n", "").isprintable()


def _history(folder: Path) -> None:
    _status(folder)
    JobHistory(folder).decide(1)


def _metrics(folder: Path) -> None:
    _status(folder)
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    try:
        terminal_loss_curve(path)
    finally:
        MetricsWriter(folder, resume_step=2, tensorboard=False).close()
        path.write_bytes(content)


def _lock(folder: Path) -> None:
    _status(folder)
    # A holder on another node, as some changed locks name it, is watched for so long.
    with mock.patch.object(run_lock, "SILENT_SECONDS", 0.1):
        run_lock.raise_if_locked(folder)


def _make_rollback(folder: Path) -> None:
    record = rollback.Rollback(5, 100, 8, 2, 1, 1)
    (folder / rollback.FILE_NAME).write_text(json.dumps(asdict(record)))


def _make_checkpoint(folder: Path) -> Path:
    return save_alone(folder, 3)


def _read_checkpoint(folder: Path) -> None:
    path = layout.step_dir(folder, 3)
    # Whoever changes the manifest can also change its hash.
    mark = layout.commit_mark((path / layout.MANIFEST_FILE).read_bytes())
    (path / layout.COMMITTED_FILE).write_bytes(mark)
    reader = CheckpointReader(path)
    for name in reader.shapes:
        for kind in reader.kinds:
            reader.tensor(name, kind)
    metadata = reader.metadata
    config = config_from_dict(metadata.config, str(path))
    changes(config, config)
    rollback.guard_state(reader)
    torch.tensor([metadata.step, metadata.consumed_samples])


def _make_best(folder: Path) -> None:
    layout.checkpoints_dir(folder).mkdir()
    layout.record_best(folder, 3, 0.5)


def _make_part_index(folder: Path) -> None:
    files = [layout.FileEntry("part-00000-0000.safetensors", 10, "0" * 64)]
    fragments = [layout.Fragment("head.bias", files[0].name, 0, 0, 10)]
    content = layout.part_index_json(files, fragments)
    (folder / layout.part_index_file(0)).write_bytes(content)


def _make_report(folder: Path) -> Path:
    view = RankView(0, 0, "node1", Section.STEP, 5, 17, 0.5, 100, "R", True, "in backward")
    hang = Diagnosis("hang", (0,), ("node1",), "rank 0 on node1 hangs")
    times = (10, 200, 300, 900)
    report = NodeReport(0, "node1", 3, (view,), (30.0,), (times,), "overdue", True, hang, 1)
    store = ReportStore(folder, "7.0")
    store.publish(report)
    return store.folder / "node_0.json"


def _read_report(folder: Path) -> None:
    store = ReportStore(folder, "7.0")
    store.read([0])
    store.diagnose(1)
    NodeReport.from_json((store.folder / "node_0.json").read_bytes())


def _make_check(folder: Path) -> Path:
    path = node_check.report_path(str(folder), "7.0", 0)
    path.parent.mkdir(parents=True)
    finding = {"check": "gpus", "ok": False, "text": "7 of 8 GPUs", "seconds": 1.5}
    path.write_text(json.dumps({"host": "node1", "findings": [finding]}))
    return path


def _make_job(folder: Path) -> None:
    spec = make_spec(
        profile.load_profile("local"), nodes=2, run_dir=folder.absolute(), job_name="run",
        submission=folder.absolute(), allow_config_change=False,
    )  # fmt: skip
    (folder / "job.json").write_bytes(spec.to_json())


def _make_sample_log(folder: Path) -> None:
    for step in range(1, 4):
        record = {"step": step, "rank": 0, "samples": [2 * step - 2, 2 * step - 1]}
        with (folder / "rank-00000.jsonl").open("a") as stream:
            stream.write(json.dumps(record) + "\n")


def _read_sample_log(folder: Path) -> None:
    path = folder / "rank-00000.jsonl"
    content = path.read_bytes()
    try:
        SampleLog(folder, 0, 1, 2).close()
    finally:
        path.write_bytes(content)
    check_sample_log(folder, 2, 3)


def _make_heartbeat(folder: Path) -> None:
    with Heartbeat(folder / "rank_0") as heartbeat:
        heartbeat.enter(Section.STEP, 3)
        heartbeat.mark()


def _make_shard(folder: Path) -> None:
    make_shard(str(folder / "shard"))


def _read_shard(folder: Path) -> None:
    shard = IndexedDataset(str(folder / "shard"))
    manifest = read_manifest(str(folder / "shard"))
    if manifest is not None:
        check_counts(shard, manifest)
    for index in (0, len(shard) - 1):
        shard.document(index).sum()


_DIGEST = "0" * 64


def _make_index(folder: Path) -> None:
    index_cache._write(folder, _DIGEST, iter([("lengths", np.arange(100))]))


@cache
def _byte_level_files() -> dict[str, str]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {
        "vocab_size": 300,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    backend.train_from_iterator(["a b c the the then"] * 9, trainers.BpeTrainer(**options))
    model = json.loads(backend.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": json.dumps(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n"}


def _make_byte_level(folder: Path) -> None:
    for file, content in _byte_level_files().items():
        (folder / file).write_text(content)


def _tokenizer_file(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tiny_tokenizer().save(str(folder))
        for other in ("tokenizer.json", "spm.model"):
            if name.endswith((".json", ".model")) and other != name and "config" not in name:
                (folder / other).unlink(missing_ok=True)
        return folder / name

    return make


def _read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    Vocabulary.of(tokenizer)


def _hf_file(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        weights = random_weights(V2)
        write_hf_model(folder, V2, "deberta-v2", lambda key: weights[key], SpecialIds())
        if name.endswith("index.json"):
            names = dict.fromkeys(weights, "model.safetensors")
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        return folder / name

    return make


def _read_hf(folder: Path) -> None:
    for _ in open_release(folder, None, folder / "scratch").tensors():
        pass


def _make_profile(folder: Path) -> None:
    text = (profile.PROFILES / "dgx2.yaml").read_text()
    extra = "container: pyxis\ncontainer_image: image\ncontainer_mounts: [/a:/b]\nexclude: n1\n"
    (folder / "cluster.yaml").write_text(text + extra)


def _make_config(folder: Path) -> None:
    (folder / "run.yaml").write_text(_CONFIG)


def _make_dataset(folder: Path) -> None:
    (folder / "data.arrow").write_bytes(b"")
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def _make_quarantine(folder: Path) -> None:
    entry = {"file": "a.jsonl", "line": 3, "offset": None, "reason": DAMAGED, "detail": "cut"}
    (folder / "bad.jsonl").write_text((json.dumps(entry) + "\n") * 3)


_PLAN = {"--input": [["a.jsonl", 1, 2]], "--keys": ["text"]}


def _begun(folder: Path) -> JobFolder:
    work = JobFolder(folder / "books")
    with work.locked():
        work.begin(_PLAN)
    return work


def _make_unit_record(folder: Path) -> Path:
    work = _begun(folder)
    record = {"last": True, "documents": 3, "text_bytes": 40, "file_bytes": 40, "reasons": {}}
    record |= {"sizes": [[9, 3, 3, 0]], "pieces": [[0, 0, 3]], "sha256": ["0", "0", ""]}
    work.record("00000000-000000", record)
    return work.done / "00000000-000000.json"


def _read_unit_record(folder: Path) -> None:
    work = JobFolder(folder / "books")
    work.open(plan_digest(_PLAN))
    read_record(work, Chunk(0, 0))


def _make_plan(folder: Path) -> Path:
    _make_unit_record(folder)
    return JobFolder(folder / "books").path / "plan.json"


def _read_plan(folder: Path) -> None:
    _begun(folder)


RUN_KINDS = (
    Kind("history", "lines", _file(make_run, "chain.jsonl"), _history),
    Kind("bad_nodes", "lines", _file(make_run, "bad_nodes.jsonl"), _status),
    Kind("metrics", "lines", _file(make_run, "metrics.jsonl"), _metrics),
    Kind("resolved_config", "yaml", _file(_make_run_with_config, "config.yaml"), _status),
    Kind("lock", "json", _file(make_run, "lock/00000003.json"), _lock),
    Kind(
        "rollback", "json", _file(_make_rollback, rollback.FILE_NAME),
        lambda folder: rollback._read(folder),
    ),
    Kind(
        "checkpoint_manifest", "json",
        lambda folder: _make_checkpoint(folder) / layout.MANIFEST_FILE, _read_checkpoint,
    ),
    Kind(
        "checkpoint_tensors", "binary",
        lambda folder: next(_make_checkpoint(folder).glob("*.safetensors")), _read_checkpoint,
    ),
    Kind(
        "checkpoint_index", "json", _file(_make_part_index, layout.part_index_file(0)),
        lambda folder: layout.read_part_index(folder / layout.part_index_file(0)),
    ),
    Kind("best", "json", _file(_make_best, layout.BEST_FILE), layout.find_best),
    Kind("node_report", "json", _make_report, _read_report),
    Kind(
        "node_check", "json", _make_check,
        lambda folder: node_check.failures(str(folder), "7.0", 1),
    ),
    Kind(
        "job", "json", _file(_make_job, "job.json"),
        lambda folder: JobSpec.read(folder / "job.json"),
    ),
    Kind("sample_log", "lines", _file(_make_sample_log, "rank-00000.jsonl"), _read_sample_log),
    Kind(
        "heartbeat", "binary", _file(_make_heartbeat, "rank_0"),
        lambda folder: read_beat(folder / "rank_0"),
    ),
    Kind("shard_manifest", "json", _file(_make_shard, "shard.manifest.json"), _read_shard),
    Kind("shard_index", "binary", _file(_make_shard, "shard.idx"), _read_shard),
    Kind(
        "index_cache", "json", _file(_make_index, "index.json"),
        lambda folder: index_cache._read(folder, _DIGEST),
    ),
    Kind("sentencepiece", "binary", _tokenizer_file("spm.model"), _read_tokenizer),
    Kind("tokenizer_json", "json", _tokenizer_file("tokenizer.json"), _read_tokenizer),
    Kind("tokenizer_config", "json", _tokenizer_file("tokenizer_config.json"), _read_tokenizer),
    Kind("vocabulary", "json", _file(_make_byte_level, "vocab.json"), _read_tokenizer),
    Kind("merges", "binary", _file(_make_byte_level, "merges.txt"), _read_tokenizer),
    Kind("hf_config", "json", _hf_file("config.json"), _read_hf),
    Kind("hf_index", "json", _hf_file("model.safetensors.index.json"), _read_hf),
    Kind("hf_weights", "binary", _hf_file("model.safetensors"), _read_hf),
    Kind(
        "cluster_profile", "yaml", _file(_make_profile, "cluster.yaml"),
        lambda folder: profile.load_profile(str(folder / "cluster.yaml"), trusted=True),
    ),
    Kind(
        "config", "yaml", _file(_make_config, "run.yaml"),
        lambda folder: load_config(folder / "run.yaml"),
    ),
    Kind(
        "dataset_state", "json", _file(_make_dataset, "state.json"),
        lambda folder: find_sources([str(folder)]),
    ),
    Kind(
        "quarantine", "lines", _file(_make_quarantine, "bad.jsonl"),
        lambda folder: name_damaged(folder / "bad.jsonl"),
    ),
    Kind("unit_record", "json", _make_unit_record, _read_unit_record),
    Kind("plan", "json", _make_plan, _read_plan),
)  # fmt: skip
