"""SIGTERM and SIGUSR1 end a run between two steps, with its state written; afterwards signals are what they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from engine_toys import Noise, make_job, make_values, same_state, train
from torch.utils.data import DataLoader

from mae_bench.engine.signals import HEEDED, StoppedError, heeded, held_back, leave_to_main_process


class Signalling(Noise):
    """Sends a signal to its own process while the given sample is read, counted from 1."""

    def __init__(self, number: int, sample: int) -> None:
        super().__init__()
        self.number, self.left = number, sample

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


@pytest.mark.parametrize("number", HEEDED)
def test_a_signal_ends_the_run_after_the_step(tmp_path: Path, number: signal.Signals) -> None:
    for name in ("straight", "cut"):
        (tmp_path / name).mkdir()
    straight, whole = train(make_job(tmp_path / "straight", make_values()))
    handlers = [signal.getsignal(one) for one in HEEDED]
    # The 20th sample belongs to the third step of 8.
    with pytest.raises(StoppedError, match=f"^stopped by {number.name} after step 3; the same command with --resume"):
        train(make_job(tmp_path / "cut", make_values()), dataset=Signalling(number, 20))
    assert [signal.getsignal(one) for one in HEEDED] == handlers
    assert sorted(path.name for path in (tmp_path / "cut/checkpoints").iterdir())[-1] == "step_000000003.pt"
    resumed, rest = train(make_job(tmp_path / "cut", make_values(), resume=True))
    assert same_state(straight, resumed)
    assert rest == whole


def test_a_signal_at_the_last_step_leaves_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(StoppedError, match="after step 6"):
        train(make_job(tmp_path, make_values()), dataset=Signalling(signal.SIGTERM, 48))
    _, fitted = train(make_job(tmp_path, make_values(), resume=True), dataset=Noise(broken=0))
    assert fitted.history[-1].keys() == {"step", "sum"}


def test_handlers_are_set_in_the_main_thread_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def elsewhere() -> None:
        with heeded() as request:
            seen.append((signal.getsignal(signal.SIGTERM), request.number))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(before, 0)]
    with heeded() as request:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.number == signal.SIGUSR1
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_are_started_with_signals_held_back() -> None:
    code = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGUSR1}))"

    def held() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with held_back():
        assert held() == "2\n"
    assert held() == "0\n"


def test_interrupting_stays_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path, make_values()), dataset=Signalling(signal.SIGINT, 20))


def loaders() -> None:
    """Waits for a signal to the whole process group in the middle of reading, and goes on."""
    batches = iter(DataLoader(Noise(), batch_size=2, num_workers=2, worker_init_fn=leave_to_main_process))
    for _ in range(2):  # one of each: both are up
        next(batches)
    with heeded() as request:
        print("reading", flush=True)
        while not request.number:
            time.sleep(0.01)
        time.sleep(0.2)  # for the loaders to hear of it too
        print(f"read {len([next(batches) for _ in range(6)])} more", flush=True)
        os.kill(batches._workers[0].pid, signal.SIGTERM)  # as torch does with a loader that hangs
        batches._workers[0].join(10)
        print(f"loader ended with {batches._workers[0].exitcode}", flush=True)


def test_loaders_outlive_a_signal_to_everybody_and_heed_their_main_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import test_engine_signals; test_engine_signals.loaders()"],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reading\n"
        os.killpg(child.pid, signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "read 6 more\nloader ended with 0\n"), err
