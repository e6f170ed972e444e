"""The command ``attention``: selection, errors, picture and page."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.attention_maps import drawing
from megatron_deberta.attention_maps.compute import PARTS, TextMaps, compute_maps
from megatron_deberta.attention_maps.drawing import draw
from megatron_deberta.cli.main import main
from megatron_deberta.config.schema import with_task_head
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.config import SpecialIds
from megatron_deberta.hf.export_model import write_hf_model
from tests.support.releases import write_release
from tests.support.tiny_models import V2, random_weights, reader
from tests.support.tiny_runs import save_run

TEXT = "The $quick$ fox & </script> the dog."
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PROBE = """<script>
const canvas = document.querySelector("canvas"), frame = canvas.getBoundingClientRect();
const side = (frame.width - 1) / data.models[0].size / 2;
$("layer").value = "1"; $("head").value = "2"; $("part").value = "c2p"; render();
const chosen = document.querySelectorAll("figure");
const target = chosen[0].querySelector("canvas"), place = target.getBoundingClientRect();
target.dispatchEvent(new PointerEvent("pointermove", {
  clientX: place.right - 4, clientY: place.bottom - 4, bubbles: true,
}));
const seen = { figures: chosen.length, cell: $("cell").innerText, hidden: $("cell").hidden,
  captions: [...chosen].map((figure) => figure.innerText) };
document.documentElement.replaceChildren(document.createElement("pre"));
document.querySelector("pre").textContent = JSON.stringify(seen);
</script></body>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of DeBERTa, of a deeper one without c2p, and of RoBERTa's kind."""
    folder = tmp_path_factory.mktemp("attention")
    configs = {
        "deberta": V2,
        "no-c2p": replace(V2, position_terms="p2c", num_layers=4, num_heads=2),
        "roberta": replace(
            V2, position_terms="none", absolute_positions="input", mask_decoder_passes=0
        ),
        "unlimited": replace(V2, absolute_positions="none"),
    }
    for name, config in configs.items():
        save_run(config, folder / name, folder / "tokenizer")
    return folder


def page_maps(content: str) -> list[TextMaps]:
    """Read the maps that a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content)
    assert found is not None
    maps = []
    for model in json.loads(found[1])["models"]:
        size, heads = len(model["pieces"]), tuple(model["heads"])
        shape = (len(model["layers"]), len(heads), len(model["parts"]), size, size)
        values = np.frombuffer(base64.b64decode(model["values"]), "<f4").reshape(shape)
        pieces, layers, parts = (tuple(model[key]) for key in ("pieces", "layers", "parts"))
        maps.append(
            TextMaps(model["name"], pieces, model["num_layers"], layers, heads, parts, values)
        )
    return maps


def test_page_holds_all_maps_of_all_models(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "maps.html"
    names = ["deberta", "no-c2p", "roberta"]
    models = [str(runs / name) for name in names]
    assert main(["attention", *models, TEXT, "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: ")
    content = output.read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|https?:|url\(", content)
    maps = page_maps(content)
    assert [each.name for each in maps] == names
    assert [each.parts for each in maps] == [PARTS, ("probabilities", "c2c", "p2c"), PARTS[:2]]
    assert [each.layers[-1] for each in maps] == [3, 4, 3]
    for each, model in zip(maps, models, strict=True):
        expected = compute_maps(Path(model), TEXT, "all", "all")
        assert each.pieces == expected.pieces
        np.testing.assert_array_equal(each.values, expected.values)
        np.testing.assert_allclose(each.values[:, :, 0].sum(-1), 1, atol=1e-5)
        scores = each.values[:, 1:, 1:].astype(np.float64).sum(2)
        softmax = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(softmax, each.values[:, 1:, 0], atol=1e-5)


def test_picture_has_a_row_for_each_model_layer_and_head(runs: Path, tmp_path: Path) -> None:
    heights = []
    for heads in ("1", "mean,1,2"):
        output = tmp_path / "maps.png"
        models = [str(runs / name) for name in ("deberta", "roberta")]
        options = ["--heads", heads, "--layers", "-1", "--output", str(output)]
        assert main(["attention", *models, TEXT, *options]) == 0
        content = output.read_bytes()
        assert content.startswith(b"\x89PNG")
        heights.append(struct.unpack(">II", content[16:24])[1])
    assert abs(heights[1] - 3 * heights[0]) < 3


def test_rows_of_a_picture_are_limited(runs: Path) -> None:
    maps = compute_maps(runs / "deberta", TEXT, "all", "all")
    with pytest.raises(ConfigError, match=r"60 rows .*choose fewer --layers or --heads"):
        draw([maps] * 4)


def test_size_of_a_page_is_limited(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MAX_BYTES", 1 << 10)
    with pytest.raises(ConfigError, match="choose fewer --layers or --heads"):
        drawing.write_page([compute_maps(runs / "deberta", TEXT)], TEXT)


def test_layers_and_heads_are_chosen_by_number(runs: Path) -> None:
    every = compute_maps(runs / "deberta", TEXT, "all", "all")
    some = compute_maps(runs / "deberta", TEXT, "-2, 1,last,3", "3,mean")
    assert (some.layers, some.heads) == ((2, 1, 3), (3, "mean"))
    np.testing.assert_array_equal(some.values, every.values[[1, 0, 2]][:, [3, 0]])
    usual = compute_maps(runs / "deberta", TEXT)
    assert (usual.layers, usual.heads) == ((3,), ("mean",))


def test_other_kinds_of_models(tmp_path: Path) -> None:
    """Autoregressive, replaced-token detection, fine-tuned, published."""
    configs = {
        "causal": replace(
            V2, head="autoregressive", mask_decoder_passes=0, absolute_positions="none"
        ),
        "rtd": replace(V2, head="rtd", embedding_sharing="gdes", generator_layers=2),
    }
    for name, config in configs.items():
        save_run(config, tmp_path / name, tmp_path / "tokenizer")
        values = compute_maps(tmp_path / name, TEXT).values[0, 0, 0]
        np.testing.assert_allclose(values.sum(-1), 1, atol=1e-5)
        assert (np.triu(values, 1).max() == 0) == (name == "causal")
    task = with_task_head(V2, "classification", ("no", "yes"))
    (tmp_path / "task").mkdir()
    write_hf_model(
        tmp_path / "task", task, "deberta-v2", reader(random_weights(task)), SpecialIds()
    )
    values = compute_maps(
        tmp_path / "task", TEXT, tokenizer_path=str(tmp_path / "tokenizer")
    ).values
    np.testing.assert_allclose(values[0, 0, 0].sum(-1), 1, atol=1e-5)
    write_release(tmp_path / "v3", "v3", generator=False)
    with pytest.raises(Exception, match="pickled weights; import them first"):
        compute_maps(tmp_path / "v3", TEXT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deberta", TEXT, "--layers", "4"], r"--layers 4: \S+ has layers 1 to 3"),
        (["deberta", TEXT, "--layers", "0"], r"--layers 0: \S+ has layers 1 to 3"),
        (["deberta", "no-c2p", TEXT, "--layers", "-4"], r"--layers -4: \S+deberta has layers"),
        (["deberta", TEXT, "--layers", "two"], "--layers 'two': must be numbers"),
        (["deberta", TEXT, "--heads", "5"], r"--heads 5: \S+ has heads 1 to 4"),
        (["deberta", TEXT, "--heads", "1,,2"], "--heads '': must be numbers"),
        (["deberta", ""], "text '' has no tokens; give a sentence"),
        (["deberta", "fox " * 120], r"has \d+ tokens, but \S+ takes 96; shorten it"),
        (["unlimited", "fox " * 1100], r"has \d+ tokens, but \S+ takes 1024; shorten it"),
        (["deberta", "absent", TEXT], "absent: no such folder"),
        (["deberta", "roberta"], "is a folder; the last argument must be the text"),
        (["deberta", TEXT, "--output", "a.pdf"], r"--output a.pdf: must end in .html or .png"),
        (["deberta", TEXT, "--output", "no/a.png"], "--output no/a.png: must be a file in"),
    ],
)
def test_wrong_arguments_get_one_line(
    arguments: list[str],
    message: str,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {*(path.name for path in runs.iterdir()), "absent"}
    named = [str(runs / word) if word in known else word for word in arguments]
    assert main(["attention", *named]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_page_in_a_browser(runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "maps.html"
    models = [str(runs / name) for name in ("deberta", "no-c2p")]
    assert main(["attention", *models, TEXT, "--output", str(output)]) == 0
    content = output.read_text()
    maps = page_maps(content)[0]
    output.write_text(content.replace("</body>", PROBE))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,800",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
            output.as_uri(),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert found is not None, done.stderr
    seen = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["figures"] == 2
    assert "none: the model has no such term" in seen["captions"][1]
    assert not seen["hidden"]
    assert seen["cell"].startswith("[SEP] \u2192 [SEP]")
    for part in PARTS:
        values = maps.map(1, 2, part)
        assert values is not None
        assert f"{part}\t{values[-1, -1]:.4f}".replace("-", "\u2212") in seen["cell"]
