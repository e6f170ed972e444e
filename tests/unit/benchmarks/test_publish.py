import json

from benchmarks.suite.publish import publish

PLACE = {"hardware": "a chip", "cores": 4, "torch": "2", "revision": "r", "source": "s"}


def test_what_is_right_is_published_in_the_form_of_the_tables(tmp_path):
    found, results = tmp_path / "found", tmp_path / "results"
    found.mkdir()
    items = {
        "huggingface: base, N=512": {"name": "base, N=512", "tokens": 256, "wrong": []},
        "huggingface: base, N=128": {"wrong": ["losses differ"]},
        "peers: base, N=512": {"error": "out of memory"},
    }
    (found / "peers.json").write_text(json.dumps({**PLACE, "items": items}))
    steps = {"16k": {"tokens_per_second": 1.0, "wrong": []}, "4k": {"error": "no"}}
    (found / "step.json").write_text(json.dumps({**PLACE, "items": steps}))

    written = publish(found, results)

    assert [path.name for path in written] == ["large_step.json", "step.json"]
    assert json.loads(written[0].read_text())["items"] == {"16k": steps["16k"]}
    step = json.loads(written[1].read_text())
    assert step["tokens"] == 256
    (row,) = step["results"]
    assert row["name"] == "base, N=512"
    assert row["hardware"] == "a chip"
