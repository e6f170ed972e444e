"""Predict the examples of a task, or texts, with a fine-tuned model.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. Writes one JSON object per example: id, text, label (of regression the score, of spans the
answer, of tokens one per word, of several labels per text a list), scores by label (of tokens, of
each word's label), of tokens the entities with their characters in the text, and gold, the label of
the file, if it has one. Of embeddings, the label of a pair is its cosine, and a text alone has its
embedding; --output NAME.npy writes the embeddings of all texts as an array instead, of a pair both
in turn. With --leaderboard, it also writes the files of the task's leaderboard (GLUE, SuperGLUE,
SQuAD, CoNLL), or else the same objects. Several ranks divide the examples under torchrun or srun,
and rank 0 writes.

Texts are those of --text or of the files of --input, or without TASK and these the lines of
standard input. Files have a text per line, or JSON objects with text (and text_pair, id). For
taggers, separate words and punctuation by spaces, as in the training data. The second text of a
pair is --text-pair, as often as --text, or of one --text several times; of spans, --text is the
question and --text-pair the passage, of rerank the query and a passage. Of rerank, scores and ranks
are one per passage.

Texts that are longer than the model's rows are predicted in overlapping windows: windows is their
number. Of classes and scores, the task's long_text or --long-text says how they become one; a line
on standard error says how many texts are longer. Files are predicted in blocks, and --output has
its name when all of it is written.

--zero-shot classifies texts with any labels by a model of natural language inference (MNLI, RTE,
QNLI): the label's score is the probability that the text entails the sentence --hypothesis.

Examples:
  megatron-deberta predict sst2 --model runs/sst2 --data glue/SST-2 --split test --output out.jsonl
  megatron-deberta predict --model runs/sst2 --text "A film to see twice."
  megatron-deberta predict --model exports/sst2 < reviews.txt
  megatron-deberta predict --model exports/sst2 --input reviews.jsonl.gz --output out.jsonl
  megatron-deberta predict --model runs/mnli --text "They won 2:1." --zero-shot sport politics
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import (
    add_shared,
    add_task_arguments,
    number,
    prepare_output,
    refuse_options,
)
from megatron_deberta.errors import ConfigError, MissingInputError, refusals
from megatron_deberta.files import HashedFile, fsync_path
from megatron_deberta.tasks.records import Place, Record
from megatron_deberta.tasks.task import POOLED_HEADS
from megatron_deberta.tasks.texts import (
    STANDARD_INPUT,
    TEXT_KEYS,
    check_text_files,
    read_text_files,
    read_text_lines,
    text_examples,
)
from megatron_deberta.text.jobs.progress import ProgressDisplay

if TYPE_CHECKING:
    # These import torch, which --help does not need.
    from megatron_deberta.evaluate.predict import Predicted, Predictor
    from megatron_deberta.evaluate.zero_shot import ZeroShot
    from megatron_deberta.tasks import TaskConfig
    from megatron_deberta.tasks.scoring import Outputs
    from megatron_deberta.tasks.task import LongText

_TEST = "test"
"""Split that is predicted if none is named."""
_STEPS = 1000
"""Steps of the progress bar of a split."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_task_arguments(parser, is_required=False)
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT",
        help="predict this text in place of a task's files; may be repeated, - for the lines of "
        "standard input",
    )  # fmt: skip
    parser.add_argument(
        "--text-pair", action="append", default=[], metavar="TEXT",
        help="second segment of --text: of spans and rerank the passage",
    )  # fmt: skip
    parser.add_argument(
        "--zero-shot", action="extend", nargs="+", default=[], metavar="LABEL",
        help="labels of --text for a model with a class named entailment",
    )  # fmt: skip
    parser.add_argument(
        "--hypothesis", metavar="SENTENCE",
        help="--zero-shot: sentence with {} for the label (default: This example is {}.)",
    )  # fmt: skip
    parser.add_argument(
        "--multi-label", action="store_true",
        help="--zero-shot: several labels may hold, each against contradiction",
    )  # fmt: skip
    parser.add_argument(
        "--input", action="extend", nargs="+", default=[], metavar="FILE",
        help="predict the texts of these files: a text per line, or JSON Lines; also .gz; - for "
        "standard input",
    )  # fmt: skip
    parser.add_argument(
        "--keys", nargs="+", default=[], metavar="KEY",
        help="keys of the text, and of pairs of the second text, in JSON Lines (default: "
        f"{' '.join(TEXT_KEYS)})",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "jsonl", "text"),
        help="format of --input and standard input; auto: by the suffix, else by the first line "
        "(default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--long-text", choices=("mean", "max", "truncate"),
        help="texts longer than data.sequence_length, of classes and scores: mean or largest "
        "probability (score) of overlapping windows, or cut (default: the task's long_text, but "
        "without --data mean instead of truncate)",
    )  # fmt: skip
    add_shared(parser, "--split", help=f"split to predict (default: {_TEST})")
    add_shared(
        parser,
        "--output",
        help="file to write (default: standard output); of embeddings, NAME.npy is an array",
    )
    add_shared(parser, "--leaderboard")
    parser.add_argument(
        "--null-threshold", type=number(float, -math.inf, math.inf), metavar="X",
        help="SQuAD 2.0: predict no answer above this score, which evaluate finds as "
        "null_threshold (default: 0)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Predict and write the predictions."""
    from megatron_deberta.evaluate.predict import open_predictor

    _find_task(args)
    zero_shot = _zero_shot(args)
    texts = _find_texts(args)
    prepare_output("--output", args.output)
    prepare_output("--leaderboard", args.leaderboard, is_folder=True)
    with (
        refusals(),
        open_predictor(
            args.task,
            Path(args.model),
            args.data,
            tuple(args.overrides),
            args.tokenizer,
            zero_shot,
        ) as predictor,
    ):
        task = predictor.task
        if args.null_threshold is not None and not task.unanswerable:
            raise ConfigError(
                f"--null-threshold {args.null_threshold:g} is for tasks with unanswerable "
                f"questions such as squad2, not for {task.name}; remove it"
            )
        if str(args.output or "").endswith(".npy") and task.head != "embed":
            raise ConfigError(
                f"--output {args.output}: task {task.name} has the head {task.head} and predicts "
                "no embeddings; give the name of a JSON Lines file"
            )
        if args.long_text is not None and task.head not in POOLED_HEADS:
            raise ConfigError(
                f"--long-text {args.long_text} is for classes and scores, not for the head "
                f"{task.head} of {task.name}; remove it"
            )
        task = replace(task, long_text=_long_text(args, task))
        predictor = replace(predictor, task=task, null_threshold=args.null_threshold or 0.0)
        if predictor.groups.rank == 0:
            _write(args, predictor, texts)
        else:
            for _ in _predict(args, predictor, texts, None):
                pass


@dataclass
class _Texts:
    """Texts to predict, and how much of their files was read.

    Attributes:
        records: the texts.
        size: bytes of the files; 0: they are no files.
        position: bytes that were read.
    """

    records: Iterator[Record] = field(default_factory=lambda: iter(()))
    size: int = 0
    position: int = 0

    def advance(self, position: int) -> None:
        """Set the bytes that were read."""
        self.position = position


def _find_texts(args: argparse.Namespace) -> _Texts | None:
    """Return the texts to predict; None: a task's files.

    Raises:
        ConfigError: the arguments contradict each other, or there is no text.
        MissingInputError: a file cannot be opened.
    """
    texts, pairs = list(args.text), list(args.text_pair)
    given = (texts or pairs) and "--text" or args.input and "--input"
    if args.data:
        if given:
            raise ConfigError(f"{given} predicts texts, --data a task's files; give one of them")
        if not args.task:
            raise ConfigError(f"--data {args.data} needs TASK, whose files are there")
        refuse_options(args, ["format", "keys"], "is for --input")
        return None
    if args.task and not given:
        raise ConfigError(
            f"{args.task}: give the folder of its files with --data, or --text TEXT or --input FILE"
        )
    for option, value in (("--split", args.split), ("--leaderboard", args.leaderboard)):
        if value:
            raise ConfigError(f"{option} {value} needs TASK and --data")
    if args.input and (texts or pairs):
        raise ConfigError("--text and --input are both given; give one of them")
    if texts not in ([], ["-"]):
        refuse_options(args, ["format", "keys"], "is for --input and standard input")
        return _Texts(_of_options(texts, pairs))
    if args.input not in ([], ["-"]):
        return _of_files(args)
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(
            "give TASK and --data DIR, --text TEXT, --input FILE, or lines on standard input"
        )
    records = _first(
        read_text_lines(sys.stdin.buffer, Path(STANDARD_INPUT), args.format or "auto", _keys(args)),
        "standard input has no text; write a text per line, or give --text TEXT",
    )
    if pairs:
        lines = [record.values[TEXT_KEYS[0]] for record in records]
        return _Texts(_of_options(lines, pairs))
    return _Texts(records)


def _find_task(args: argparse.Namespace) -> None:
    """Set the task, for which the parser takes the first word; it may be missing or come later."""
    if "=" in args.task and not Path(args.task).exists():
        words = [args.task, *args.overrides]
        args.task = next((word for word in words if "=" not in word), "")
        args.overrides = [word for word in words if word != args.task]


def _keys(args: argparse.Namespace) -> Sequence[str]:
    if len(args.keys) > len(TEXT_KEYS):
        raise ConfigError(
            f"--keys {' '.join(args.keys)}: give the key of the text, and of pairs that of the "
            "second text"
        )
    return args.keys or TEXT_KEYS


def _first(records: Iterator[Record], problem: str) -> Iterator[Record]:
    """Read the first record, before the model is loaded; return all of them.

    Raises:
        ConfigError: there is none.
    """
    first = next(records, None)
    if first is None:
        raise ConfigError(problem)
    return chain([first], records)


def _of_files(args: argparse.Namespace) -> _Texts:
    if "-" in args.input:
        raise ConfigError("--input - is standard input, which cannot be read beside files")
    found = _Texts(size=check_text_files(args.input))
    records = read_text_files(args.input, args.format or "auto", _keys(args), found.advance)
    problem = f"{', '.join(args.input)}: no text; write a text per line"
    found.records = _first(records, problem)
    return found


def _of_options(texts: Sequence[str], pairs: Sequence[str]) -> Iterator[Record]:
    if pairs and len(texts) == 1:
        texts = [*texts] * len(pairs)
    if pairs and len(pairs) != len(texts):
        raise ConfigError(
            f"{len(pairs)} --text-pair for {len(texts)} texts; give one for each --text"
        )
    if empty := [text for text in (*texts, *pairs) if not text.strip()]:
        raise ConfigError(f"--text {empty[0]!r} is empty; give a text")
    rows = zip(texts, pairs, strict=True) if pairs else zip(texts, strict=True)
    named = [dict(zip(TEXT_KEYS, row, strict=False)) for row in rows]
    return iter([Record(Place(Path("--text"), n), values) for n, values in enumerate(named, 1)])


def _zero_shot(args: argparse.Namespace) -> ZeroShot | None:
    """Return the labels of ``--zero-shot``; None: there are none.

    Raises:
        ConfigError: the arguments contradict each other.
    """
    if not args.zero_shot:
        refuse_options(args, ["hypothesis", "multi_label"], "needs --zero-shot LABEL ...")
        return None
    from megatron_deberta.evaluate.zero_shot import HYPOTHESIS, ZeroShot

    if args.task:
        raise ConfigError(
            f"--zero-shot classifies --text, not the files of {args.task}; give these a task file "
            "with head: choices and hypothesis:, or omit TASK"
        )
    sentence = HYPOTHESIS if args.hypothesis is None else args.hypothesis
    return ZeroShot(tuple(args.zero_shot), sentence, args.multi_label)


def _predict(
    args: argparse.Namespace,
    predictor: Predictor,
    texts: _Texts | None,
    display: ProgressDisplay | None,
) -> Iterator[Predicted]:
    """Yield predictions of the texts block by block, or those of the split at once.

    Raises:
        MissingInputError: the split has no files.
    """

    def show(done: float, size: int) -> None:
        if display is not None and size:
            display.advance("texts", size, round(done), {})

    if texts is None:
        name = args.split or _TEST
        try:
            yield predictor.predict_split(name, lambda share: show(share * _STEPS, _STEPS))
        except MissingInputError as error:
            splits = ", ".join(split for split in predictor.task.splits if split != name)
            raise MissingInputError(f"{error}; choose a split with --split: {splits}") from error
        return
    begin = 0

    def advance(share: float) -> None:
        show(begin + share * (texts.position - begin), texts.size)

    examples = text_examples(predictor.task, texts.records)
    for block in predictor.predict_texts(examples, advance):
        yield block
        begin = texts.position


def _long_text(args: argparse.Namespace, task: TaskConfig) -> LongText:
    chosen: LongText = args.long_text or task.long_text
    # A split is encoded as in training, and as `evaluate task` does; of other texts, nothing is cut
    # unless that was asked for.
    return "mean" if chosen == "truncate" and not (args.long_text or args.data) else chosen


def _write(args: argparse.Namespace, predictor: Predictor, texts: _Texts | None) -> None:
    from megatron_deberta.tasks import json_lines, write_predictions

    task = predictor.task
    count = num_long = most = 0
    is_array, arrays = str(args.output or "").endswith(".npy"), []
    # A bar would be written between the lines on a terminal.
    is_shown = (texts is None or texts.size) and (args.output or not sys.stdout.isatty())
    with (
        ProgressDisplay("predict") as display,
        _open_output(args.output) as write,
    ):
        for block in _predict(args, predictor, texts, display if is_shown else None):
            if args.leaderboard:
                folder = Path(args.leaderboard)
                files = write_predictions(task, args.split or _TEST, *block[:2], folder)
                if args.output:
                    print(f"Leaderboard: {', '.join(map(str, files))}")
            if is_array:
                arrays.append(block.outputs)
            else:
                write(json_lines(task, block.examples, block.predictions))
            count += len(block.predictions)
            num_long += block.num_long
            most = max(most, *(each.windows for each in block.predictions))
        if is_array:
            write(_npy(arrays))
    if args.output:
        print(f"{args.output}: {count:,} prediction{'' if count == 1 else 's'} of {task.name}")
    if num_long or args.input:
        length = predictor.config.data.sequence_length
        print(_describe_long(task, num_long, count, most, length), file=sys.stderr)


def _npy(arrays: Sequence[Outputs]) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.save(stream, np.concatenate(arrays), allow_pickle=False)
    return stream.getvalue()


def _describe_long(task: TaskConfig, num_long: int, count: int, most: int, length: int) -> str:
    """Return how many texts are longer than the model, and what became of them."""
    verb = "is" if count == 1 else "are"
    text = f"{num_long:,} of {count:,} text{'' if count == 1 else 's'} {verb} longer than "
    text += f"{length:,} tokens"
    if not num_long:
        return text
    if task.head in ("spans", "tokens"):
        return f"{text}: predicted in windows, at most {most:,}"
    if task.head in ("choices", "embed", "rerank"):
        return f"{text}: cut at the end"
    value = "score" if task.head == "regression" else "probability"
    if task.long_text == "truncate":
        return f"{text}: cut; --long-text mean reads the whole text in windows"
    kind = {"mean": "mean", "max": "largest"}[task.long_text]
    return f"{text}: {kind} {value} of their windows, at most {most:,}"


@contextmanager
def _open_output(path: str) -> Iterator[Callable[[bytes], object]]:
    """Yield the function that writes; a file has its name when all is written."""
    if not path:
        # JSON is UTF-8 whatever the locale is.
        sys.stdout.flush()

        def write(content: bytes) -> None:
            sys.stdout.buffer.write(content)
            sys.stdout.flush()

        yield write
        return
    file = HashedFile(Path(path))
    try:
        yield file.write
        file.commit()
        fsync_path(Path(path).parent)
    finally:
        file.close()
