"""Runs of labelled tasks on gloo ranks, to be compared with one process."""

from __future__ import annotations

from typing import Any

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import load
from megatron_deberta.config.schema import Head, ParallelConfig, PrecisionConfig
from megatron_deberta.train.step import TrainStep
from tests.support.checkpoints import metadata, save_state
from tests.support.labelled import labelled_run, labelled_steps
from tests.support.layout_matrix import MODEL, Layout, build, groups_of


def run_labelled(
    rank: int,
    head: Head,
    layout: Layout | None,
    steps: int,
    *,
    micro_batch: int = 8,
    dtype: str = "fp32",
    pack_rows: bool = False,
    save_to: str = "",
    load_from: str = "",
    **options: Any,
) -> list[float]:
    """Return the losses of a run on this rank; ``layout`` None: one process.

    With dropout, unless rows are packed, where its bits depend on the rows side by side. It begins
    with the state of the checkpoint ``load_from`` and ends with a checkpoint in the run folder
    ``save_to``, unless these are empty. Further options are those of ``labelled_run``.
    """
    chosen = layout or Layout(1, 0, False, "none")
    groups = groups_of(layout)
    config = labelled_run(
        head,
        dropout=0.0 if pack_rows else 0.1,
        pack_rows=pack_rows,
        model=MODEL,
        parallel=ParallelConfig(
            engine="deepspeed" if layout else "plain",
            zero_stage=chosen.zero_stage,  # type: ignore[arg-type]
            tensor_parallel_size=chosen.tp_size,
            sequence_parallel=chosen.sequence_parallel,
            recompute=chosen.recompute,  # type: ignore[arg-type]
        ),
        precision=PrecisionConfig(
            dtype=dtype,  # type: ignore[arg-type]
            initial_loss_scale_power=10,
        ),
        micro_batch_size=micro_batch,
        **options,
    )
    model, engine = build(config, groups)
    if load_from:
        load(CheckpointReader(load_from), engine, model.specs)
    take_step = TrainStep(engine, config, groups)
    losses: list[float] = []
    batches: Any
    for step, batches in enumerate(labelled_steps(config, groups)):
        if step == steps:
            break
        result = take_step(step, batches)
        assert not result.outcome.skipped
        losses += [result.loss, *result.metrics.values()]
    if save_to:
        save_state(save_to, engine, model.specs, groups, metadata(steps, config))
    engine.destroy()
    return losses
