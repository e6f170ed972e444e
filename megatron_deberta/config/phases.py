"""Phases, batch ramps and durations in tokens, resolved to segments with one config each.

A segment is a range of steps with one batch size, row length and peak learning rate. Every
duration is a function of the config alone, so segments are the same on every layout and resume.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_deberta.config.schema import DataConfig, RunConfig, check_ranges, refuse
from megatron_deberta.errors import ConfigError

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


def resolve_durations(config: RunConfig, steps: int | None, source: str) -> RunConfig:
    """Replace durations in tokens, and those of phases, by steps.

    Args:
        config: a merged config.
        steps: ``train.steps`` of its last layer, which may not differ; None: not given.
        source: that layer, for messages.

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
    total = parts[-1].end
    if steps not in (None, total):
        raise ConfigError(
            f"{source}: train.steps={steps}, but train.{'phases' if train.phases else 'tokens'} "
            f"give {total} steps; remove it, or end earlier with train.exit_step"
        )
    warmup, decay = optimizer.warmup_steps, optimizer.decay_steps
    if optimizer.warmup_tokens is not None:
        warmup = steps_of_tokens(parts, optimizer.warmup_tokens)
    if optimizer.decay_tokens is not None:
        before = sum(part.tokens for part in parts) - optimizer.decay_tokens
        decay = total - steps_of_tokens(parts, before, round_up=False)
    return replace(
        config,
        train=replace(train, steps=total),
        optimizer=replace(optimizer, warmup_steps=warmup, decay_steps=decay),
    )


def check_durations(config: RunConfig) -> None:
    """Check that durations do not contradict each other.

    Raises:
        ConfigError: names the keys.
    """
    refuse(config, _duration_problems(config))


def _duration_problems(config: RunConfig) -> Iterator[str]:
    train, optimizer = config.train, config.optimizer
    given = (name for name in ("phases", "tokens", "ramp_from") if getattr(train, name))
    if variable := next(given, ""):
        if config.finetune.task:
            yield f"train.{variable} is for pretraining; use finetune.epochs"
        if config.data.short_steps:
            yield (
                f"$data.short_steps with train.{variable}; write a phase with a shorter "
                "data.sequence_length instead"
            )
    for name in ("warmup", "decay"):
        if getattr(optimizer, f"{name}_tokens") and getattr(optimizer, f"{name}_fraction"):
            yield (
                f"$optimizer.{name}_tokens and $optimizer.{name}_fraction contradict each other; "
                "set one of them to null"
            )
    if train.phases and train.ramp_from:
        yield "$train.ramp_from with phases; write the ramp into a phase"
    fractions = [phase.fraction for phase in train.phases if phase.fraction is not None]
    if fractions and (len(fractions) < len(train.phases) or abs(sum(fractions) - 1) > 1e-6):
        yield (
            f"train.phases: fraction is {fractions}, with {len(train.phases)} phases; give all of "
            "them a fraction, 1 in total, or none"
        )
    if train.phases and train.tokens and not fractions:
        yield "$train.tokens with phases; give each phase its tokens"


def last_step(config: RunConfig) -> int:
    """Return the number of optimizer steps after which a run is finished."""
    return config.train.exit_step or config.train.steps


@functools.lru_cache(maxsize=16)
def segments(config: RunConfig) -> tuple[Segment, ...]:
    """Return the segments of a run, in order; one without phases and batch ramp.

    Raises:
        ConfigError: a phase is malformed, or its ramp does not fit.
    """
    levels = [
        (number, phase, level, steps)
        for number, (phase, steps_of_phase, tokens) in enumerate(_phases(config))
        for level, steps in _levels(phase, steps_of_phase, tokens, number)
    ]
    total = sum(steps for *_, steps in levels)
    parts: list[Segment] = []
    first_step = first_sample = 0
    for number, phase, level, steps in levels:
        stage = _stage(parts[-1] if parts else None, level.data, first_sample)
        ended = _ending_at(level, total), _ending_at(phase, total)
        parts.append(Segment(number, first_step, steps, first_sample, stage, *ended))
        first_step += steps
        first_sample += steps * level.train.global_batch_size
    return tuple(parts)


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
    plain = replace(config, train=replace(train, phases=(), tokens=None))
    if not train.phases:
        return [(plain, 0 if train.tokens else train.steps, train.tokens or 0)]
    found, done = [], 0.0
    for number, phase in enumerate(train.phases):
        changed = _with_values(plain, phase.overrides, number)
        steps, tokens = phase.steps or 0, phase.tokens or 0
        if phase.fraction is not None:
            whole = train.tokens or train.steps
            begin, done = done, done + phase.fraction
            share = round(done * whole) - round(begin * whole)
            steps, tokens = (0, share) if train.tokens else (share, 0)
            if share < 1:
                raise ConfigError(
                    f"train.phases[{number}]: fraction={phase.fraction:g} of {whole} is less than "
                    "1; give it more"
                )
        found.append((changed, steps, tokens))
    return found


def _with_values(
    config: RunConfig, overrides: tuple[tuple[str, Any], ...], number: int
) -> RunConfig:
    """Return the config of a phase."""
    for name, value in overrides:
        section, _, key = name.partition(".")
        values = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: values})
    try:
        check_ranges(config)
    except ConfigError as error:
        raise ConfigError(f"train.phases[{number}]: {error}") from error
    return config


def _levels(phase: RunConfig, steps: int, tokens: int, number: int) -> list[tuple[RunConfig, int]]:
    """Return config and steps of each part of a phase: short rows or the ramp, then the rest."""
    train, data, length = phase.train, phase.data, phase.data.sequence_length
    full = train.global_batch_size * length
    if data.short_steps:
        short = replace(phase, data=replace(data, sequence_length=data.short_sequence_length))
        if data.short_steps >= steps:
            return [(short, steps)]
        return [(short, data.short_steps), (phase, steps - data.short_steps)]
    if train.ramp_from is None:
        return [(phase, steps or -(-tokens // full))]
    sizes = _ramp_sizes(phase, number)
    if train.ramp_tokens is not None:
        counts = [-(-train.ramp_tokens // (len(sizes) * size * length)) for size in sizes]
    else:
        assert train.ramp_steps is not None
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
    assert first is not None
    if first >= last or increment is None or (last - first) % increment:
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


def _stage(before: Segment | None, data: DataConfig, first_sample: int) -> Stage:
    """Return the sequence of rows of a segment that begins with a sample."""
    if before is None:
        return FIRST_STAGE._replace(is_short=bool(data.short_steps))
    if data.short_steps:
        return Stage(0, first_sample)
    same = all(getattr(before.config.data, key) == getattr(data, key) for key in _ORDER_KEYS)
    return before.stage if same else Stage(before.stage.number + 1, first_sample)


def _ending_at(config: RunConfig, total: int) -> RunConfig:
    return replace(
        config,
        data=replace(config.data, short_steps=0),
        train=replace(
            config.train,
            steps=total,
            ramp_from=None,
            ramp_increment=None,
            ramp_steps=None,
            ramp_tokens=None,
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
