"""Phases, batch ramps and durations in tokens, resolved to segments with one config each.

A segment is a range of steps with one batch size, row length and peak learning rate. Every
duration is a function of the config alone, so segments are the same on every layout and resume.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_deberta.config.merge import merge_layers, parse_overrides
from megatron_deberta.config.ranges import check_ranges
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.config.yaml_reader import PlainScalar
from megatron_deberta.errors import ConfigError

PHASES_KEY = "phases"
"""Top-level key of a run file: a list of phases."""

DURATIONS = ("steps", "tokens")
_DURATION = re.compile(r"[1-9][0-9]*(_[0-9]+)*")

PHASE_KEYS = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "data": "train validation sequence_length packing attend_across_documents",
        "objective": "mask_probability mask_token_probability random_token_probability "
        "max_span_words masking autoregressive_fraction",
        "optimizer": "learning_rate",
        "train": "global_batch_size micro_batch_size ramp_from ramp_increment ramp_steps "
        "ramp_tokens",
    }.items()
    for key in keys.split()
)
"""Keys that a phase may change."""

_ORDER_KEYS = ("train", "sequence_length", "packing")
"""Keys of ``data`` with which the order of rows begins anew."""


class Stage(NamedTuple):
    """Consecutive segments that read the same sequence of rows.

    Attributes:
        number: from 0; extends the key of the order.
        first_sample: global index of the first sample.
        is_short: the rows are those of ``data.short_steps``, which have an order of their own.
    """

    number: int = 0
    first_sample: int = 0
    is_short: bool = False


FIRST_STAGE = Stage()
"""The rows of a run without phases, and of a run's first phase."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps with the same config.

    Attributes:
        phase: number of the phase, from 0.
        first_step: completed steps at its start.
        steps: number of steps.
        first_sample: samples of all earlier steps.
        stage: sequence of rows that it reads.
        config: config of these steps, without phases, batch ramp and ``data.short_steps``;
            ``train.steps`` is that of the run.
        phase_config: the same with the batch size and row length at the end of the phase.
    """

    phase: int
    first_step: int
    steps: int
    first_sample: int
    stage: Stage
    config: RunConfig
    phase_config: RunConfig

    @property
    def end(self) -> int:
        """Completed steps at its end."""
        return self.first_step + self.steps

    @property
    def tokens(self) -> int:
        """Tokens of its steps, padding included."""
        config = self.config
        return self.steps * config.data.sequence_length * config.train.global_batch_size


def phase_lines(phases: Any, source: str) -> list[str]:
    """Convert the phases of a run file to the values of ``train.phases``.

    Args:
        phases: a list of mappings, with ``steps`` or ``tokens``, and ``section.key`` to value.
        source: the file, for messages.

    Raises:
        ConfigError: not such a list.
    """
    if not isinstance(phases, list) or not all(isinstance(phase, Mapping) for phase in phases):
        raise ConfigError(
            f"{source}: {PHASES_KEY} is not a list of mappings; write `- steps: 1000` with lines "
            "such as `data.sequence_length: 128` below"
        )
    for phase in phases:
        for key, value in phase.items():
            if isinstance(value, Mapping):
                raise ConfigError(
                    f"{source}: {PHASES_KEY}: {key} is a section; write {key}.KEY: VALUE"
                )
    return [shlex.join(f"{k}={_text(v)}" for k, v in phase.items()) for phase in phases]


def _text(value: Any) -> str:
    if isinstance(value, PlainScalar):
        return value.text
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(scalar: PlainScalar) -> Any:
    """Return the number of an item if it is written as JSON writes it, otherwise its text."""
    is_same = isinstance(scalar.value, int | float) and json.dumps(scalar.value) == scalar.text
    return scalar.value if is_same else scalar.text


def resolve_durations(config: RunConfig, last_layer: tuple[str, Mapping[str, Any]]) -> RunConfig:
    """Replace durations in tokens, and those of phases, by steps.

    Args:
        config: a merged config.
        last_layer: its last source and layer; it may not set ``train.steps`` to another value.

    Returns:
        The config with ``train.steps``, ``optimizer.warmup_steps`` and ``optimizer.decay_steps``.

    Raises:
        ConfigError: durations are missing, or contradict each other.
    """
    train, optimizer = config.train, config.optimizer
    if not (train.phases or train.tokens or optimizer.warmup_tokens or optimizer.decay_tokens):
        return config
    check_ranges(config)
    check_durations(config)
    parts = segments(config)
    steps = parts[-1].end
    source, layer = last_layer
    given = (layer.get("train") or {}).get("steps", steps)
    given = given.value if isinstance(given, PlainScalar) else given
    if given != steps:
        raise ConfigError(
            f"{source}: train.steps={given}, but train.{'phases' if train.phases else 'tokens'} "
            f"give {steps} steps; remove it, or end earlier with train.exit_step"
        )
    warmup, decay = optimizer.warmup_steps, optimizer.decay_steps
    if optimizer.warmup_tokens:
        warmup = steps_of_tokens(parts, optimizer.warmup_tokens)
    if optimizer.decay_tokens:
        total = sum(part.tokens for part in parts)
        decay = steps - steps_of_tokens(parts, total - optimizer.decay_tokens, round_up=False)
    return replace(
        config,
        train=replace(train, steps=steps),
        optimizer=replace(optimizer, warmup_steps=warmup, decay_steps=decay),
    )


def check_durations(config: RunConfig) -> None:
    """Check that durations do not contradict each other.

    Raises:
        ConfigError: names the keys.
    """
    train, optimizer, data = config.train, config.optimizer, config.data
    variable = [
        name
        for name, value in (
            ("phases", train.phases), ("tokens", train.tokens), ("ramp_from", train.ramp_from)
        )
        if value
    ]  # fmt: skip
    if variable and config.finetune.task:
        raise ConfigError(f"train.{variable[0]} is for pretraining; use finetune.epochs")
    if variable and data.short_steps:
        raise ConfigError(
            f"data.short_steps={data.short_steps} with train.{variable[0]}; write a phase with a "
            "shorter data.sequence_length instead"
        )
    for name in ("warmup", "decay"):
        tokens, share = (getattr(optimizer, f"{name}_{unit}") for unit in ("tokens", "fraction"))
        if tokens and share:
            raise ConfigError(
                f"optimizer.{name}_tokens={tokens} and optimizer.{name}_fraction={share:g} "
                "contradict each other; set one of them to 0"
            )
    if train.phases and train.ramp_from:
        raise ConfigError(
            f"train.ramp_from={train.ramp_from} with phases; write the ramp into a phase"
        )
    if train.phases and train.tokens:
        raise ConfigError(f"train.tokens={train.tokens} with phases; give each phase its tokens")


@functools.lru_cache(maxsize=16)
def segments(config: RunConfig) -> tuple[Segment, ...]:
    """Return the segments of a run, in order; one without phases and batch ramp.

    Raises:
        ConfigError: a phase is malformed, or its ramp does not fit.
    """
    parts: list[Segment] = []
    for number, (phase, steps, tokens) in enumerate(_phases(config)):
        for level, length in _levels(phase, steps, tokens, number):
            parts.append(_next_segment(parts, number, length, level, phase))
    total = parts[-1].end
    return tuple(
        replace(part, config=_ending_at(part.config, total), phase_config=_ending_at(
            part.phase_config, total
        ))
        for part in parts
    )  # fmt: skip


def segment_at(config: RunConfig, step: int) -> Segment:
    """Return the segment of the step after ``step`` completed steps; the last one at the end."""
    parts = segments(config)
    return next((part for part in parts if step < part.end), parts[-1])


def steps_of_tokens(parts: tuple[Segment, ...], tokens: int, *, round_up: bool = True) -> int:
    """Convert a number of tokens to a number of steps.

    Args:
        parts: segments of the run.
        tokens: tokens since the start of the run.
        round_up: return the first step at which ``tokens`` are consumed; False: the last step at
            which no more than ``tokens`` are.

    Returns:
        Completed steps; the last step of the run if it has fewer tokens.
    """
    before = 0
    for part in parts:
        if tokens <= before + part.tokens:
            per_step = part.tokens // part.steps
            left = max(0, tokens - before)
            return part.first_step + (-(-left // per_step) if round_up else left // per_step)
        before += part.tokens
    return parts[-1].end


def _phases(config: RunConfig) -> list[tuple[RunConfig, int, int]]:
    """Return config, steps and tokens of each phase; one of the two is 0."""
    train = config.train
    plain = replace(config, train=replace(train, phases=(), tokens=0))
    if not train.phases:
        return [(plain, 0 if train.tokens else train.steps, train.tokens)]
    return [_phase(plain, text, number) for number, text in enumerate(train.phases)]


def _phase(config: RunConfig, text: str, number: int) -> tuple[RunConfig, int, int]:
    source = f"{PHASES_KEY}[{number}]"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {text!r}: {error}") from error
    durations = {name: 0 for name in DURATIONS}
    overrides = []
    for word in words:
        name, _, value = word.partition("=")
        if name in DURATIONS:
            if not _DURATION.fullmatch(value):
                raise ConfigError(f"{source}: {word} is not a number above 0")
            durations[name] = int(value)
        elif name in PHASE_KEYS:
            overrides.append(word)
        else:
            raise ConfigError(
                f"{source}: {name} cannot change in a phase; these can: steps, tokens, "
                f"{', '.join(sorted(PHASE_KEYS))}"
            )
    if bool(durations["steps"]) == bool(durations["tokens"]):
        raise ConfigError(f"{source}: give either steps or tokens, as in steps: 1000")
    phase = merge_layers([(source, parse_overrides(overrides, source))], config)
    check_ranges(phase)
    return phase, durations["steps"], durations["tokens"]


def _levels(phase: RunConfig, steps: int, tokens: int, number: int) -> list[tuple[RunConfig, int]]:
    """Return config and steps of each part of a phase: short rows or the ramp, then the rest."""
    train, data, length = phase.train, phase.data, phase.data.sequence_length
    full = train.global_batch_size * length
    if data.short_steps:
        short = replace(phase, data=replace(data, sequence_length=data.short_sequence_length))
        if data.short_steps >= steps:
            return [(short, steps)]
        return [(short, data.short_steps), (phase, steps - data.short_steps)]
    if not train.ramp_from:
        return [(phase, steps or -(-tokens // full))]
    sizes = _ramp_sizes(phase, number)
    if train.ramp_tokens:
        counts = [-(-train.ramp_tokens // (len(sizes) * size * length)) for size in sizes]
    else:
        ends = [train.ramp_steps * level // len(sizes) for level in range(len(sizes) + 1)]
        counts = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    left = tokens - sum(size * count for size, count in zip(sizes, counts, strict=True)) * length
    rest = steps - sum(counts) if steps else -(-left // full)
    if rest < 1 or min(counts) < 1:
        raise ConfigError(
            f"train.ramp_steps={train.ramp_steps}, train.ramp_tokens={train.ramp_tokens} of phase "
            f"{number} need at least {len(sizes)} steps and must be shorter than the phase"
        )
    ramp = [
        (replace(phase, train=replace(train, global_batch_size=size)), count)
        for size, count in zip(sizes, counts, strict=True)
    ]
    return [*ramp, (phase, rest)]


def _ramp_sizes(phase: RunConfig, number: int) -> range:
    train = phase.train
    first, increment, last = train.ramp_from, train.ramp_increment, train.global_batch_size
    if first >= last or increment < 1 or (last - first) % increment:
        raise ConfigError(
            f"train.ramp_from={first} does not reach train.global_batch_size={last} of phase "
            f"{number} by steps of train.ramp_increment={increment}; use an increment that divides "
            "the difference"
        )
    if bool(train.ramp_steps) == bool(train.ramp_tokens):
        raise ConfigError(
            f"train.ramp_from={first}: set either train.ramp_steps or train.ramp_tokens"
        )
    return range(first, last, increment)


def _next_segment(
    parts: list[Segment], number: int, steps: int, level: RunConfig, phase: RunConfig
) -> Segment:
    if not parts:
        stage = FIRST_STAGE._replace(is_short=bool(level.data.short_steps))
        return Segment(number, 0, steps, 0, stage, level, phase)
    before = parts[-1]
    first = before.first_sample + before.steps * before.config.train.global_batch_size
    if level.data.short_steps:
        return Segment(number, before.end, steps, first, Stage(0, first), level, phase)
    same = all(getattr(before.config.data, key) == getattr(level.data, key) for key in _ORDER_KEYS)
    stage = before.stage if same else Stage(before.stage.number + 1, first)
    return Segment(number, before.end, steps, first, stage, level, phase)


def _ending_at(config: RunConfig, total: int) -> RunConfig:
    return replace(
        config,
        data=replace(config.data, short_steps=0),
        train=replace(
            config.train, steps=total, ramp_from=0, ramp_increment=0, ramp_steps=0, ramp_tokens=0
        ),
    )


def phases_of(config: RunConfig) -> list[list[Segment]]:
    """Return the segments of each phase, of steps with one row length."""
    groups = itertools.groupby(
        segments(config), key=lambda part: (part.phase, part.config.data.sequence_length)
    )
    return [list(parts) for _, parts in groups]


def describe_phases(config: RunConfig) -> list[str]:
    """Describe each phase of a run in a line."""
    lines = []
    for parts in phases_of(config):
        last, train = parts[-1].config, parts[-1].config.train
        sizes = f"{train.global_batch_size:,}"
        if len(parts) > 1:
            sizes = f"{parts[0].config.train.global_batch_size:,} to {sizes}"
        lines.append(
            f"steps {parts[0].first_step + 1:,} to {parts[-1].end:,}: {sizes} sequences of "
            f"{last.data.sequence_length:,} tokens, masking {last.objective.mask_probability:g}, "
            f"peak rate {last.optimizer.learning_rate:g}, "
            f"{sum(part.tokens for part in parts):,} tokens"
        )
    return lines
