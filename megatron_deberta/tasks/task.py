"""Task configs, one YAML file per task (``configs/tasks/NAME.yaml``), and schemes of labels."""

from __future__ import annotations

import difflib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_deberta.config.loader import (
    CONFIG_ROOTS,
    OVERRIDES,
    plain_value,
    read_alternatives,
    use_new_names,
)
from megatron_deberta.config.schema import CLASS_HEADS
from megatron_deberta.config.yaml_reader import PlainScalar, TextLoader, parse_yaml, read_yaml
from megatron_deberta.errors import ConfigError, MissingInputError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import conform

Head = Literal[
    "classification", "multilabel", "regression", "spans", "tokens", "choices", "embed", "rerank"
]


Reader = Literal[
    "table", "tsv", "csv", "jsonl", "parquet", "datasets", "conll", "squad", "record", "multirc",
    "wic", "wsc", "race", "quail", "copa_xml",
    "squad_passages",
]  # fmt: skip


Leaderboard = Literal["", "glue", "superglue", "squad", "conll"]


LongText = Literal["truncate", "mean", "max"]


METRICS: Mapping[str, tuple[str, ...]] = {
    "classification": (
        "accuracy", "f1", "macro_f1", "matthews", "f1a", "group_exact", "gender_parity",
    ),
    "multilabel": ("micro_f1", "macro_f1", "micro_precision", "micro_recall", "accuracy"),
    "regression": ("pearson", "spearman", "pearson_spearman"),
    "spans": ("f1", "exact", "best_f1", "best_exact"),
    "tokens": (
        "f1", "precision", "recall", "accuracy", "token_f1", "token_precision", "token_recall",
    ),
    "choices": ("accuracy",),
    "embed": ("spearman", "pearson", "pearson_spearman"),
    "rerank": ("ndcg_at_10", "mrr_at_10", "map"),
}  # fmt: skip


COLUMNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "classification": (("text",), ("text_pair", "label", "id", "group")),
    "multilabel": (("text",), ("text_pair", "label", "id", "group")),
    "regression": (("text",), ("text_pair", "label", "id")),
    "spans": (
        ("question", "context"), ("answers", "answer_text", "answer_start", "candidates", "id"),
    ),
    "tokens": (("words",), ("tags", "id")),
    "choices": (("choices",), ("text", "question", "label", "id", "group")),
    "embed": (("text",), ("text_pair", "negative", "label", "id")),
    "rerank": (("query",), ("passages", "labels", "positives", "negatives", "id", "group")),
}  # fmt: skip
"""Roles of columns by head: the required ones, then the others."""


EXAMPLE_HEADS = ("choices", "embed", "rerank")
"""Heads whose samples are examples of several rows."""


POOLED_HEADS = ("classification", "multilabel", "regression")
"""Heads of one output per text; those of a long text's windows are pooled."""


SCORE_HEADS = ("regression", "embed")
"""Heads whose labels are numbers."""


TRAIN, DEV = "train", "dev"
"""Splits that a run is trained and validated on."""


TASK_FILE = "task.yaml"
"""In the folder of a fine-tuning run: the task, complete."""


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


_NAME = re.compile(r"\w[\w .+-]{0,99}")
"""Names of tasks and splits and of leaderboard files, which become names of files."""


_PATH_KEYS = (
    "train.run_dir", "finetune.task", "finetune.data", "finetune.cache", "tokenizer.path",
    "checkpoint.load_from", "checkpoint.continue_from", "checkpoint.local_dir", "data.train",
    "data.validation", "data.index_cache", "train.blimp_data", "cluster.notify",
    "cluster.prometheus_file",
)  # fmt: skip
"""Keys of a run that name files or commands."""


_TYPES = ("int", "bool", "bool | None", "tuple[float, ...]")
"""Types of keys whose values are numbers or truth values; others but ``settings`` hold text."""


_LABEL_KEYS = ("labels", "label_names", "leaderboard_labels", "skip_labels")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """Files of one split and where they differ from the task's other files."""

    files: tuple[str, ...] = ()
    """Files or folders below the data folder; ``NAME.gz`` is read if ``NAME`` is missing."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of these files; empty: those of the task."""
    part: tuple[float, ...] = ()
    """Part of the examples, such as 0, 0.8, chosen by a hash of each one's group or id; empty: all
    of them. For data without a split of its own."""
    header: bool | None = None
    """Whether these files have a header line; None: as the task says."""
    leaderboard_file: str = ""
    """File name in a leaderboard submission, such as ``MNLI-m.tsv``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """A labelled task."""

    name: str
    """Name in reports and folders."""
    description: str = ""
    """One line: what is to be predicted, and the source of the data."""
    head: Head
    """Kind of output: one class, any number of labels or one number per example, a span, a class
    per word, a choice, an embedding of each text, or a score per passage."""
    reader: Reader
    """File format; ``table`` takes CSV, TSV, JSON Lines, Parquet and ``datasets`` folders by their
    suffix."""
    splits: dict[str, SplitConfig]
    """Files by split: ``train``, ``dev``, ``test`` and others such as ``dev_mismatched``. Labels
    are optional in splits whose name begins with ``test``."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Column (or key, or 1-based column number without a header) of each role: ``text``,
    ``text_pair``, ``label``, ... A value with braces is a template: ``"{word}: {sentence1}"``."""
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    """Replacements of values by column, made before templates are filled."""
    header: bool = True
    """Whether TSV and CSV files begin with a line of column names."""
    quoting: bool = True
    """Whether quotation marks in TSV and CSV files delimit fields; False: they are text."""
    skip_short_rows: bool = False
    """Skip rows with too few columns (QQP has some) instead of an error."""
    skip_labels: tuple[str, ...] = ()
    """Labels of rows to skip, such as ``-`` for no consensus."""
    labels: tuple[str, ...] = ()
    """Labels as written in the files, in the order of the classes; for choices the names of the
    positions (empty: 0, 1, ...); for regression and embeddings empty."""
    label_names: tuple[str, ...] = ()
    """Readable names of ``labels`` for exports; empty: ``labels``."""
    label_separator: str = ","
    """Text between the labels of an example where they are one string (multilabel)."""
    thresholds: tuple[float, ...] = ()
    """Probabilities from which labels are predicted (multilabel): one per label, or one for all;
    empty: of each label the best one on the dev split, and 0.5 where none is recorded."""
    label_range: tuple[float, ...] = ()
    """Lowest and highest score; those of regression are clipped to it, those of pairs to embed
    scaled from it to 0 to 1."""
    positive_label: str = ""
    """Label that ``f1`` refers to; empty: the last one."""
    metrics: tuple[str, ...]
    """Metrics to report; the first selects the best checkpoint. Larger is better. Of labels of
    words without a scheme such as BIO, ``f1`` becomes ``token_f1``, as do precision and recall."""
    max_length: int
    """Tokens per row, special tokens included."""
    stride: int = 128
    """Tokens that neighbouring windows of a long passage share, at most half a window (spans,
    tokens, ``long_text``)."""
    long_text: LongText = "truncate"
    """Texts that are longer than a row (classification, multilabel, regression): cut, or divided
    into windows. Each window is trained with the example's label, and the prediction is the
    ``mean`` of the windows' probabilities (scores), or of each class the largest one (``max``)."""
    truncate: Literal["longest", "first", "second"] = "longest"
    """Segment that is cut at its end if a pair is too long."""
    max_answer_length: int = 30
    """Tokens of the longest answer (spans)."""
    unanswerable: bool = False
    """Whether questions may have no answer (SQuAD 2.0)."""
    mask_text: str = ""
    """Text in the question that is encoded as [MASK] (ReCoRD's ``@placeholder``)."""
    merge_sentences: bool = False
    """Join a document's sentences up to ``max_length`` tokens (CoNLL, as released)."""
    hypothesis: str = ""
    """Sentence such as ``This text is about {}.``, which makes the choices from ``label_names``
    (choices): a model of natural language inference then classifies without training."""
    max_passages: int = 0
    """Passages per query at most, where there are labels: the relevant ones, and others drawn by
    ``passage_seed`` (rerank); 0: all."""
    random_passages: int = 0
    """Paragraphs of other articles per question, drawn by ``passage_seed`` (squad_passages)."""
    passage_seed: int = 0
    """Seed of ``max_passages`` and ``random_passages``."""
    transfer_from: str = ""
    """Task whose fine-tuned model this one starts from."""
    leaderboard: Leaderboard = ""
    """Format of prediction files; empty: JSON Lines."""
    leaderboard_labels: tuple[str, ...] = ()
    """Labels as a leaderboard wants them; empty: ``labels``."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Published settings by source, such as ``release_base`` or ``paper_large``: run keys with
    their value, or with a list of values to search."""
    default_settings: str = ""
    """Settings of a run that names none; empty: none."""

    @property
    def num_labels(self) -> int:
        """Outputs of the classifier per row or token."""
        return {"regression": 1, "choices": 1, "rerank": 1, "spans": 2}.get(
            self.head, len(self.labels)
        )

    @property
    def id2label(self) -> dict[int, str]:
        """Names of the classes for exports."""
        return dict(enumerate(self.label_names or self.labels))


def is_labelled(split: str) -> bool:
    """Return whether labels are required in a split; in test splits they are optional."""
    return not split.startswith(("test", "predict"))


def load_task(name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TaskConfig:
    """Load a task's config.

    Args:
        name: name of a packaged task (``sst2``) or path of a YAML file, which may extend others
            with ``base: FILE``.
        overrides: ``key=value`` or ``key.key=value`` with YAML values.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, or inconsistent values.
    """
    path = _find_task(os.fspath(name))
    data = _expand_shorthands(_read_layers(path, ()), str(path))
    for override in overrides:
        _apply_override(data, override)
    return task_from_dict(data, str(path))


def task_from_dict(data: Mapping[str, Any], source: str) -> TaskConfig:
    """Build a task's config from plain data, such as a checkpoint's metadata.

    Args:
        data: values by key.
        source: origin of the data, for messages.

    Raises:
        ConfigError: unknown key, wrong type, or inconsistent values.
    """
    expanded = _expand_shorthands(data, source)
    check_keys(expanded, TaskConfig, source)
    required = ("name", "head", "reader", "splits", "metrics", "max_length")
    if missing := [key for key in required if key not in expanded]:
        raise ConfigError(f"{source}: {', '.join(missing)} missing; every task states them")
    # OmegaConf takes 80 us per item, and there may be thousands of labels.
    labels = {key: expanded.pop(key) for key in _LABEL_KEYS if key in expanded}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TaskConfig), expanded)
        task = cast(TaskConfig, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, OverflowError, TypeError, ValueError) as error:
        problem = str(error).split("\n")[0]
        key = getattr(error, "full_key", "") or getattr(error, "key", "")
        # Errors of Python do not name the key.
        place = key or "a value of the wrong type"
        raise ConfigError(f"{source}: {place}: {problem}") from error
    task = replace(task, **labels)
    # OmegaConf does not check the items of lists.
    remedy = "correct this key"
    conform(asdict(task), TaskConfig, source, "a task", error=ConfigError, remedy=remedy)
    _check_file_names(task, source)
    _check(task, source)
    return replace(task, metrics=_metrics_of_scheme(task, source))


def save_task(task: TaskConfig, run_dir: Path) -> None:
    """Keep a task, with what its file extends, in the folder of a run.

    Raises:
        OSError: the folder cannot be written.
    """
    data = json.loads(json.dumps(asdict(task)))
    text = yaml.safe_dump(data, allow_unicode=True, sort_keys=False)
    write_atomically(run_dir / TASK_FILE, text.encode())


def run_task_name(name: str, run_dir: Path) -> str:
    """Return the file of a run's task that is in its folder, or else the name in its config.

    Args:
        name: ``finetune.task``, whose file may have been moved or changed since.
        run_dir: folder of the run.

    Raises:
        ConfigError: there is neither.
    """
    kept = run_dir / TASK_FILE
    if kept.is_file():
        return str(kept)
    if os.path.isabs(path := absolute_task_name(name)) and not os.path.exists(path):
        raise ConfigError(f"{run_dir}: its task {name} does not exist; copy the file to {kept}")
    return name


def absolute_task_name(name: str) -> str:
    """Return the absolute path of a task file; names of packaged tasks are unchanged."""
    path = Path(name)
    is_packaged = path.parts[:1] == ("configs",) and not path.exists()
    is_file = path.suffix in (".yaml", ".yml") and not is_packaged
    return os.path.abspath(name) if is_file else name


def task_names() -> list[str]:
    """Return the names of the packaged tasks."""
    for root in CONFIG_ROOTS:
        if found := sorted(path.stem for path in (root / "configs/tasks").glob("*.yaml")):
            return found
    return []


def packaged_file(path: Path) -> Path:
    """Return a path, or the packaged file of this name (``configs/...``) if it does not exist."""
    if path.exists() or path.parts[:1] != ("configs",):
        return path
    return next((root / path for root in CONFIG_ROOTS if (root / path).is_file()), path)


def _find_task(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return packaged_file(path)
    for root in CONFIG_ROOTS:
        if (root / "configs/tasks" / f"{name}.yaml").is_file():
            return root / "configs/tasks" / f"{name}.yaml"
    close = difflib.get_close_matches(name, task_names(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(task_names())}"
    raise ConfigError(f"no task {name!r}{hint} (a file of your own ends in .yaml)")


def _read_layers(path: Path, ancestors: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file over the file that it names as ``base``; mappings are merged key by key."""
    if path.resolve() in ancestors:
        raise ConfigError(f"{path}: extends itself through `base`; remove one of the references")
    if path.exists() and not path.is_file():
        raise MissingInputError(f"{path}: not a regular file; give a task file on disk")
    data: dict[str, Any] = _typed(read_yaml(path, TextLoader), str(path), TaskConfig)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r} is not a file name")
    # Beside the file, or a packaged one.
    beside = path.parent / base
    below = _read_layers(
        beside if beside.exists() else _find_task(base), (*ancestors, path.resolve())
    )
    return _merge(below, data)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        # A task's own columns and splits replace those of its base.
        replaces = key in ("columns", "splits")
        merged[key] = _merge(old, value) if both and not replaces else value  # type: ignore[arg-type]
    return merged


def _apply_override(data: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"command line: {override!r} is not key=value, as in max_length=128")
    *parents, last = keys = name.strip().split(".")
    for parent in parents:
        data[parent] = dict(data[parent]) if isinstance(data.get(parent), Mapping) else {}
        data = data[parent]
    if not value.strip():
        data[last] = ""
        return
    # Below its keys, which say whether it is text.
    parsed: Any = parse_yaml(value, OVERRIDES, TextLoader)
    for key in reversed(keys):
        parsed = {key: parsed}
    parsed = _typed(parsed, OVERRIDES, TaskConfig)
    for key in keys:
        parsed = parsed[key]
    data[last] = parsed


def _typed(data: Any, source: str, config: type[Any]) -> Any:
    """Return the values of a task file, in which the type of a key decides what is text.

    Args:
        data: with ``PlainScalar`` for scalars whose text was kept: ``no``, ``01`` and
            ``2024-01-01`` are labels.
        source: file or command line, for messages.
        config: the dataclass with the keys.

    Raises:
        ConfigError: a number in a notation that is refused.
    """
    if not isinstance(data, Mapping):
        return _text(data)
    types = {item.name: item.type for item in fields(config)}
    typed: dict[str, Any] = {}
    for key, value in data.items():
        is_null = isinstance(value, PlainScalar) and value.value is None
        if key == "splits" and isinstance(value, Mapping):
            typed[key] = {name: _typed(split, source, SplitConfig) for name, split in value.items()}
        elif key == "settings" and isinstance(value, Mapping):
            typed[key] = {name: _typed_settings(each, source) for name, each in value.items()}
        elif types.get(key) not in _TYPES and not is_null:
            typed[key] = _text(value)
        else:
            try:
                typed[key] = plain_value(value)
            except ValueError as error:
                problem = f"{source}: {key}: {error}; write it as a decimal number"
                raise ConfigError(problem) from error
    return typed


def _typed_settings(settings: Any, source: str) -> Any:
    if not isinstance(settings, Mapping):
        return _text(settings)
    settings = use_new_names({str(key): value for key, value in settings.items()}, source)
    return {key: read_alternatives(key, value, source) for key, value in settings.items()}


def _text(value: Any) -> Any:
    """Replace every ``PlainScalar`` by its text."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        return {key: _text(item) for key, item in value.items()}
    return value.text if isinstance(value, PlainScalar) else value


def _expand_shorthands(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Expand ``dev: dev.tsv`` in splits; write labels as text."""
    expanded = dict(data)
    if isinstance(splits := data.get("splits"), Mapping):
        expanded["splits"] = {str(name): _split(value) for name, value in splits.items()}
    for key in _LABEL_KEYS:
        if key not in data:
            continue
        if not isinstance(value := data[key], (list, tuple)):
            raise ConfigError(f"{source}: {key}={value!r} is not a list; write {key}: [a, b]")
        expanded[key] = tuple(_label(source, key, item) for item in value)
    return expanded


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return {"files": [value]}
    if isinstance(value, (list, tuple)):
        return {"files": list(value)}
    if isinstance(value, Mapping) and isinstance(value.get("files"), str):
        return {**value, "files": [value["files"]]}
    return value


def _label(source: str, key: str, value: Any) -> str:
    """Write booleans and numbers, which plain data may have, as JSON files do."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{source}: {key}: {value!r} is not text; quote it")
    text = str(value)
    if not text.strip() or _UNPRINTABLE.search(text):
        raise ConfigError(f"{source}: {key}: {value!r} is empty or has control characters")
    return text


def _metrics_of_scheme(task: TaskConfig, source: str) -> tuple[str, ...]:
    """Return the metrics, with those of entities renamed where labels of words have no scheme."""
    if task.head != "tokens" or not set(task.metrics) & set(ENTITY_METRICS):
        return task.metrics
    try:
        if entity_labels(task.labels) is not None:
            return task.metrics
    except SchemeError as error:
        raise ConfigError(
            f"{source}: labels: {error}; or give metrics that need none: [token_f1, accuracy]"
        ) from error
    names = [TOKEN_PREFIX + name if name in ENTITY_METRICS else name for name in task.metrics]
    return tuple(dict.fromkeys(names))


def check_keys(data: Mapping[str, Any], config: type[Any], source: str, note: str = "") -> None:
    """Check that the keys of plain data are the fields of a config.

    Args:
        data: values by key.
        config: a dataclass.
        source: origin of the data, for messages.
        note: end of the message.

    Raises:
        ConfigError: a key is unknown.
    """
    known = [item.name for item in fields(config)]
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{source}: no key {key!r}; {hint}{note}")


def _check_file_names(task: TaskConfig, source: str) -> None:
    """Check that no name leads out of the folders of the data, the run and the predictions."""
    for key, name in (("name", task.name), *(("splits", name) for name in task.splits)):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: {key}: {name!r} cannot be the name of a file; use letters, digits and "
                ". _ - +"
            )
    for split, value in task.splits.items():
        for file in value.files:
            if not file or os.path.isabs(file) or ".." in Path(file).parts:
                raise ConfigError(
                    f"{source}: splits.{split}.files: {file!r} is not below the data folder; write "
                    "a relative name without .."
                )
        if value.leaderboard_file and not _NAME.fullmatch(value.leaderboard_file):
            raise ConfigError(
                f"{source}: splits.{split}.leaderboard_file: {value.leaderboard_file!r} is not the "
                "name of a file; its folder is that of --leaderboard"
            )
    for name, values in task.settings.items():
        for key in set(values) & set(_PATH_KEYS):
            raise ConfigError(
                f"{source}: settings.{name}.{key}={values[key]!r}: settings cannot name files; "
                f"give {key}= on the command line"
            )


def _check(task: TaskConfig, source: str) -> None:
    def require(holds: object, problem: str) -> None:
        if not holds:
            raise ConfigError(f"{source}: {problem}")

    require(task.splits, "splits is empty; name the files of at least one split")
    for split, value in task.splits.items():
        require(value.files, f"splits.{split}.files is empty")
        part = value.part
        require(
            not part or (len(part) == 2 and 0 <= part[0] < part[1] <= 1),
            f"splits.{split}.part={list(part)}: write two fractions, as in [0, 0.8]",
        )
    required, others = COLUMNS[task.head]
    allowed = (*required, *others)
    for split, columns in _columns_by_split(task):
        for role in columns:
            require(
                role in allowed,
                f"{split}columns.{role}: head {task.head} has the columns {', '.join(allowed)}",
            )
            column = columns[role]
            parts = column if isinstance(column, list) else [column]
            require(
                not any(isinstance(part, (dict, list)) for part in parts),
                f"{split}columns.{role}={column!r}: write the name of a column, or a list of names",
            )
        missing = [role for role in required if role not in columns]
        if task.hypothesis and missing == ["choices"]:
            missing = [role for role in ("text",) if role not in columns]
        if task.head == "rerank" and not {"passages", "positives"} & set(columns):
            missing.append("passages (with labels) or positives")
        require(not missing, f"{split}columns: {', '.join(missing)} missing for head {task.head}")
    default = task.default_settings
    require(
        not default or default in task.settings, f"default_settings={default!r}: not in settings"
    )
    require(task.metrics, "metrics is empty")
    for metric in task.metrics:
        require(
            metric in METRICS[task.head],
            f"metrics: {metric} is none of head {task.head}'s: {', '.join(METRICS[task.head])}",
        )
    if task.head in CLASS_HEADS:
        require(len(task.labels) >= 2, f"labels: head {task.head} needs at least two")
    _check_multilabel(task, require)
    composed = Counter(unicodedata.normalize("NFC", label) for label in task.labels)
    twice = next((label for label, count in composed.items() if count > 1), None)
    require(twice is None, f"labels: {twice!r} occurs twice; labels must differ")
    for key, names in (
        ("label_names", task.label_names),
        ("leaderboard_labels", task.leaderboard_labels),
    ):
        require(not names or len(names) == len(task.labels), f"{key}: not as many as labels")
    positive = task.positive_label
    require(not positive or positive in task.labels, f"positive_label={positive!r}: not in labels")
    require(
        not task.label_range
        or (len(task.label_range) == 2 and task.label_range[0] < task.label_range[1]),
        "label_range: write the lowest and the highest score",
    )
    require(
        not task.hypothesis or (task.head == "choices" and task.hypothesis.count("{}") == 1),
        f"hypothesis={task.hypothesis!r}: is for head choices, with {{}} once for the label",
    )
    require(not task.hypothesis or task.labels, "labels: a task with hypothesis names them")
    require(task.max_passages != 1, "max_passages=1: a query needs 2 or more; 0: all")
    for key in ("max_passages", "random_passages", "stride"):
        require(getattr(task, key) >= 0, f"{key}={getattr(task, key)}: is negative")
    require(task.max_length >= 8, f"max_length={task.max_length}: must be at least 8")
    require(
        task.long_text == "truncate" or task.head in POOLED_HEADS,
        f"long_text={task.long_text}: is for the heads {', '.join(POOLED_HEADS)}, not for "
        f"{task.head}; remove it",
    )
    require(task.max_answer_length > 0, f"max_answer_length={task.max_answer_length}: not positive")


def _check_multilabel(task: TaskConfig, require: Callable[[object, str], None]) -> None:
    thresholds, size = task.thresholds, len(task.labels)
    require(
        not thresholds
        or (task.head == "multilabel" and all(0 < each < 1 for each in thresholds)
            and len(thresholds) in (1, size)),
        f"thresholds={list(thresholds)}: write one number between 0 and 1, or one for each of the "
        f"{size} labels of head multilabel",
    )  # fmt: skip
    require(task.label_separator, "label_separator is empty; write the text between two labels")
    for split, columns in _columns_by_split(task):
        label = columns.get("label")
        require(
            not isinstance(label, list) or (task.head == "multilabel" and len(label) == size),
            f"{split}columns.label: a list of columns is for head multilabel, one column for each "
            f"of the labels {', '.join(task.labels)}",
        )


def _columns_by_split(task: TaskConfig) -> list[tuple[str, Mapping[str, Any]]]:
    own = [
        (f"splits.{name}.", split.columns) for name, split in task.splits.items() if split.columns
    ]
    return [("", task.columns), *own]


OUTSIDE = "O"
"""Label of words that belong to no entity."""


ENTITY_METRICS = ("f1", "precision", "recall")
"""Metrics of entities; with the prefix ``token_``, of words."""


TOKEN_PREFIX = "token_"


_SCHEMES = ("BI", "BIES", "BILU", "BMES", "BMEW")


_AS_IOBES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}


_PATTERNS = (
    re.compile(r"(?P<at>[BIELMSUWbi])[-_:](?P<type>.+)", re.DOTALL),
    re.compile(r"(?P<type>.+)[-_:](?P<at>[BIELMSUW])", re.DOTALL),
)
"""Labels of entities: the position in the entity before or after its type."""


def entity_type(label: str) -> str:
    """Return the type of an entity from the label of a word, without its position in the entity."""
    matches = (pattern.fullmatch(label) for pattern in _PATTERNS)
    return next((match["type"] for match in matches if match), label)


class SchemeError(ValueError):
    """Labels mix a scheme with something else."""


@cache
def entity_labels(labels: tuple[str, ...]) -> Mapping[str, str] | None:
    """Recognise the scheme of labels.

    The position may stand before the type (``B-PER``), after it (``PER-B``) or alone (``B``). BIO
    stands for IOB1 and IOB2, which conlleval's rules for the ends of entities both cover.

    Args:
        labels: the labels of a task.

    Returns:
        Each label in the form that conlleval reads, ``O`` or the positions B, I, E or S with a
        type; None: the labels have no scheme.

    Raises:
        SchemeError: some labels have a position and others have none, or the positions are of no
            scheme.
    """
    named = [label for label in labels if label != OUTSIDE]
    if not named:
        return None
    parsed: dict[str, tuple[str, str]] = {}
    odd: tuple[str, str] | None = None
    for pattern in _PATTERNS:
        found = {label: match for label in named if (match := pattern.fullmatch(label))}
        if len(found) == len(named):
            parsed = {label: (match["at"], match["type"]) for label, match in found.items()}
            break
        if odd is None and {"B", "I"} & {match["at"] for match in found.values()}:
            odd = next(iter(found)), next(label for label in named if label not in found)
    else:
        if set(named) <= set(_AS_IOBES) and "B" in named:
            parsed = {label: (label, "") for label in named}
        elif odd:
            raise SchemeError(
                f"{odd[0]!r} has a position in an entity, as in BIO, but {odd[1]!r} has none; "
                f"write every label but {OUTSIDE} with its position"
            )
        else:
            return None
    positions = {at.upper() for at, _ in parsed.values()}
    if not any(positions <= set(scheme) for scheme in _SCHEMES):
        raise SchemeError(
            f"the positions {', '.join(sorted(positions))} are of no scheme (BIO, IOBES, BILOU, "
            "BMES)"
        )
    as_iobes = {label: f"{_AS_IOBES[at.upper()]}-{name}" for label, (at, name) in parsed.items()}
    return {OUTSIDE: OUTSIDE, **as_iobes}


def entities(
    labels: tuple[str, ...], sentences: Sequence[Sequence[str]]
) -> set[tuple[str, int, int]]:
    """Return the entities of sentences, as conlleval finds them: type, first and last word.

    Args:
        labels: the labels of the task; they have a scheme.
        sentences: labels of the words of each sentence.
    """
    from seqeval.metrics.sequence_labeling import get_entities

    scheme = entity_labels(labels)
    assert scheme is not None
    return set(get_entities([[scheme[label] for label in tags] for tags in sentences]))
