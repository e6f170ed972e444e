"""Fine-tuning with dropout and SiFT has the same losses on every layout as in one process."""

from __future__ import annotations

from pathlib import Path

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
    ("multilabel", Layout(2, 3, False, "selective"), SIFT),
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
    ("multilabel", Layout(1, 2, False, "none"), SIFT),
]


def check(ranks: RankPool, head: Head, layout: Layout, sift: float, steps: int) -> None:
    # Without accumulation where the loss compares the samples of a batch.
    parts = 1 if head == "embed" else 2
    micro_batch = max(1, 8 // (4 // layout.tp_size) // parts)
    expected = run_labelled(0, head, None, steps, sift, 8)
    assert len(expected) == steps * (2 if sift else 1)
    found = ranks.run(run_labelled, head, layout, steps, sift, micro_batch, timeout=TIMEOUT)
    for losses in found:
        assert losses == pytest.approx(expected, rel=LAYOUT_LOSS)


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
    check(four_ranks, head, layout, sift, 2)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        pytest.param("tokens", Layout(2, 3, True, "none"), marks=pytest.mark.slow),
        ("spans", Layout(2, 1, True, "full")),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_of_packed_rows_agree(four_ranks: RankPool, head: Head, layout: Layout) -> None:
    packed = run_labelled(0, head, None, 2, 0.0, 8, pack_rows=True)
    for losses in four_ranks.run(run_labelled, head, layout, 2, 0.0, 2, "fp32", True):
        assert losses == pytest.approx(packed, rel=LAYOUT_LOSS)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        ("multilabel", Layout(2, 2, True, "none")),
        pytest.param("tokens", Layout(1, 1, False, "none"), marks=pytest.mark.slow),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts_of_weighted_classes_agree(
    four_ranks: RankPool, head: Head, layout: Layout
) -> None:
    """The weights of a step's targets add up over its ranks and micro batches."""
    keys = {"class_weights": ("0.1", "3", "0.02"), "focal_gamma": 1.5}
    expected = run_labelled(0, head, None, 2, SIFT, 8, **keys)
    assert expected != pytest.approx(run_labelled(0, head, None, 2, SIFT, 8), rel=1e-2)
    micro_batch = 8 // (4 // layout.tp_size) // 2
    found = four_ranks.run(
        run_labelled, head, layout, 2, SIFT, micro_batch, "fp32", False, *keys.values()
    )
    for losses in found:
        assert losses == pytest.approx(expected, rel=LAYOUT_LOSS)


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        ("classification", Layout(2, 3, True, "none")),
        pytest.param("spans", Layout(2, 1, False, "full"), marks=pytest.mark.slow),
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
    expected = run_labelled(0, head, None, 3, 0.0, 8, lora_rank=2, save_to=alone)
    assert expected != pytest.approx(run_labelled(0, head, None, 3, 0.0, 8), rel=1e-4)
    micro_batch = 8 // (4 // layout.tp_size) // 2
    arguments = (head, layout, 3, 0.0, micro_batch, "fp32", False, (), 0.0, 2, sharded)
    for losses in four_ranks.run(run_labelled, *arguments, timeout=TIMEOUT):
        assert losses == pytest.approx(expected, rel=LAYOUT_LOSS)
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
    path = str(theirs.path)
    expected = run_labelled(0, head, None, 1, 0.0, 8, lora_rank=2, load_from=path)
    arguments = (head, layout, 1, 0.0, micro_batch, "fp32", False, (), 0.0, 2, "", path)
    for losses in four_ranks.run(run_labelled, *arguments, timeout=TIMEOUT):
        assert losses == pytest.approx(expected, rel=LAYOUT_LOSS)


@pytest.mark.parametrize(
    ("head", "stage"),
    [
        ("classification", 1),
        ("spans", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("regression", 1), ("tokens", 3))
        ),
    ],
)
def test_deepspeed_in_fp16(two_ranks: RankPool, head: Head, stage: int) -> None:
    expected = run_labelled(0, head, None, 2, SIFT, 8, "fp16")
    layout = Layout(1, stage, False, "none")
    for losses in two_ranks.run(run_labelled, head, layout, 2, SIFT, 2, "fp16"):
        assert losses == pytest.approx(expected, rel=1e-2, abs=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("head", "layout", "sift"), MORE, ids=lambda case: getattr(case, "name", case)
)
def test_layouts_agree_over_more_steps(
    four_ranks: RankPool, head: Head, layout: Layout, sift: float
) -> None:
    check(four_ranks, head, layout, sift, 20)
