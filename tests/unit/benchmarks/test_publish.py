import json

from benchmarks.gpu.publish import publish

PLACE = {"hardware": "a chip", "cores": 4, "load": 1, "torch": "2", "revision": "r", "source": "s"}
STEP = {
    "tokens_per_second": 45000.0,
    "seconds_per_step": 0.364,
    "mfu": 0.52,
    "micro_batch_size": 32,
    "peak_gib": 61.0,
    "predicted_gib": 60.0,
    "seconds_by_part": {"FFN": 0.2, "host": 0.1},
    "breakdown": {"FFN": 0.67, "host": 0.33},
    "operators_by_part": {"FFN": {"aten::mm": 0.2}, "host": {}},
    "wrong": [],
}


def test_valid_results_are_published(tmp_path):
    found, results = tmp_path / "found", tmp_path / "results"
    found.mkdir()
    items = {
        "huggingface: base, N=512": {"name": "base, N=512", "tokens": 256, "wrong": []},
        "huggingface: base, N=128": {"wrong": ["losses differ"]},
        "peers: base, N=512": {"error": "out of memory"},
    }
    (found / "peers.json").write_text(json.dumps({**PLACE, "items": items}))
    steps = {"4k": {"error": "no"}, "16k": STEP}
    (found / "step.json").write_text(json.dumps({**PLACE, "items": steps}))

    written = publish(found, results)

    assert [path.name for path in written] == ["large_step.json", "profile.json", "step.json"]
    large, _, step = (json.loads(path.read_text()) for path in written)
    assert large["items"] == {"16k": STEP}
    assert (results / "profile.png").stat().st_size > 0
    assert step["tokens"] == 256
    (row,) = step["results"]
    assert row["name"] == "base, N=512"
    assert row["hardware"] == "a chip"
