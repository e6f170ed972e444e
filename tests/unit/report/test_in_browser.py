"""The page of ``megatron-deberta report`` in a headless Chromium, without network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.report.page import write_page
from tests.support.report_runs import write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH (Debian: apt-get install chromium)"
)
PROBE = """
<pre id="probe"></pre><script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
document.documentElement.style.width = "WIDTH";
addEventListener("load", () => {
  const root = document.documentElement;
  const style = getComputedStyle(document.body);
  const loss = document.querySelector("figure .picture");
  const text = loss.querySelector("text");
  const bounds = loss.getBoundingClientRect();
  const at = { clientX: bounds.left + bounds.width * 0.95, clientY: bounds.top + 5 };
  loss.dispatchEvent(new PointerEvent("pointermove", at));
  const blocks = [...document.querySelectorAll("body *")];
  const widest = blocks.filter((each) => !each.closest(".scroll, svg"))
    .map((each) => each.getBoundingClientRect().right);
  const curve = blocks.find((each) => each.style.stroke?.includes("--c0"));
  document.querySelector("#probe").textContent = JSON.stringify({
    errors,
    paper: style.backgroundColor,
    ink: getComputedStyle(text).fill,
    line: getComputedStyle(curve).stroke,
    size: text.getBoundingClientRect().height,
    right: Math.max(...widest),
    values: loss.parentElement.querySelector(".values").textContent,
    requests: performance.getEntriesByType("resource").map((each) => each.name),
  });
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / name) for name in ("first", "second" * 20)]
    return write_page(runs)[0]


def show(page: str, folder: Path, *options: str, width: str = "auto") -> dict[str, Any]:
    """Open the page; return what the probe measures."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", PROBE.replace("WIDTH", width) + "</body>"))
    assert CHROMIUM is not None
    finished = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
            f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'<pre id="probe">(.*?)</pre>', finished.stdout, re.DOTALL)
    assert found is not None, finished.stderr
    measured: dict[str, Any] = json.loads(unescape(found[1]))
    return measured


def brightness(color: str) -> float:
    """Return the mean of a CSS colour's channels, 0 to 255."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_light_and_dark(page: str, tmp_path: Path) -> None:
    light = show(page, tmp_path)
    dark = show(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["errors"] == dark["errors"] == []
    assert light["requests"] == []
    assert brightness(light["paper"]) > 200 > 60 > brightness(light["ink"])
    assert brightness(dark["paper"]) < 60 < 200 < brightness(dark["ink"])
    assert light["line"] != dark["line"]
    # The end of the lines is near the right edge.
    assert "first: training 5 at 40" in light["values"]
    assert "first: validation 4.5 at 40" in light["values"]


def test_phone(page: str, tmp_path: Path) -> None:
    """Nothing but tables, which scroll by themselves, is wider than the screen."""
    narrow = show(page, tmp_path, width="360px")
    assert narrow["right"] <= 360
    assert narrow["size"] >= 9
