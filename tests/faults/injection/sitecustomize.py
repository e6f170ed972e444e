"""Stop a process at a chosen point of a job over text, for ``tests.faults.text_kills``.

Python imports this file if its folder is on ``PYTHONPATH``. ``TEXT_KILLS`` names a folder; while
``plan.json`` is in it (``point``, ``entry``), the first process that reaches the point for the
given time creates ``token`` with its id and waits there until ``go`` exists.
"""

import functools
import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

TEXT = "megatron_deberta.text"
POINTS = {
    "read": (f"{TEXT}.preprocess.worker", "UnitWorker", "_read"),
    "encode": (f"{TEXT}.preprocess.worker", "UnitWorker", "_encode_batch"),
    "part": (f"{TEXT}.preprocess.worker", "_Part", "commit"),
    "record": (f"{TEXT}.jobs.folder", "JobFolder", "record"),
    "copy": ("megatron_deberta.data.shards.writer", "ShardLayout", "write_index"),
    "hash": ("megatron_deberta.data.shards.writer", "ShardLayout", "idx_sha256"),
    "rename": ("megatron_deberta.data.shards.writer", "", "rename_staged"),
    "publish": (f"{TEXT}.deduplicate.pipeline", "", "take_parts"),
}
UNIT_BYTES = 20_000
WAIT_SECONDS = 60.0


class Injection:
    """Counts how often this process reaches each point.

    Args:
        folder: of the plan.
    """

    def __init__(self, folder: str) -> None:
        """Wrap the functions of all points."""
        self.folder = folder
        self.reached: Counter[str] = Counter()
        for point, (module_name, class_name, name) in POINTS.items():
            module = importlib.import_module(module_name)
            owner = getattr(module, class_name) if class_name else module
            setattr(owner, name, self.wrapped(point, getattr(owner, name)))
        stages = importlib.import_module(f"{TEXT}.jobs.stages")
        stages.TaskFolder.finish = self.wrapped("", stages.TaskFolder.finish)
        pipeline = importlib.import_module(f"{TEXT}.deduplicate.pipeline")
        # The command has no option for it.
        pipeline.deduplicate.__kwdefaults__["unit_bytes"] = UNIT_BYTES

    def wrapped(self, point: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the point before it; "": the stage of a task's folder."""

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            self.reach(point or args[0].path.parent.name)
            return original(*args, **kwargs)

        return function

    def reach(self, point: str) -> None:
        """Wait if this is the chosen point."""
        self.reached[point] += 1
        try:
            with open(f"{self.folder}/plan.json", encoding="utf-8") as stream:
                plan = json.load(stream)
            if plan["point"] != point or plan["entry"] > self.reached[point]:
                return
            with open(f"{self.folder}/token", "x", encoding="utf-8") as stream:
                stream.write(str(os.getpid()))
        except (FileNotFoundError, FileExistsError):
            return
        end = time.monotonic() + WAIT_SECONDS
        while not os.path.exists(f"{self.folder}/go") and time.monotonic() < end:
            time.sleep(0.005)


if "TEXT_KILLS" in os.environ:
    Injection(os.environ["TEXT_KILLS"])
