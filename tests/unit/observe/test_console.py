"""The live view on a terminal, and the plain lines where there is none."""

import io
import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_deberta.observe.console import (
    HANDLER_NAME,
    LiveConsole,
    format_duration,
    setup_logging,
)

LOG = logging.getLogger("megatron_deberta.test")
RECORD = {
    "loss": 6.81234,
    "learning_rate": 9.63e-4,
    "grad_norm": 1.2041,
    "loss_scale": 1.0,
    "tokens_per_second": 9120.4,
    "utilization": 0.412,
    "hardware_utilization": 0.412,
    "flops_per_second": 5.15e11,
    "matmul_flops_per_second": 1.25e12,
    "seconds_left": 211,
}


def test_without_a_terminal_each_record_is_one_clean_line() -> None:
    out = io.StringIO()
    with LiveConsole(600, console=Console(file=out, width=20)) as view:
        view.advance(119)
        view.update(120, RECORD, {})
        view.note("validation 120: loss 6.9")
    assert out.getvalue() == (
        "step 120/600 | loss 6.8123 | lr 9.630e-04 | grad norm 1.204 | tokens/s 9,120 | "
        "MFU 41.2% of 1.25 TFLOP/s | ETA 0:03:31\nvalidation 120: loss 6.9\n"
    )


def test_lines_say_what_applies() -> None:
    out = io.StringIO()
    view = LiveConsole(600, console=Console(file=out))
    view.update(120, RECORD | {"loss_scale": 65536.0, "utilization": math.nan}, {})
    assert "loss scale 65536" in out.getvalue()
    assert "with recomputation" not in out.getvalue()
    assert "MFU" not in out.getvalue()
    view.update(120, RECORD | {"hardware_utilization": 0.549}, {})
    assert "MFU 41.2% of 1.25 TFLOP/s | with recomputation 54.9%" in out.getvalue()


def test_on_a_terminal_a_panel_is_drawn_and_left_behind() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with LiveConsole(600, first_step=100, title="runs/first", console=console) as view:
        view.update(120, RECORD, {})
        view.note("saved step 120")
    shown = out.getvalue()
    for text in ("runs/first", "6.8123", "grad norm", "41.2%", "step 120/600", "20%", "saved"):
        assert text in shown


def test_the_terminal_is_given_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with pytest.raises(RuntimeError), LiveConsole(10, console=console):
        raise RuntimeError
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (211, "0:03:31"), (90061, "1d 1:01:01"), (math.inf, "unknown")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_full_disk_loses_lines_and_does_not_end_the_run() -> None:
    full = Path("/dev/full").open("w")
    LiveConsole(10, console=Console(file=full)).note("a line")
    # The line is still in the buffer of this file.
    with suppress(OSError):
        full.close()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the loggers as they were found."""
    names = ("megatron_deberta", "DeepSpeed")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root = logging.getLogger()
    for handler in [item for item in root.handlers if item.get_name() == HANDLER_NAME]:
        root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("options", "logger", "ends"),
    [
        ({}, LOG, ["INFO message", "WARNING message"]),
        ({"rank": 3, "world_size": 4}, LOG, ["[rank 3] WARNING message"]),
        ({}, logging.getLogger("elsewhere"), ["WARNING message"]),
    ],
    ids=["rank 0", "another rank", "another package"],
)
def test_level_and_prefix_of_log_lines(
    capsys: pytest.CaptureFixture[str], options: Any, logger: logging.Logger, ends: list[str]
) -> None:
    setup_logging(**options)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logger.log(level, "message")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == ends


def test_the_last_call_counts(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("debug")
    setup_logging("warning")
    LOG.info("hidden")
    LOG.warning("once")
    assert capsys.readouterr().err.count("\n") == 1


def test_on_a_terminal_messages_go_through_the_live_view(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.StringIO()
    setup_logging(console=Console(file=out, force_terminal=True, width=80))
    LOG.info("above the bar")
    assert "above the bar" in out.getvalue()
    assert capsys.readouterr().err == ""
