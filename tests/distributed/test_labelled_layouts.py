"""Fine-tuning with dropout and SiFT has the same losses on every layout as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.config.schema import Head
from megatron_deberta.model.low_rank import is_adapter, is_trained
from tests.support.labelled_layouts import run_labelled
from tests.support.layout_matrix import Layout
from tests.support.ranks import RankPool
from tests.support.tolerances import LAYOUT_LOSS

SIFT = 5.0
TIMEOUT = 600.0
"""Maximum seconds of a run; three passes per step under ZeRO-3 take minutes on a busy machine."""
CASES: list[tuple[Head, Layout, float]] = [
    ("classification", Layout(2, 1, False, "none"), SIFT),
    ("spans", Layout(2, 2, True, "full"), 0.0),
    ("tokens", Layout(1, 2, False, "none"), SIFT),
    ("choices", Layout(2, 2, False, "selective"), 0.0),
    ("regression", Layout(2, 1, True, "none"), SIFT),
    ("embed", Layout(1, 3, False, "full"), 0.0),
    ("rerank", Layout(2, 2, False, "selective"), 0.0),
    ("multilabel", Layout(1, 2, False, "selective"), SIFT),
]
EMBED: tuple[Head, Layout, float] = ("embed", Layout(2, 2, True, "none"), 0.0)
ZERO3: tuple[Head, Layout, float] = ("classification", Layout(2, 3, True, "full"), SIFT)
MORE: list[tuple[Head, Layout, float]] = [
    ("classification", Layout(2, 1, False, "none"), SIFT),
    ZERO3,
    ("spans", Layout(2, 2, True, "full"), 0.0),
    ("spans", Layout(2, 3, False, "none"), SIFT),
    ("tokens", Layout(1, 3, False, "none"), SIFT),
    ("tokens", Layout(2, 2, True, "selective"), SIFT),
    ("choices", Layout(2, 3, False, "selective"), 0.0),
    ("choices", Layout(2, 1, True, "none"), SIFT),
    ("regression", Layout(4, 1, True, "none"), SIFT),
    ("regression", Layout(2, 2, False, "full"), 0.0),
    ("rerank", Layout(1, 3, False, "full"), SIFT),
    ("multilabel", Layout(2, 3, False, "selective"), SIFT),
]


def losses_of(ranks: RankPool, head: Head, layout: Layout, steps: int, **options: Any) -> Any:
    """Return the losses of each rank."""
    # Without accumulation where the loss compares the samples of a batch.
    parts = 1 if head == "embed" else 2
    options.setdefault("micro_batch", max(1, 8 // (4 // layout.tp_size) // parts))
    run = functools.partial(run_labelled, head=head, layout=layout, steps=steps, **options)
    return ranks.run(run, timeout=TIMEOUT)


def check(
    ranks: RankPool,
    head: Head,
    layout: Layout,
    steps: int,
    folders: tuple[str, str] = ("", ""),
    **options: Any,
) -> list[float]:
    """Compare with one process, whose losses are returned.

    ``folders``: run folders of the last checkpoints of one process and of the ranks.
    """
    alone, sharded = folders
    expected = run_labelled(0, head, None, steps, save_to=alone, **options)
    for losses in losses_of(ranks, head, layout, steps, save_to=sharded, **options):
        assert losses == pytest.approx(expected, rel=LAYOUT_LOSS)
    return expected


@pytest.mark.parametrize(
    ("head", "layout", "sift"),
    [
        *CASES[:3],
        EMBED,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (*CASES[3:], ZERO3)),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_agree(four_ranks: RankPool, head: Head, layout: Layout, sift: float) -> None:
    losses = check(four_ranks, head, layout, 2, sift=sift)
    assert len(losses) == 2 * (2 if sift else 1)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        pytest.param("tokens", Layout(2, 3, True, "none"), marks=pytest.mark.slow),
        ("spans", Layout(2, 1, True, "full")),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_of_packed_rows_agree(four_ranks: RankPool, head: Head, layout: Layout) -> None:
    check(four_ranks, head, layout, 2, pack_rows=True)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        ("multilabel", Layout(2, 2, True, "none")),
        pytest.param("tokens", Layout(1, 1, False, "none"), marks=pytest.mark.nightly),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_of_weighted_classes_agree(
    four_ranks: RankPool, head: Head, layout: Layout
) -> None:
    """The weights of a step's targets add up over its ranks and micro batches."""
    keys: dict[str, Any] = {"class_weights": ("0.1", "3", "0.02"), "focal_gamma": 1.5}
    losses = check(four_ranks, head, layout, 2, sift=SIFT, **keys)
    assert losses != pytest.approx(run_labelled(0, head, None, 2, sift=SIFT), rel=1e-2)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        ("classification", Layout(2, 3, True, "none")),
        pytest.param("spans", Layout(2, 1, False, "full"), marks=pytest.mark.nightly),
        pytest.param("tokens", Layout(1, 2, False, "selective"), marks=pytest.mark.nightly),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_of_adapters_agree(
    four_ranks: RankPool, head: Head, layout: Layout, tmp_path: Path
) -> None:
    """Losses of training adapters agree, and checkpoints have equal frozen weights, no moments.

    The gradient of a bias may be 0 but for rounding, which Adam enlarges.
    """
    alone, sharded = str(tmp_path / "alone"), str(tmp_path / "sharded")
    losses = check(four_ranks, head, layout, 3, (alone, sharded), lora_rank=2)
    assert losses != pytest.approx(run_labelled(0, head, None, 3), rel=1e-4)
    ours, theirs = (CheckpointReader(step_dir(folder, 3)) for folder in (alone, sharded))
    assert list(ours.shapes) == list(theirs.shapes)
    assert sum(map(is_adapter, ours.shapes)) == 2 * 2 * 6
    for name in ours.shapes:
        one, other = ours.tensor(name), theirs.tensor(name)
        moments = [reader.tensor(name, "exp_avg") for reader in (ours, theirs)]
        if is_trained(name, 2) and not name.endswith("bias"):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)
            assert moments[0].any()
        elif not is_trained(name, 2):
            assert one.equal(other)
            assert not any(moment.any() for moment in moments)
    stored = [load_file(path) for path in sorted(theirs.path.glob("part-*.safetensors"))]
    keys = {key for file in stored for key in file}
    assert "weight/encoder.layers.0.ffn.up.weight" in keys
    assert "exp_avg/encoder.layers.0.ffn.up.weight" not in keys
    assert "exp_avg/encoder.layers.0.ffn.up.lora.A" in keys
    # Either goes on from the checkpoint of the other.
    check(four_ranks, head, layout, 1, lora_rank=2, load_from=str(theirs.path))


@pytest.mark.parametrize(
    ("head", "stage"),
    [
        ("classification", 1),
        ("spans", 2),
        pytest.param("tokens", 3, marks=pytest.mark.slow),
        pytest.param("regression", 1, marks=pytest.mark.nightly),
    ],
)
def test_deepspeed_in_fp16(two_ranks: RankPool, head: Head, stage: int) -> None:
    options: dict[str, Any] = {"sift": SIFT, "dtype": "fp16"}
    expected = run_labelled(0, head, None, 2, **options)
    layout = Layout(1, stage, False, "none")
    for losses in losses_of(two_ranks, head, layout, 2, micro_batch=2, **options):
        assert losses == pytest.approx(expected, rel=1e-2, abs=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("head", "layout", "sift"), MORE, ids=lambda case: getattr(case, "name", case)
)
def test_layouts_agree_over_more_steps(
    four_ranks: RankPool, head: Head, layout: Layout, sift: float
) -> None:
    check(four_ranks, head, layout, 20, sift=sift)
