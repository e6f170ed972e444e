"""Export of low-rank adapters and the task's head in the file format of the package peft.

``peft.PeftModel.from_pretrained(base, folder)`` opens it on transformers' class of the model that
the run started from, with the same head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from megatron_deberta.checkpoint.reader import StoredRun
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.config import DTYPES, choose_model_type
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.heads import HEADS
from megatron_deberta.hf.names import hf_tensors
from megatron_deberta.model.low_rank import HEAD_PREFIXES, is_adapter

_PREFIX = "base_model.model."
"""Path of transformers' model in peft's."""


def peft_names(run: RunConfig, shapes: Iterable[str]) -> dict[str, str]:
    """Return peft's name of each parameter of the adapters and the head, by canonical name.

    Args:
        run: config of the run.
        shapes: canonical names of all parameters.

    Raises:
        ConfigError: transformers' class has no layers for the adapters.
    """
    config = run.model
    model_type, _ = choose_model_type(config)
    theirs = {
        entry.canonical_names[0]: entry.name
        for entry in hf_tensors(config, model_type)
        if len(entry.canonical_names) == 1
    }
    if not HEADS[config.head].kind:
        # The class is that of the encoder itself.
        theirs = {name: other.partition(".")[2] for name, other in theirs.items()}
    found = {}
    for name in shapes:
        if name.startswith(HEAD_PREFIXES):
            found[name] = _PREFIX + theirs[name]
        elif is_adapter(name):
            layer, _, factor = name.rpartition(".lora.")
            if layer + ".weight" not in theirs:
                raise ConfigError(
                    f"--to peft: finetune.lora_targets=[{','.join(run.finetune.lora_targets)}], "
                    "but query, key and value are one layer of transformers' DebertaModel; export "
                    "the merged model with --to hf"
                )
            stem = theirs[layer + ".weight"].removesuffix(".weight")
            found[name] = f"{_PREFIX}{stem}.lora_{factor}.weight"
    return found


def export_adapters(run: RunConfig, reader: StoredRun, output: Path, dtype: str) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        run: config of the run.
        reader: its checkpoint, adapters not merged.
        output: folder to create; must not exist, or be empty.
        dtype: fp32, fp16 or bf16.

    Raises:
        ConfigError: the run has no adapters, or transformers' class has no layers for them, or
            ``output`` is in use.
        CheckpointError: the folder cannot be written.
    """
    finetune = run.finetune
    if not finetune.lora_rank:
        raise ConfigError(
            f"--to peft: {reader.path} was trained without adapters (finetune.lora_rank=null); use "
            "--to hf"
        )
    names = peft_names(run, reader.shapes)
    layers, heads = set(), set()
    for name, theirs in names.items():
        path = theirs.removeprefix(_PREFIX)
        if is_adapter(name):
            layer = re.escape(path.rpartition(".lora_")[0])
            layers.add(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", layer))
        else:
            heads.add(path.removeprefix("roberta.").partition(".")[0])
    alpha = finetune.lora_alpha
    fields = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": finetune.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": "|".join(sorted(layers)),
        "modules_to_save": sorted(heads) or None,
    }
    with output_folder(output) as folder:
        tensors = {
            theirs: reader.tensor(name).to(DTYPES[dtype]).contiguous()
            for name, theirs in names.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(fields, indent=2) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
