"""Change files of every kind that the package reads at random; reading never ends in a traceback.

Each change is determined by its kind and number. A file either is read or is refused with an error
of the package's own types (or ``OSError``), within ten seconds. Each thousand of a kind appends one
JSON line to the output; thousands that are there are skipped, so the campaign can be interrupted.
Lines about other code do not count.

  python -m tests.faults.hostile_files                       # 10,000 changes of each kind
  python -m tests.faults.hostile_files --kind lock --number 17   # repeat one change
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import provenance
from benchmarks.tables.faults import HOSTILE_FILES_CODE
from megatron_deberta.errors import MegatronDebertaError
from tests.faults.hostile_kinds import RUN_KINDS, Kind
from tests.faults.hostile_result_kinds import RESULT_KINDS
from tests.faults.hostile_task_kinds import TASK_KINDS

KINDS = (*RUN_KINDS, *TASK_KINDS, *RESULT_KINDS)
OUTPUT = RESULTS / "hostile_files.jsonl"
PER_LINE = 1000
LIMIT_SECONDS = 10
MEMORY_BYTES = 8 << 30

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 10**15, -(10**15), 2**63, 2**64, 10**30, 10**400, 0.5,
    -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), "", "0", "-1", "abc", "1e999",
    "a\0b", "\ud800", "\x1b[2J", "\u202e", "../../../etc/passwd", "/dev/zero", "a" * 100_000,
    "${oc.env:HOME}", "???", "!!python/object", "%s%n", [], {}, [[]], [1, "2"], {"a": 1}, {"": {}},
    [{}], [None], list(range(1000)),
)  # fmt: skip
DEPTHS = (21, 150, 250, 1500, 100_000)
_DEEP = "nested here"


class TooSlow(BaseException):
    """Reading takes longer than the limit; no subclass of the errors that files may raise."""


def mutate(content: bytes, kind: Kind, number: int) -> bytes:
    """Return a changed copy of a file's content."""
    rng = random.Random(f"{kind.name} {number}")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if kind.syntax == "binary" or rng.random() < 0.4:
            content = _change_bytes(content, rng)
        else:
            content = _change_values(content, kind.syntax, rng)
    return content


def _change_bytes(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 64)), len(content) - place)
    how = rng.choice(("flip", "cut", "delete", "repeat", "random", "insert", "fill", "empty"))
    if how == "flip" and place < len(content):
        changed = bytes([content[place] ^ 1 << rng.randrange(8)])
        return content[:place] + changed + content[place + 1 :]
    if how == "cut":
        return content[:place]
    if how == "delete":
        return content[:place] + content[place + length :]
    if how == "repeat":
        part = content[place : place + rng.randrange(1, 200)]
        return content[:place] + part * rng.choice((2, 100)) + content[place:]
    if how == "empty":
        return rng.choice((b"", b"\n", b"\0" * 100, b"null", b"[]", b"{}", b"\xff\xfe", b"1", b'"'))
    new = rng.choice((rng.randbytes(length + 1), b"\n", b"\0", b"\x1b[2J", b"{", b"\xed\xa0\x80"))
    if how == "fill":
        new = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * length
    kept = content[place:] if how == "insert" else content[place + length :]
    return content[:place] + new + kept


def _change_values(content: bytes, syntax: str, rng: random.Random) -> bytes:
    """Change a value, key or element of parsed content, which may be damaged already."""
    try:
        text = content.decode()
        parse = yaml.safe_load if syntax == "yaml" else json.loads
        lines = text.splitlines() if syntax == "lines" else [text]
        index = rng.randrange(len(lines))
        lines[index] = _dump(_changed(parse(lines[index]), rng), syntax, rng)
    except (ValueError, IndexError, RecursionError, yaml.YAMLError):
        return _change_bytes(content, rng)
    return "\n".join([*lines, *[""] * (syntax == "lines")]).encode(errors="surrogatepass")


def _changed(data: Any, rng: random.Random) -> Any:
    """Change one place of a tree, found by a walk of random length."""
    root = [data]
    parent: Any = root
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    how = rng.choice(("replace", "replace", "replace", "remove", "add", "rename", "other"))
    if how == "remove" and parent is not root:
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[rng.choice(("unknown", "", "\x1b[2J", "\ud800", "a\0"))] = rng.choice(VALUES)
    elif how == "add" and parent is not root:
        parent.insert(key, rng.choice(VALUES))
    elif how == "rename" and isinstance(parent, dict):
        parent[rng.choice((f"{key}x", f" {key}", str(key).upper(), "1"))] = parent.pop(key)
    elif how == "other":
        parent[key] = {str: 1, int: "1", float: "x"}.get(type(parent[key]), _DEEP)
    else:
        parent[key] = rng.choice((*VALUES, _DEEP, _DEEP))
    return root[0]


def _dump(data: Any, syntax: str, rng: random.Random) -> str:
    if syntax == "yaml":
        text: str = yaml.safe_dump(data)
        if rng.random() < 0.1:
            extra = ("[a]: 1", "? {a: 1}\n: 2", "&a b: *a", "!!set {a}", "a: 2026-13-45", "1: 2")
            text = f"{rng.choice(extra)}\n{text}"
    else:
        text = json.dumps(data)
    depth = rng.choice(DEPTHS)
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    quoted = json.dumps(_DEEP) if syntax != "yaml" else _DEEP
    return text.replace(quoted, f"{opened * depth}1{closed * depth}")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooSlow`` in the block after so many seconds of processor time, or 30 times as many.

    Processor time does not depend on what else runs; the second limit ends a wait.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds} s")

    limits = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, 30 * seconds),
    )
    before = {number: signal.signal(number, stop) for _, number, _ in limits}
    try:
        for timer, _, limit in limits:
            signal.setitimer(timer, limit)
        yield
    finally:
        for timer, number, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


class Case:
    """Files of one kind, valid, in a folder of their own.

    Args:
        kind: the kind.
        folder: an empty folder.
    """

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._path = kind.make(folder)
        self._content = self._path.read_bytes()
        assert self.read() == "read", f"{kind.name}: the valid file is refused"

    def read(self) -> str:
        """Read the file; return ``read``, ``refused``, or the last lines of a traceback."""
        try:
            with time_limit(LIMIT_SECONDS):
                self.kind.read(self._folder)
        except (MegatronDebertaError, OSError) as error:
            return "refused" if str(error) else f"no message: {error!r}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            own = [f for f in traceback.extract_tb(error.__traceback__) if "deberta/" in f.filename]
            last = own[-1] if own else place
            return f"{type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})"
        return "read"

    def run(self, number: int) -> str:
        """Apply a change and read the file."""
        return self.read_content(mutate(self._content, self.kind, number))

    def read_content(self, content: bytes) -> str:
        """Replace the file's content and read it."""
        self._path.write_bytes(content)
        return self.read()

    def replaced(self, old: str, new: str) -> bytes:
        """Return the valid content with the first of a part replaced."""
        assert old.encode() in self._content, (old, self._content[:200])
        return self._content.replace(old.encode(), new.encode(), 1)


def run_thousand(case: Case, first: int, count: int = PER_LINE) -> dict[str, Any]:
    """Run consecutive changes of a kind and return the result."""
    begin = time.process_time()
    results = {number: case.run(number) for number in range(first, first + count)}
    counts = Counter(text if text in ("read", "refused") else "failed" for text in results.values())
    failed = {n: text for n, text in results.items() if text not in ("read", "refused")}
    return {
        "kind": case.kind.name, "first": first, "changes": count, "read": counts["read"],
        "refused": counts["refused"], "failed": dict(list(failed.items())[:20]),
        "num_failed": len(failed), "seconds": round(time.process_time() - begin, 1),
    }  # fmt: skip


def main() -> int:
    """Run the missing thousands; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=10_000, help="of each kind")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS])
    parser.add_argument("--number", type=int, help="repeat one change of --kind")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    # A size from a file must not fill the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    kinds = [kind for kind in KINDS if args.kind in (None, kind.name)]
    code = code_digest(HOSTILE_FILES_CODE)
    lines = [line for line in read_lines(args.output) if line["code_digest"] == code]
    done = {(line["kind"], line["first"]) for line in lines}
    failures = sum(line["num_failed"] for line in lines)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(kind, Path(folder))
            if args.number is not None:
                print(mutate(case._content, kind, args.number)[:2000], case.run(args.number))
                continue
            for first in range(0, args.changes, PER_LINE):
                if (kind.name, first) in done:
                    continue
                line = run_thousand(case, first, min(PER_LINE, args.changes - first))
                append_line(args.output, line | {"code_digest": code} | provenance())
                failures += line["num_failed"]
                print(json.dumps(line), flush=True)
    print(f"failures: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
