"""Tables of the fault-injection campaigns under ``tests/faults``.

Only results about the present code count; a case without any reads "not run".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.campaigns import ROOT, code_digest
from benchmarks.tables.common import markdown

Line = dict[str, Any]
# Commands are imported by name.
_RUN = "rank_process.py"
_TRAINING = (
    _RUN, "checkpoint", "data", "engine", "model", "objectives", "ops", "distributed", "train",
)  # fmt: skip
_CHECKPOINT = ("checkpoint", "distributed")
_STARTS = (
    _RUN, "cluster/run_lock.py", "checkpoint/writer.py", "train/run.py",
)  # fmt: skip
_SLURM = (
    _RUN, "cli/launch.py", "cli/submit.py", "checkpoint", "cluster", "data", "engine", "train",
)  # fmt: skip
_LAYOUTS = (
    _RUN, "checkpoint", "data", "engine", "model", "objectives", "distributed", "train",
)  # fmt: skip
_SUPERVISION = ("detection", "heartbeat", "ranks", "reports", "supervisor")
ALL_POINTS = 0


def _packages(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"megatron_deberta/{name}" for name in names)


HANGS_CODE = (
    *_packages((_RUN, "cluster", "train")), "tests/faults/forked_ranks.py",
    "tests/faults/hangs.py",
)  # fmt: skip
FROZEN_DISKS_CODE = (
    "megatron_deberta/cluster/slurm/history.py",
    *(f"megatron_deberta/cluster/watchdog/{name}.py" for name in _SUPERVISION),
    "megatron_deberta/observe", "tests/faults/forked_ranks.py", "tests/faults/frozen_disks.py",
)  # fmt: skip
SLURM_CODE = (
    *_packages(_SLURM), "megatron_deberta/cluster/slurm/job.sbatch",
    "tests/faults/slurm_campaign.py", "tests/slurm/submitted_run.py",
    "tests/slurm/virtual_cluster.py",
)  # fmt: skip
LAYOUT_MOVES_CODE = (*_packages(_LAYOUTS), "tests/faults/layout_moves.py")
TEXT_KILLS_CODE = (
    *_packages((
        "cli/deduplicate.py", "cli/preprocess.py", "cli/text_job.py",
        "data/__init__.py", "data/shards", "errors.py", "files.py", "hashing.py",
        "parsing.py", "processes.py", "text", "tokenizer",
    )),
    "tests/faults/injection", "tests/faults/text_kills.py",
)  # fmt: skip
# Which model is trained on which data makes no difference to what is saved and resumed.
LOST_NODES_CODE = (
    *_packages((_RUN, "checkpoint", "distributed", "engine", "train")),
    "tests/faults/lost_nodes.py", "tests/faults/chaos/training.py",
)  # fmt: skip
LOST_NODES_COUNTS = {"process": 20, "node": 20, "replicas": 10}
_LOST_NODES_TITLES = {
    "process": "SIGKILL of one rank", "node": "SIGKILL of a node's ranks, its folder deleted",
    "replicas": "the same, one part deleted with its replica",
}  # fmt: skip


CONVERT_KILLS_CODE = (
    *_packages(("cli/convert.py", "files.py", "hf")), "tests/faults/convert_kills.py",
)  # fmt: skip
FINETUNE_FAULTS_CODE = (
    *_packages((
        _RUN, "checkpoint", "cli/evaluate.py", "cli/finetune.py", "engine", "evaluate", "finetune",
        "train",
    )),
    "tests/faults/finetune_faults.py",
)  # fmt: skip
SEARCH_KILLS_CODE = (
    *_packages((
        _RUN, "cli/compare.py", "cli/ensemble.py", "cli/search.py", "checkpoint", "evaluate",
        "finetune", "train",
    )),
    "tests/faults/search_kills.py",
)  # fmt: skip
THREAD_CALLS_CODE = (
    *_packages(("hf/fast_attention.py", "hf/packed_attention.py")),
    "tests/faults/thread_calls.py",
)
HOSTILE_FILES_CODE = (
    "megatron_deberta/parsing.py", *_packages((
        "config/yaml_reader.py", "config/loader.py", "checkpoint/layout.py", "checkpoint/reader.py",
        "cluster/profile.py", "cluster/run_lock.py", "cluster/slurm/history.py",
        "cluster/slurm/status.py", "cluster/watchdog/reports.py",
        "data/sample_log.py", "data/shards", "evaluate", "finetune", "hf/config.py",
        "hf/heads.py", "hf/published.py", "observe", "report", "tasks", "text/jobs/folder.py",
        "text/readers", "tokenizer", "train/stability/rollback.py",
    )),
    "tests/faults/hostile_files.py", "tests/faults/hostile_kinds.py",
    "tests/faults/hostile_result_kinds.py", "tests/faults/hostile_task_kinds.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """A kind of fault of ``tests.faults.chaos``.

    Attributes:
        title: for the table.
        count: cases of the whole campaign; 0: one per system call of a save.
        packages: of megatron_deberta; a change to one of them voids the results.
    """

    title: str
    count: int
    packages: tuple[str, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """Files and folders on whose code the results depend."""
        return (*_packages(self.packages), "tests/faults/chaos")

    def digest(self) -> str:
        """Return the digest of ``places`` and of what they import."""
        return code_digest(self.places)


CHAOS_CASES = {
    "kill-one": ChaosCase("SIGKILL of one rank of four", 200, _TRAINING),
    "kill-all": ChaosCase("SIGKILL of all four ranks", 50, _TRAINING),
    "preempt": ChaosCase("SIGTERM, SIGUSR1 or SIGUSR2 to one or all ranks", 100, _TRAINING),
    "save-crash": ChaosCase("SIGKILL at a system call of a save", ALL_POINTS, _CHECKPOINT),
    "save-failure": ChaosCase("ENOSPC, EIO or EDQUOT at a system call", ALL_POINTS, _CHECKPOINT),
    "damage": ChaosCase("checkpoint flipped, cut, swapped, deleted, emptied", 1000, _CHECKPOINT),
    "double-start": ChaosCase("two starts in one folder without `flock`", 50, _STARTS),
}


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign with a file of results of its own.

    Attributes:
        title: for the table.
        count: cases of the whole campaign.
        places: files and folders; a change to their code voids the results.
    """

    title: str
    count: int
    places: tuple[str, ...]


CAMPAIGNS = {
    "hangs": Campaign("a rank stopped, blocked, killed or slow, or no fault", 96, HANGS_CODE),
    "slurm_campaign": Campaign(
        "on SLURM: nodes killed, two launches of a run, a job cut off, a chain", 62, SLURM_CODE
    ),
    "lost_nodes": Campaign("processes, nodes and replicas lost", 50, LOST_NODES_CODE),
    "frozen_disks": Campaign("the shared disk frozen, full or slow", 30, FROZEN_DISKS_CODE),
    "layout_moves": Campaign("a killed run resumed on another layout", 14, LAYOUT_MOVES_CODE),
    "text_kills": Campaign("processes and nodes of a job over text killed", 100, TEXT_KILLS_CODE),
    "search_kills": Campaign(
        "a search, a comparison or an ensemble stopped or killed", 60, SEARCH_KILLS_CODE
    ),
    "finetune_faults": Campaign(
        "fine-tuning with selection: killed, preempted, disk full", 40, FINETUNE_FAULTS_CODE
    ),
    "convert_kills": Campaign("an export or import killed", 40, CONVERT_KILLS_CODE),
    "thread_calls": Campaign(
        "a thousand calls of `use_fast_attention` in eight threads", 10, THREAD_CALLS_CODE
    ),
}


_HEADER = ("fault", "passed / done", "of", "slowest", "revision", "processor")


def campaigns(
    chaos_lines: list[Line],
    mutant_lines: list[Line],
    random_lines: list[Line],
    *others: list[Line],
) -> str:
    """Return the table of passed and completed cases of every campaign.

    Args:
        chaos_lines: lines of ``chaos.jsonl``.
        mutant_lines: lines of ``mutants.jsonl``.
        random_lines: lines of ``random_mutants.jsonl``.
        others: lines of ``CAMPAIGNS``, in that order.
    """
    rows = _chaos_rows(chaos_lines)
    for (name, campaign), lines in zip(CAMPAIGNS.items(), others, strict=True):
        code = code_digest(campaign.places)
        found = [x for x in lines if x["code_digest"] == code]
        title, planned = f"{campaign.title} (`{name}`)", str(campaign.count)
        rows.append((title, *_counts(found, planned, ""), _processors(found)))
    latest = {line["mutant"]: line for line in mutant_lines}
    found = [x for x in mutant_lines if x is latest[x["mutant"]] and _is_current(x)]
    title = "a line of the package broken (`mutants`)"
    rows.append((title, *_counts(found, str(len(latest)), ""), _processors(found)))
    found = [
        x | {"ok": bool(x["killed_by"] or x["reason"])} for x in _of_present_code(random_lines)
    ]
    title = "a line of the package changed at random (`random_mutants`)"
    rows.append((title, *_counts(found, "30", ""), _processors(found)))
    return markdown(_HEADER, rows)


def chaos(lines: list[Line]) -> str:
    """Return the table of passed and completed cases of ``tests.faults.chaos``."""
    return markdown(_HEADER, _chaos_rows(lines))


def _chaos_rows(lines: list[Line]) -> list[tuple[str, ...]]:
    rows = []
    for name, case in CHAOS_CASES.items():
        code = case.digest()
        found = [x for x in lines if x["case"] == name and x["code"] == code]
        title, planned = f"{case.title} (`chaos {name}`)", str(case.count or "every call")
        keys = ("survivors_seconds", "stop_seconds", "refused_seconds")
        slowest = _slowest(found, keys, lambda key: key.removesuffix("_seconds"))
        rows.append((title, *_counts(found, planned, slowest), _processors(found)))
    return rows


def chaos_phases(lines: list[Line]) -> str:
    """Return the table of passed kills and preemptions by phase of training.

    A fault was injected during a pause in the phase, or at a random time; then the row names the
    section of the heartbeat.
    """
    kinds = ("kill-one", "kill-all", "preempt")
    counts: dict[str, list[int]] = {}
    for number, name in enumerate(kinds):
        code = CHAOS_CASES[name].digest()
        for line in lines:
            if line["case"] == name and line["code"] == code and line["ok"]:
                title = line["phase"] if line["is_aimed"] else f"any, heartbeat in {line['phase']}"
                counts.setdefault(title, [0] * len(kinds))[number] += 1
    order = sorted(counts, key=lambda title: (title.startswith("any"), title))
    rows = [(title, *map(str, counts[title])) for title in order]
    return markdown(("phase", *(f"`{name}`" for name in kinds)), rows or [("not run", "", "", "")])


def hangs(lines: list[Line]) -> str:
    """Passed and completed cases by fault and section of the training loop."""
    code = code_digest(HANGS_CODE)
    rows = []
    present = [x for x in lines if x["code_digest"] == code]
    # Which section a stopped rank is in depends on time: not every section is in every campaign.
    for title in sorted({_hang_title(line) for line in present or lines}):
        found = [x for x in present if _hang_title(x) == title]
        late = [
            x["detected_seconds"] - x.get("timeout_seconds", 0)
            for x in found
            if "detected_seconds" in x
        ]
        after = "the time-out" if any("timeout_seconds" in x for x in found) else "the kill"
        rows.append((title, *_counts(found, f"{max(late):.1f} s after {after}" if late else "")))
    return markdown(("case", "passed / done", "longest until named", "revision"), rows)


def _hang_title(line: Line) -> str:
    if line["how"] == "stop":
        return f"SIGSTOP in {line['section']}"
    if line["how"] == "read":
        return f"blocked read in the {'loader' if line['worker'] else 'rank'}'s process"
    if line["how"] == "slow":
        return f"a rank slow in {line['part']}"
    return {"kill": "SIGKILL", "nothing": "no fault, no alarm"}[str(line["how"])]


def frozen_disks(lines: list[Line]) -> str:
    """Passed and completed cases by fault of the shared disk."""
    code = code_digest(FROZEN_DISKS_CODE)
    rows = []
    for kind in dict.fromkeys(line["kind"] for line in lines):
        found = [x for x in lines if x["kind"] == kind and x["code_digest"] == code]
        seconds = [x["fault_seconds"] for x in found]
        rows.append((kind, *_counts(found, f"{max(seconds):.0f} s" if found else "")))
    return markdown(("fault", "passed / done", "longest fault", "revision"), rows)


def slurm(lines: list[Line]) -> str:
    """Passed and completed cases of the SLURM campaign."""
    code = code_digest(SLURM_CODE)
    rows = []
    for case in sorted({line["case"] for line in lines}):
        found = [x for x in lines if x["case"] == case and x["code_digest"] == code]
        keys = sorted(key for key in found[0] if key.endswith("_seconds")) if found else []
        rows.append((case, *_counts(found, _slowest(found, keys, str))))
    return markdown(("case", "passed / done", "slowest", "revision"), rows)


def lost_nodes(lines: list[Line]) -> str:
    """Passed and completed cases of losses with local checkpoints, and the steps repeated."""
    code = code_digest(LOST_NODES_CODE)
    rows = []
    for case, count in LOST_NODES_COUNTS.items():
        found = [x for x in lines if x["case"] == case and x["code_digest"] == code]
        repeated = sorted(x["steps_repeated"] for x in found if x["ok"])
        local = str(sum(bool(x["local"]) for x in found)) if found else ""
        steps = f"{repeated[len(repeated) // 2]}, {repeated[-1]}" if repeated else ""
        title = f"{_LOST_NODES_TITLES[case]} (`{case}`)"
        rows.append((title, *_counts(found, str(count), local, steps)))
    header = (
        "loss", "passed / done", "of", "from a local checkpoint", "steps repeated: median, most",
        "revision",
    )  # fmt: skip
    return markdown(header, rows)


def text_kills(lines: list[Line]) -> str:
    """Passed and completed kills of jobs over text, by engine and victim."""
    code = code_digest(TEXT_KILLS_CODE)
    rows = []
    for kind in sorted({(line["engine"], line["victim"]) for line in lines}):
        found = [
            x for x in lines if (x["engine"], x["victim"]) == kind and x["code_digest"] == code
        ]
        phases = len({(x["command"], x["point"]) for x in found})
        rows.append((f"{kind[0]}: {kind[1]}", *_counts(found, str(phases) if found else "")))
    return markdown(("engine and victim", "passed / done", "phases", "revision"), rows)


def hostile_files(lines: list[Line]) -> str:
    """Changed files that were read, refused, or ended in a traceback."""
    code = code_digest(HOSTILE_FILES_CODE)
    found = [x for x in lines if x["code_digest"] == code]
    kinds = {x["kind"] for x in found}
    columns = (("changes", "changes"), ("read", "read"), ("refused", "refused"))
    sums = [f"{sum(x[key] for x in found):,}" for _, key in columns]
    failed = str(sum(x["num_failed"] for x in found)) if found else "not run"
    revision = str(found[-1]["revision"]) if found else ""
    header = (
        "kinds of files", *(title for title, _ in columns), "tracebacks", "revision", "processor",
    )  # fmt: skip
    return markdown(header, [(str(len(kinds)), *sums, failed, revision, _processors(found))])


def mutants(lines: list[Line]) -> str:
    """Faults of the code, and the test that fails with each."""
    latest = {line["mutant"]: line for line in lines}
    rows = [
        (name, f"`{x['test']}`", ("yes" if x["ok"] else "no") if _is_current(x) else "not run")
        for name, x in latest.items()
    ]
    return markdown(("fault", "test", "fails"), rows)


def random_mutants(lines: list[Line]) -> str:
    """Return the table of random mutants, with the first test that fails with each."""
    rows = []
    for line in _of_present_code(lines):
        test = line["killed_by"].removeprefix("tests/").partition("[")[0]
        result = f"`{test}`" if test else line["reason"] or "**none**"
        place = f"{line['file'].removeprefix('megatron_deberta/')}:{line['line']}"
        code = (f"`` {line[key]} ``".replace("|", r"\|") for key in ("old", "new"))
        rows.append((f"`{place}`", *code, result))
    return markdown(("place", "line", "changed to", "test that fails, or why none does"), rows)


def _of_present_code(lines: list[Line]) -> list[Line]:
    """Return the lines of random mutants whose file is unchanged."""
    return [line for line in lines if _is_unchanged(line, line["file"])]


def _is_current(line: Line) -> bool:
    """Return whether the changed file and the test file of a mutant are unchanged."""
    test = line["test"].split("::")[0]
    return _is_unchanged(line, f"megatron_deberta/{line['file']}", f"tests/{test}")


def _is_unchanged(line: Line, *places: str) -> bool:
    """Return whether files exist and have the digest that a line recorded."""
    return all((ROOT / place).exists() for place in places) and (
        code_digest(places, imports=False) == line["code_digest"]
    )


def _counts(found: list[Line], *middle: str) -> tuple[str, ...]:
    """Return the cells of a row after its title: the counts, other cells, the revision."""
    passed = f"{sum(x['ok'] for x in found):,} / {len(found):,}" if found else "not run"
    return (passed, *middle, str(found[-1]["revision"]) if found else "")


def _processors(found: list[Line]) -> str:
    return ", ".join(sorted({line["hardware"] for line in found}))


def _slowest(found: list[Line], keys: Iterable[str], title: Callable[[str], str]) -> str:
    return ", ".join(
        f"{title(key)} {max(x[key] for x in found)} s" for key in keys if found and key in found[0]
    )
