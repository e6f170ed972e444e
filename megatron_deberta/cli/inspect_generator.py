"""The generator of a run of replaced-token detection, for ``inspect data``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.loading import build_model, open_trained_model
from megatron_deberta.model import DropoutSeeds, ModelInputs
from megatron_deberta.objectives.rtd import draws
from megatron_deberta.tokenizer import Tokenizer

Integers = npt.NDArray[np.int64]
Generate = Callable[[Integers, Integers, int], Integers]


def open_generator(path: Path, tokenizer: Tokenizer) -> Generate:
    """Open a run or checkpoint.

    Args:
        path: the folder.
        tokenizer: of the samples.

    Returns:
        A function of masked tokens ``[N]``, positions ``[M]`` and the sample's index that returns
        drawn pieces ``[M]``. Their noise is that of training; there is no dropout, and attention
        crosses documents.

    Raises:
        CheckpointError: there is no model, or a damaged one.
        ConfigError: it has no generator, or another tokenizer.
    """
    trained = open_trained_model(path)
    run = trained.run
    if run.model.head != "rtd":
        raise ConfigError(
            f"--generator {path}: objective.name={run.objective.name} draws no pieces"
        )
    if trained.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"--generator {path} was trained with another tokenizer than the samples'"
        )
    model = build_model(*trained.open("generator"))

    @torch.no_grad()
    def generate(tokens: Integers, positions: Integers, sample: int) -> Integers:
        logits = model.logits(ModelInputs(torch.from_numpy(tokens)[None]))[0, positions]
        step = sample // run.train.global_batch_size
        keys = DropoutSeeds(run.train.seed, step, torch.tensor([sample]))
        draw = draws(keys, torch.from_numpy(positions)[None], run.rtd.excluded_ids)
        drawn: Integers = draw(logits)[1].numpy()
        return drawn

    return generate
