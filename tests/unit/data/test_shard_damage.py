"""Damaged shards: each gives a typed error that names the file, and no signal."""

from pathlib import Path

from tests.faults.shard_damage import BIN_MUTATIONS, IDX_MUTATIONS, run_campaign


def test_every_mutation_is_noticed(tmp_path: Path) -> None:
    counts = run_campaign(tmp_path)
    assert sum(counts["idx"].values()) == IDX_MUTATIONS == 300
    assert sum(counts["bin"].values()) == BIN_MUTATIONS == 200
    assert not [name for found in counts.values() for name in found if name.endswith("nobody")]
    # What changes a size or the index is found by opening alone, without reading the tokens.
    for name in ("cut", "empty", "extend", "repeat"):
        assert f"{name}: verify" not in counts["bin"]
        assert f"{name}: verify" not in counts["idx"]
