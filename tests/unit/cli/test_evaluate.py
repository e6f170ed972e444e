"""What evaluate prints."""

from __future__ import annotations

from megatron_deberta.cli.evaluate import describe_metrics


def test_many_groups_are_a_range() -> None:
    few = {"loss": 0.5, "accuracy": 0.25, "accuracy_a": 0.0, "accuracy_b": 0.5}
    assert describe_metrics(few).splitlines() == [
        "loss                 0.5000", "accuracy             0.2500",
        "accuracy_a           0.0000", "accuracy_b           0.5000",
    ]  # fmt: skip
    many = {"accuracy": 0.5, **{f"accuracy_{number}": number / 200 for number in range(200)}}
    assert describe_metrics(many).splitlines() == [
        "accuracy             0.5000",
        "200 groups: from 0.0000 (0) to 0.9950 (199); --output FILE has all",
    ]
