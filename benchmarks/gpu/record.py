"""Results of a part of the GPU suite: one JSON file per part, written after every item.

Items finished by the same source on the same kind of device are skipped. The running item is
recorded as well, so that a crash can be attributed to it.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import provenance


class UnfinishedError(Exception):
    """The item is unfinished and continues at the next start."""


# A result, with ``wrong`` (list of str) if a check failed and ``error`` if the item could not run.
Item = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of the suite.

    Attributes:
        out: folder of the results.
        work: folder of shards, runs and exports.
        small: small sizes for a CPU, which test the script only.
        minutes: time after which no item starts.
        corpus: shard prefix and tokenizer of the learn part; None: text of this machine.
    """

    part: str
    out: Path
    work: Path
    device: str
    small: bool
    minutes: float
    force: bool = False
    corpus: tuple[str, str] | None = None


@dataclass
class Record:
    """Results of one part.

    Args:
        options: of the suite.

    Attributes:
        left: items that were not started for lack of time.
    """

    options: Options
    items: dict[str, Item] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + 60 * self.options.minutes
        self._provenance = provenance(self.options.device)
        self._key = {
            "source": self._provenance["source"],
            "hardware": self._provenance["hardware"],
            "small": self.options.small,
        }
        self.crashed: dict[str, dict[str, str]] = {}
        path = result_path(self.options)
        if path.exists() and not self.options.force:
            earlier = json.loads(path.read_text())
            self.items = {
                name: item
                for name, item in earlier["items"].items()
                if self._key.items() <= item.items()
            }
            self.crashed = earlier["crashed"] if earlier["key"] == self._key else {}
        self._write()

    def run(self, name: str, work: Callable[[], Item]) -> None:
        """Run an item unless it is done or crashed; an exception becomes its ``error``.

        Raises:
            SystemExit: the device is unusable in this process after an error.
        """
        earlier = self.items.get(name)
        if earlier is not None and ("error" not in earlier or earlier.get("crashed")):
            return
        self.starting(name)
        start = time.monotonic()
        try:
            if self.seconds_left < 0:
                raise UnfinishedError
            result = work()
        except UnfinishedError:
            self.left.append(name)
            self._write()
            return
        except Exception as failure:
            # Continue with the other items.
            traceback.print_exc()
            if self.options.device == "cuda" and not device_works():
                raise SystemExit("the device does not respond") from failure
            result = {"error": f"{type(failure).__name__}: {failure}"[:2000]}
        seconds = round(time.monotonic() - start, 1)
        self.items[name] = {**result, **self._key, "seconds": seconds}
        self._write()
        state = "error" if "error" in result else "WRONG" if result.get("wrong") else "done"
        print(f"[{self.options.part}] {name}: {state} in {seconds} s", flush=True)

    @property
    def seconds_left(self) -> float:
        """Return the time left in which items may start."""
        return self._deadline - time.monotonic()

    def starting(self, name: str, detail: str = "") -> None:
        """Record the running item and its detail."""
        self._write({"item": name, "detail": detail})

    def finish(self) -> None:
        """Write the final state."""
        self._write()

    def _write(self, running: Mapping[str, str] | None = None) -> None:
        write_json(
            result_path(self.options),
            {
                "part": self.options.part,
                **self._provenance,
                "key": self._key,
                "items": self.items,
                "left": self.left,
                "crashed": self.crashed,
                "running": running,
            },
        )


def result_path(options: Options) -> Path:
    """Return the result file of a part."""
    return options.out / f"{options.part}.json"


def device_works() -> bool:
    """Return whether the GPU still works in this process; some kernel errors make it unusable."""
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def note_crash(options: Options, reason: str, *, lasting: bool = True) -> bool:
    """Record the crash of a part's process with the item that was running.

    If the running item recorded a detail, the item is repeated without it; otherwise the item is an
    error and the part continues without it.

    Args:
        options: of the part.
        reason: of the crash.
        lasting: the same source on the same hardware would crash again, so skip the item.

    Returns:
        Whether the part can be started again.
    """
    path = result_path(options)
    content = json.loads(path.read_text()) if path.exists() else None
    if content is None or content["running"] is None:
        return False
    running = content["running"]
    if running["detail"]:
        content["crashed"].setdefault(running["item"], {})[running["detail"]] = reason
    else:
        error = {"error": reason, "crashed": lasting, **content["key"], "seconds": 0}
        content["items"][running["item"]] = error
    content["running"] = None
    write_json(path, content)
    return True
