"""Set-up of a training process: device, determinism, data, model and throughput meter."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import Corpora, open_corpora, tokenizer_path
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.environment import RankEnvironment
from megatron_deberta.distributed.parallelize.build import ShardedModel, build_model
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError
from megatron_deberta.model.flops import recomputed_flops, training_flops_per_token
from megatron_deberta.observe.throughput import StepWork, ThroughputMeter, measure_matmul_rate
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.train.fingerprint import data_fingerprint
from megatron_deberta.train.start import Identity

# Values of ``precision.dtype`` as torch dtypes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunData:
    """Vocabulary, documents and their identity."""

    vocabulary: Vocabulary
    corpora: Corpora
    identity: Identity


def choose_device(config: RunConfig) -> torch.device:
    """Resolve ``train.device`` on this machine.

    Raises:
        ConfigError: ``train.device=cuda`` and CUDA is not available.
    """
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise ConfigError("train.device=cuda but CUDA is not available here; use auto or cpu")
    return torch.device("cuda" if available and config.train.device != "cpu" else "cpu")


def set_determinism(device: torch.device, environment: RankEnvironment) -> None:
    """Enable deterministic algorithms, and divide the cores of a node among its ranks on CPU.

    Call it before CUDA starts. On CPU, a nondeterministic operator is an error (tested: runs,
    resumes and kills repeat bit for bit). On CUDA it is a warning, because the set of such
    operators depends on the versions of torch and cuBLAS; bitwise repetition is not tested there.
    """
    on_gpu = device.type == "cuda"
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    # Filling every new tensor is for debugging reads of uninitialized memory; it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if on_gpu:
        # cuBLAS reads this at start-up; without it the order of its sums is not fixed.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif "OMP_NUM_THREADS" not in os.environ:
        # Every rank would use all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // environment.local_world_size))


def open_data(config: RunConfig, rank: int) -> RunData:
    """Open the tokenizer and the shards.

    Raises:
        ConfigError: the tokenizer has more tokens than ``model.vocab_size``.
        DataError: a shard is damaged or was made with another tokenizer.
    """
    path = tokenizer_path(config)
    tokenizer = load_tokenizer(path)
    vocabulary = Vocabulary.of(tokenizer)
    if vocabulary.size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {vocabulary.size} ids "
            f"of tokenizer.path={path}; set model.vocab_size={vocabulary.size}"
        )
    corpora = open_corpora(config, vocabulary, config.data.verify_hashes and rank == 0)
    identity = Identity(
        tokenizer_path=str(Path(path).resolve()),
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint=data_fingerprint(config.data),
    )
    return RunData(vocabulary, corpora, identity)


def build_rank_model(config: RunConfig, groups: ProcessGroups) -> ShardedModel:
    """Build this rank's shard of the initialized model in ``precision.dtype``.

    Parameters are partitioned over data-parallel ranks under ZeRO-3.
    """
    partition = None
    if config.precision.engine == "deepspeed" and config.precision.zero_stage == 3:
        # Imported here because importing DeepSpeed is slow and reads the environment.
        from megatron_deberta.engine.deepspeed_runtime import zero3_partition

        partition = functools.partial(zero3_partition, groups=groups, config=config)
    return build_model(config, groups, DTYPES[config.precision.dtype], partition=partition)


def build_meter(config: RunConfig, groups: ProcessGroups, first_step: int) -> ThroughputMeter:
    """Build the throughput meter; measures the matrix multiplication rate of this device."""
    rate = measure_matmul_rate(groups.device, DTYPES[config.precision.dtype])
    return ThroughputMeter(
        work=_step_work(config, config.data.sequence_length),
        matmul_rate=rate * groups.world_size,
        first_work=_step_work(config, config.data.short_sequence_length),
        first_steps=config.data.short_steps - first_step,
    )


def _step_work(config: RunConfig, length: int) -> StepWork:
    model, micro = config.model, config.train.micro_batch_size
    return StepWork(
        config.train.global_batch_size * length,
        training_flops_per_token(model, length, micro, config.objective.mask_probability),
        recomputed_flops(model, length, micro, config.parallel.recompute),
    )
