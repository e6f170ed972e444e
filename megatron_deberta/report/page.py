"""The HTML page of a report: one file without references to others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from megatron_deberta import __version__
from megatron_deberta.config import config_to_dict
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.report.charts import NUM_COLORS, DrawnChart, draw
from megatron_deberta.report.run_charts import CHART_GROUPS
from megatron_deberta.report.run_folder import RunFolder, flatten, read_run, run_names
from megatron_deberta.report.tables import (
    class_tables,
    config_differences,
    data_statistics,
    events,
    overview,
    sample_tables,
)


def write_page(folders: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the report of runs as HTML, and a line for each damaged record.

    Args:
        folders: run folders; each is only read.

    Raises:
        ConfigError: a folder is missing, given twice, or holds no metrics.
    """
    runs = [
        read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)
    ]
    statistics = [data_statistics(run) for run in runs]
    samples = [sample_tables(run) for run in runs]
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    problems += [
        f"{run.name}: {problem}"
        for run, (_, found) in zip(runs, statistics, strict=True)
        for problem in found
    ]
    problems += [
        f"{run.name}: samples.jsonl: {damaged} damaged samples are left out"
        for run, (_, damaged) in zip(runs, samples, strict=True)
        if damaged
    ]
    page = _template().render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        runs=runs,
        num_colors=NUM_COLORS,
        problems=problems,
        overview=overview(runs),
        groups=_draw_groups(runs),
        events=[events(run) for run in runs],
        classes=[class_tables(run) for run in runs],
        statistics=[table for table, _ in statistics],
        samples=[tables for tables, _ in samples],
        differences=config_differences(runs, dict(flatten(config_to_dict(RunConfig())))),
    )
    return page, problems


def _draw_groups(runs: Sequence[RunFolder]) -> dict[str, list[DrawnChart]]:
    """Draw the charts below each heading; empty ones and headings without any are left out."""
    groups: dict[str, list[DrawnChart]] = {}
    number = 0
    for heading, build in CHART_GROUPS.items():
        for chart in build(runs):
            if chart.is_empty:
                continue
            groups.setdefault(heading, []).append(draw(chart, number))
            number += 1
    return groups


def _template() -> Template:
    """Return the template, with style sheet and script as text."""
    environment = Environment(
        loader=PackageLoader("megatron_deberta.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader
    assert source is not None
    for name in ("page.css", "page.js"):
        text, *_ = source.get_source(environment, name)
        environment.globals[name.replace(".", "_")] = Markup(text)
    return environment.get_template("page.html")
