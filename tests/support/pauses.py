"""Pauses of one rank in a chosen phase of training, in which a campaign injects a fault.

The environment variable ``PAUSE`` selects the rank, the phase and the occurrence of the phase. The
rank creates the file ``token`` there and waits until it is killed or the file ``go`` exists in the
same folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.observe.progress import Section

PAUSE = "MEGATRON_DEBERTA_TEST_PAUSE"
"""Environment variable with a ``Pause`` as JSON."""
WAIT_SECONDS = 60.0
_ENGINE = ("megatron_deberta.engine.deepspeed_engine", "DeepSpeedZeroEngine")
_FORWARD = ("megatron_deberta.objectives.language_modelling", "MaskedLanguageModel", "forward")
_BEAT = ("megatron_deberta.cluster.watchdog.heartbeat", "Heartbeat", "enter")


@dataclass(frozen=True, slots=True)
class Phase:
    """Function at which a rank pauses.

    Attributes:
        place: its module, its class or an empty string, and its name.
        section: section of the rank's heartbeat during the pause. A save in the background runs in
            any section.
        when: given its arguments, whether a call is the phase.
        is_after: pause after the function, not before it.
    """

    place: tuple[str, str, str]
    section: Section
    when: Callable[..., bool] = lambda *_: True
    is_after: bool = False


def _entering(section: Section) -> Phase:
    """Return the phase that begins after ``Heartbeat.enter(self, section)``."""
    return Phase(_BEAT, section, lambda _, entered, *__: entered is section, is_after=True)


PHASES: Mapping[str, Phase] = {
    "start-up": Phase(("megatron_deberta.train.run", "", "build_engine"), Section.STARTUP),
    "data": _entering(Section.DATA),
    "forward": Phase(_FORWARD, Section.STEP, lambda _, batch, seeds: seeds is not None),
    "backward": Phase((*_ENGINE, "backward"), Section.STEP),
    "optimizer": Phase((*_ENGINE, "step"), Section.STEP),
    "save, before the commit": Phase(
        ("megatron_deberta.checkpoint.writer", "", "write"), Section.SAVE
    ),
    "save, after the commit": Phase(
        ("megatron_deberta.checkpoint.writer", "", "commit"), Section.SAVE, is_after=True
    ),
    "retention": Phase(("megatron_deberta.checkpoint.retention", "", "delete"), Section.SAVE),
    "validation": Phase(_FORWARD, Section.EVALUATION, lambda _, batch, seeds, **__: seeds is None),
    "end": _entering(Section.END),
}


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause.

    Attributes:
        rank: which rank pauses.
        phase: one of ``PHASES``.
        count: occurrence of the phase on this rank, from 1.
        token: file to create there.
    """

    rank: int
    phase: str
    count: int
    token: str

    def variables(self) -> dict[str, str]:
        """Return the environment variable."""
        return {PAUSE: json.dumps(asdict(self))}


def install(environment: Mapping[str, str]) -> None:
    """Wrap the functions of the phase if the environment names a pause of this rank."""
    if PAUSE not in environment:
        return
    pause = Pause(**json.loads(environment[PAUSE]))
    if str(pause.rank) != environment["RANK"]:
        return
    phase, reached = PHASES[pause.phase], 0

    def reach() -> None:
        nonlocal reached
        reached += 1
        if reached == pause.count:
            token = Path(pause.token)
            token.touch()
            end = time.monotonic() + WAIT_SECONDS
            while not token.with_name("go").exists() and time.monotonic() < end:
                time.sleep(0.002)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            is_phase = phase.when(*args, **kwargs)
            if is_phase and not phase.is_after:
                reach()
            result = original(*args, **kwargs)
            if is_phase and phase.is_after:
                reach()
            return result

        return function

    module_name, class_name, name = phase.place
    module = importlib.import_module(module_name)
    owner = getattr(module, class_name) if class_name else module
    setattr(owner, name, wrapped(getattr(owner, name)))
