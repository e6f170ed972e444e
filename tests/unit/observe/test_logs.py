"""Who speaks, how loud, and where."""

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from megatron_deberta.observe.logs import HANDLER_NAME, setup_logging

LOG = logging.getLogger("megatron_deberta.test")


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


def test_rank_0_informs_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    LOG.info("started")
    LOG.debug("detail")
    line = capsys.readouterr().err
    assert line.endswith(" INFO started\n")
    assert "rank" not in line


def test_other_ranks_only_warn_and_say_who_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=3, world_size=4)
    LOG.info("started")
    LOG.warning("slow")
    assert capsys.readouterr().err.endswith("[rank 3] WARNING slow\n")


def test_other_packages_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    logging.getLogger("elsewhere").info("chatter")
    logging.getLogger("elsewhere").warning("trouble")
    assert capsys.readouterr().err.endswith("WARNING trouble\n")


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
