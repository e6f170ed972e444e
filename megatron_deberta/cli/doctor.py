"""Check the installation, or whether a run can start here.

Without RUN.yaml: Python, extras of the package, torch and the architectures it has kernels for,
compiler and headers for Triton, DeepSpeed, MPI, SLURM and disk space. With RUN.yaml: torch, the
compiler if the run needs one, the run folder and its free space, tokenizer, shards and the newest
checkpoint. With --cluster also the layout on that cluster and the SLURM partition. Run it where the
job will run. Exit code 2 if anything is wrong.

Examples:
  megatron-deberta doctor
  megatron-deberta doctor RUN.yaml train.run_dir=runs/base
  megatron-deberta doctor RUN.yaml --cluster dgx2 --nodes 16
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# What needs an extra of the package is imported where a run is checked.
from megatron_deberta.cli.arguments import add_run_arguments, add_shared
from megatron_deberta.cluster import installation
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE, ConfigError, MegatronDebertaError

if TYPE_CHECKING:
    from megatron_deberta.cluster.profile import ClusterProfile
    from megatron_deberta.config.schema import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser, required=False)
    add_shared(parser, "--cluster", help="cluster profile, such as dgx2, or a YAML file")
    add_shared(parser, "--nodes", "--allow-config-change")


def run(args: argparse.Namespace) -> int:
    """Run every check, whatever the others find."""
    if args.config is None:
        if args.cluster is not None:
            raise ConfigError("--cluster needs RUN.yaml: it checks whether that run fits")
        # Triton compiles for GPUs only.
        optional = {"extras", "MPI", "SLURM"}
        optional |= set() if shutil.which("nvidia-smi") else {"compiler"}
        # Without the extra, nothing here trains.
        optional |= {"DeepSpeed"} if installation.missing_packages("train") else set()
        return report(INSTALLATION, optional)
    return report(run_checks(args))


Checks = Sequence[tuple[str, Callable[[], str]]]
"""Names of checks, and functions that return what they found or raise."""

INSTALLATION: Checks = (
    ("Python", installation.check_python),
    ("extras", installation.check_extras),
    ("torch", installation.check_torch),
    ("compiler", installation.check_compiler),
    ("DeepSpeed", lambda: installation.check_package("deepspeed")),
    ("MPI", installation.check_mpi),
    ("SLURM", installation.check_slurm),
    ("disk", installation.check_disk),
)


def run_checks(args: argparse.Namespace) -> Checks:
    """Return the checks of a run, and with ``--cluster`` those of the cluster."""
    from megatron_deberta.cluster.profile import load_profile
    from megatron_deberta.config import load_config
    from megatron_deberta.train.vocab_size import with_vocab_size

    config = with_vocab_size(load_config(args.config, args.overrides))
    checks = [
        ("torch", installation.check_torch),
        *([("compiler", installation.check_compiler)] if compiles(config) else []),
        *file_checks(config, args.allow_config_change),
    ]
    if args.cluster is not None:
        profile = load_profile(args.cluster, trusted=True)
        nodes = (config.cluster.nodes or 0) if args.nodes is None else args.nodes
        checks += [
            ("cluster", lambda: check_cluster(config, profile, nodes)),
            ("SLURM", lambda: check_slurm(profile)),
        ]
    return checks


def file_checks(config: RunConfig, allow_change: bool) -> Checks:
    """Return the checks of run folder, space, tokenizer, data and checkpoint."""
    return (
        ("run folder", lambda: check_folder(Path(config.train.run_dir))),
        ("space", lambda: check_space(config)),
        ("tokenizer, data and resume", lambda: check_data(config, allow_change)),
    )


def file_problem(config: RunConfig, allow_change: bool = False) -> str:
    """Return the first thing that is wrong with a run's files, as ``submit`` reports it.

    Args:
        config: the run.
        allow_change: as for ``--allow-config-change``.

    Returns:
        The problem; empty: there is none.
    """
    from megatron_deberta.train.vocab_size import with_vocab_size

    try:
        for _, check in file_checks(with_vocab_size(config), allow_change):
            check()
    except (MegatronDebertaError, OSError) as error:
        return f"{error} (--no-check leaves this check out)"
    return ""


def compiles(config: RunConfig) -> bool:
    """Return whether the run compiles kernels on this machine."""
    import torch

    from megatron_deberta.ops.triton import can_fuse

    if config.parallel.fuse is True:
        return True
    on_gpu = config.train.device != "cpu" and torch.cuda.is_available()
    return on_gpu and can_fuse(torch.device("cuda"))


def report(checks: Checks, optional: Container[str] = ()) -> int:
    """Run checks, print one line per check, and return the exit code."""
    code = EXIT_DONE
    for name, check in checks:
        try:
            line = f"ok      {name}: {check()}"
        except (MegatronDebertaError, OSError) as error:
            if name in optional:
                line = f"missing {name}: {error}"
            else:
                line, code = f"WRONG   {name}: {error}", EXIT_USAGE
        print(line, flush=True)
    return code


def check_folder(folder: Path) -> str:
    """Can the run's folder be written, is it free, and does its clock agree with ours?

    Raises:
        ConfigError: another job trains there, or the clocks differ.
        OSError: it cannot be written.
    """
    from megatron_deberta.cluster.slurm.status import present_holder

    if holder := present_holder(folder):
        raise ConfigError(f"train.run_dir={folder} is in use by {holder}")
    existing = _existing(folder)
    installation.check_clock(existing)
    return f"{existing} can be written"


def check_space(config: RunConfig) -> str:
    """Check that there is disk space for one checkpoint more than is kept.

    Raises:
        ConfigError: there is not.
    """
    from megatron_deberta.checkpoint.layout import state_kinds
    from megatron_deberta.config import config_to_dict
    from megatron_deberta.model import count_parameters

    size = count_parameters(config.model) * 4 * len(state_kinds(config_to_dict(config)))
    free = shutil.disk_usage(_existing(Path(config.train.run_dir))).free
    text = f"{free / 2**30:,.1f} GiB free, a checkpoint takes {size / 2**30:,.1f}"
    if free < 1.2 * size:
        raise ConfigError(f"{text}; free some, or name another train.run_dir")
    return text


def check_data(config: RunConfig, allow_change: bool) -> str:
    """Do tokenizer, shards and the newest checkpoint belong together?

    Raises:
        MegatronDebertaError: no, and which two do not.
    """
    from megatron_deberta.checkpoint.reader import CheckpointReader
    from megatron_deberta.checkpoint.resume import Identity, check_resume
    from megatron_deberta.checkpoint.store import find_newest
    from megatron_deberta.data.build import parse_prefixes, validation_prefixes
    from megatron_deberta.data.dataset.corpus import open_shard
    from megatron_deberta.train.data import open_vocabulary
    from megatron_deberta.train.fingerprint import data_fingerprint

    if config.finetune.task:
        return check_task_data(config)
    path, tokenizer, vocabulary = open_vocabulary(config)
    components, _ = parse_prefixes(config.data.train, "data.train")
    prefixes = [*itertools.chain(*components), *validation_prefixes(config.data)]
    for prefix in prefixes:
        open_shard(prefix, vocabulary, False)
    newest = find_newest(config.train.run_dir)
    if newest is None:
        return f"{len(prefixes)} shards of {path}; no checkpoint yet"
    identity = Identity(path, tokenizer.fingerprint, data_fingerprint(config.data))
    check_resume(CheckpointReader(newest), config, identity, allow_change=allow_change)
    return f"{len(prefixes)} shards of {path}; goes on from {newest}"


def check_task_data(config: RunConfig) -> str:
    """Do task, model and files of a fine-tuning run belong together?

    Raises:
        MegatronDebertaError: no, and which file or key is wrong.
    """
    from megatron_deberta.evaluate.models import open_source_model
    from megatron_deberta.evaluate.splits import check_task
    from megatron_deberta.finetune.data import load_training_task
    from megatron_deberta.tasks.reading import read_examples
    from megatron_deberta.tasks.task import DEV, TRAIN
    from megatron_deberta.tokenizer import load_tokenizer

    task = load_training_task(config)
    check_task(config, task)
    tokenizer_path = config.tokenizer.path or ""
    load_tokenizer(tokenizer_path)
    sizes = [
        f"{len(read_examples(task, config.finetune.data or '', split)):,} {split} examples"
        for split in (TRAIN, DEV)
        if split in task.splits
    ]
    if config.checkpoint.load_from:
        open_source_model(Path(config.checkpoint.load_from), tokenizer_path)
    return f"task {task.name}, {', '.join(sizes)}"


def check_cluster(config: RunConfig, profile: ClusterProfile, nodes: int) -> str:
    """Check that the run fits the cluster, and that torch supports its devices.

    Args:
        config: the run.
        profile: the cluster.
        nodes: number of nodes.

    Returns:
        The number of nodes and ranks, as text.

    Raises:
        ConfigError: torch does not support the devices, or the run does not fit.
        TopologyError: the run does not fit.
    """
    from megatron_deberta.cli.submit import check_fit

    check_fit(config, profile, nodes)
    problem = installation.torch_problem(profile.gpu_architecture, profile.torch_builds)
    if problem and profile.container == "none" and not profile.python:
        raise ConfigError(problem)
    return f"{nodes} nodes x {profile.ranks_per_node} ranks"


def check_slurm(profile: ClusterProfile) -> str:
    """Check that SLURM answers and that the partition exists.

    Raises:
        ConfigError: there is no such partition.
        SlurmError: SLURM does not answer.
    """
    installation.check_slurm()
    partitions = slurm.call(["sinfo", "--noheader", "--format=%R"]).split()
    for name in profile.partition.split(",") if profile.partition else []:
        if name not in partitions:
            raise ConfigError(f"partition={name} is not among {', '.join(sorted(set(partitions)))}")
    return f"answers; partitions {', '.join(sorted(set(partitions)))}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
