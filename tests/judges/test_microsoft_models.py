"""Microsoft's package beside our models: states, logits, losses and all gradients.

The weights are random, written in the names and layouts of Microsoft's files (v1 and v2), and read
by our importer. 20 random architectures with padded rows, each with every head.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from benchmarks.judges.models import (
    CLASSES,
    NUM_ARCHITECTURES,
    TaskHead,
    compare_head,
    is_v1,
    random_fields,
)
from benchmarks.judges.shims import microsoft_package
from tests.support.judges import package_folder, record, version
from tests.support.selection import every

pytestmark = pytest.mark.slow

PACKAGE = "DeBERTa"
SEED = 20261126
LIMIT = 1e-5
OWN_HEADS = ("classification", "regression")
"""Heads of this package that are also ours; the others are put on our encoder."""


@pytest.fixture(scope="module", autouse=True)
def release() -> Iterator[str]:
    folder = package_folder(f"{PACKAGE}==0.1.12")
    with microsoft_package(folder):
        yield version(folder, PACKAGE)


@pytest.mark.parametrize("head", every(2, CLASSES, ["nightly"]))
def test_states_losses_and_gradients(head: TaskHead, release: str) -> None:
    draw = random.Random(SEED)
    worst = {"outputs": 0.0, "gradients": 0.0}
    counts = {"v1": 0, "convolution": 0, "buckets": 0, "positions at the input": 0}
    for number in range(NUM_ARCHITECTURES):
        fields = random_fields(draw, number)
        wide = number % 2 == 1
        found = compare_head(
            head,
            fields,
            SEED + number,
            dtype=torch.float64 if wide else torch.float32,
            backend="reference" if wide else "chunked",
            replace_encoder=head not in OWN_HEADS,
        )
        assert found.outputs < LIMIT, fields
        assert found.gradients < LIMIT, fields
        assert found.num_gradients > 15
        worst["outputs"] = max(worst["outputs"], found.outputs)
        worst["gradients"] = max(worst["gradients"], found.gradients)
        counts["v1"] += is_v1(fields)
        counts["convolution"] += fields.get("conv_kernel_size", 0) > 0
        counts["buckets"] += fields.get("position_buckets", -1) > 0
        counts["positions at the input"] += fields["position_biased_input"]
    assert min(counts.values()) >= 3, counts
    what = "states, logits, loss and all gradients"
    if head not in OWN_HEADS:
        what = "Microsoft's head on our encoder: states, logits, loss and all gradients"
    record(
        "Microsoft DeBERTa (package)",
        release,
        f"{head}, v1 and v2 architectures: {what}",
        f"outputs {worst['outputs']:.0e}, gradients {worst['gradients']:.0e}",
        f"{LIMIT:.0e}",
        NUM_ARCHITECTURES,
    )
