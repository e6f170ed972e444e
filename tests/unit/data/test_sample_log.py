"""Sample log: writing, truncation on resume, merging and checking."""

import errno
import json
import os

import pytest
import torch

from megatron_deberta.data.batch import Batch
from megatron_deberta.data.sample_log import SampleLog, check_sample_log, read_sample_log
from megatron_deberta.errors import DataError
from megatron_deberta.model.inputs import ModelInputs
from tests.support.disk_calls import DiskCalls


def batch(samples):
    size = len(samples)
    return Batch(
        ModelInputs(torch.zeros(size, 4, dtype=torch.int64)),
        masked_positions=torch.full((size, 1), -1),
        labels=torch.full((size, 1), -100),
        sample_index=torch.tensor(samples),
    )


def write_steps(folder, steps, dp_size, completed=0, global_batch=8):
    """Run ranks one after the other, in two micro batches each."""
    share = global_batch // dp_size
    for rank in range(dp_size):
        sample_log = SampleLog(folder, rank, dp_size, completed)
        for step in steps:
            first = (step - 1) * global_batch + rank * share
            half = share // 2
            sample_log.append(
                step,
                [
                    batch(list(range(first, first + half))),
                    batch(list(range(first + half, first + share))),
                ],
            )
        sample_log.close()


def test_ranks_are_merged_and_complete(tmp_path):
    write_steps(tmp_path, range(1, 4), dp_size=2)
    assert read_sample_log(tmp_path)[2] == list(range(8, 16))
    check_sample_log(tmp_path, global_batch_size=8, num_steps=3)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 1), (1, 4)])
def test_resume_cuts_what_was_not_committed(tmp_path, before, after):
    write_steps(tmp_path, range(1, 6), dp_size=before)
    with open(tmp_path / "rank-00000.jsonl", "ab") as stream:
        stream.write(b'{"step": 6, "ra')
    write_steps(tmp_path, range(4, 7), dp_size=after, completed=3)
    check_sample_log(tmp_path, global_batch_size=8, num_steps=6)


def test_fresh_run_discards_an_older_log(tmp_path):
    write_steps(tmp_path, range(1, 6), dp_size=2)
    write_steps(tmp_path, range(1, 3), dp_size=1)
    check_sample_log(tmp_path, global_batch_size=8, num_steps=2)


def test_records_are_written_without_closing(tmp_path):
    sample_log = SampleLog(tmp_path, 0, 1, 0)
    sample_log.append(1, [batch([0, 1])])
    assert json.loads((tmp_path / "rank-00000.jsonl").read_text()) == {
        "step": 1,
        "rank": 0,
        "samples": [0, 1],
    }
    sample_log.close()


def test_a_disk_that_becomes_full_leaves_no_gap(tmp_path, monkeypatch):
    """It takes a part of a record, without an error; or it fails when the log is flushed."""
    sample_log = SampleLog(tmp_path, 0, 1, 0)
    sample_log.append(1, [batch([0, 1])])
    whole = sample_log._stream

    class Full:
        name = whole.name
        fileno = whole.fileno
        close = whole.close

        def write(self, content):
            return whole.write(content[:9])

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sample_log._stream = Full()
    with pytest.raises(
        DataError, match="rank-00000.jsonl: cannot write the sample log: .*No space"
    ):
        sample_log.append(2, [batch([2, 3])])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        DataError, match="rank-00000.jsonl: cannot write the sample log: .*No space"
    ):
        sample_log.sync()
    with pytest.raises(DataError):
        sample_log.close()
    monkeypatch.undo()
    assert whole.closed
    write_steps(tmp_path, [2], dp_size=1, completed=1, global_batch=2)
    check_sample_log(tmp_path, global_batch_size=2, num_steps=2)


@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        (range(1, 3), None, "steps .3. are missing"),
        (range(1, 5), None, "steps .4. are missing or beyond"),
        (range(1, 4), ("[0, 1,", "[1, 0,"), "step 1 read"),
        (range(1, 4), ("[0, 1,", "[0, 0,"), "step 1 read"),
        (range(1, 4), ('"step": 2', '"step": 1'), "step 1 twice"),
        (range(1, 4), ('"samples"', '"rows"'), "damaged record"),
        (range(1, 4), ("[0, 1, 2, 3", "[0, 1, 2"), "step 1 read"),
    ],
)
def test_check_names_what_is_wrong(tmp_path, steps, change, message):
    write_steps(tmp_path, steps, dp_size=2)
    if change:
        path = tmp_path / "rank-00000.jsonl"
        path.write_text(path.read_text().replace(*change))
    with pytest.raises(DataError, match=message):
        check_sample_log(tmp_path, global_batch_size=8, num_steps=3)


def test_missing_and_unwritable_places_are_named(tmp_path):
    with pytest.raises(DataError, match="no sample log"):
        read_sample_log(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the sample log"):
        SampleLog(tmp_path / "file", 0, 1, 0)


def test_records_are_flushed(tmp_path, monkeypatch):
    disk = DiskCalls(monkeypatch, tmp_path)
    sample_log = SampleLog(tmp_path, 0, 1, 0)
    sample_log.append(1, [batch([0, 1])])
    sample_log.sync()
    assert disk.calls == ["fsync .", "fsync rank-00000.jsonl"]
    disk.assert_flushed(tmp_path)
    sample_log.append(2, [batch([2, 3])])
    sample_log.close()
    disk.assert_flushed(tmp_path)
