"""Stop signals on one process; agreement of ranks is in tests/distributed/test_stop_signal.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.train.preemption import (
    PREEMPTION_SIGNALS,
    SAVE_FILE,
    STOP_FILE,
    Request,
    Requests,
    SignalRecorder,
)

GROUPS = single_process_groups(torch.device("cpu"))

LOADER_UNDER_FIRE = """
import os, signal, torch
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.loader import TrainLoader
from megatron_deberta.data.loader import StepSampler
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.preemption import SignalRecorder

class Numbers:
    def build(self, samples):
        row = torch.tensor(list(samples)).unsqueeze(1)
        return Batch(ModelInputs(row), row, row, row.squeeze(1))

with SignalRecorder() as stop:
    sampler = StepSampler(global_batch_size=2, micro_batch_size=2, dp_rank=0, dp_size=1)
    steps = iter(TrainLoader(Numbers(), sampler, 0, num_workers=1, pin_memory=False))
    seen = []
    for _ in range(6):
        seen += next(steps)[0].sample_index.tolist()
        if len(seen) == 2:
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGUSR2)
    print(seen == list(range(12)), stop.received.name)
    steps.close()
"""


@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_signal_is_remembered_and_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in PREEMPTION_SIGNALS]
    with SignalRecorder() as stop:
        requests = Requests(stop, "nowhere", GROUPS)
        assert requests.poll() == Request()
        assert stop.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.poll() == Request(preempt=True)
        assert stop.received is number
    assert [signal.getsignal(n) for n in PREEMPTION_SIGNALS] == before


def test_ctrl_c_is_told_and_the_second_one_kills(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with SignalRecorder(announces=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT
        assert Requests(stop, "nowhere", GROUPS).poll() == Request(interrupt=True)
        # The default action, which needs no bytecode to run.
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
    told = "Ctrl-C: saving after this step; again to stop at once without saving"
    assert capfd.readouterr().err.strip() == told


@pytest.mark.parametrize("is_during_update", [False, True])
def test_ctrl_c_names_the_step_that_sees_it(
    is_during_update: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with SignalRecorder(announces=True) as stop:
        requests, ended_after = Requests(stop, "nowhere", GROUPS), 0
        for step in (1, 2, 3):
            if step == 2 and not is_during_update:
                os.kill(os.getpid(), signal.SIGINT)
            flags = requests.own()  # with the losses, before the update
            if step == 2 and is_during_update:
                os.kill(os.getpid(), signal.SIGINT)
            requests.receive(flags)
            if requests.poll().interrupt:
                ended_after = step
                break
    assert ended_after == 2 + is_during_update
    told = "the next step at the latest" if is_during_update else "this step"
    assert f"Ctrl-C: saving after {told};" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "asked"), [(STOP_FILE, Request(stop=True)), (SAVE_FILE, Request(save=True))]
)
def test_file_asks_until_it_is_answered(tmp_path: Path, name: str, asked: Request) -> None:
    requests = Requests(SignalRecorder(), str(tmp_path), GROUPS)
    assert requests.poll() == Request()
    (tmp_path / name).touch()
    assert requests.poll() == requests.poll() == asked
    requests.acknowledge(Request(preempt=True))
    assert requests.poll() == asked
    requests.acknowledge(asked)
    assert requests.poll() == Request()


def test_files_are_looked_for_while_the_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(SignalRecorder(), str(tmp_path), GROUPS)
    (tmp_path / STOP_FILE).touch()
    requests.look_for_files()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda _: pytest.fail("a look between two steps"))
        assert requests.poll() == Request(stop=True)
    requests.acknowledge(Request(stop=True))
    assert requests.poll() == Request()


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="step failed"), SignalRecorder():
        raise RuntimeError("step failed")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_loader_processes_outlive_a_signal_to_the_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADER_UNDER_FIRE],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "SIGTERM"], done.stderr
    assert done.returncode == 0, done.stderr
