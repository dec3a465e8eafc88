"""Signals that ask a run to end. The step under way is finished and the state written; --resume goes on from there.

SIGTERM is what schedulers and torchrun send before they kill, SIGUSR1 what SLURM sends ahead of time under
``--signal=USR1@120``. Ctrl-C (SIGINT) is left as it is. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HEEDED = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command goes on


class StoppedError(Exception):
    """The run ended on request, between two steps, with its state written. The command line exits with 75."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}; the same command with --resume goes on")


class Request:
    """The signal that came last, as its number; 0 = none yet."""

    number = 0

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@contextmanager
def heeded() -> Iterator[Request]:
    """Within, a signal is noted instead of ending the process; the handlers before come back afterwards.

    Outside the main thread, where Python admits no handlers, signals keep their effect.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request._take) for number in HEEDED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Processes started within are not reached by a signal before they have run `leave_to_main_process`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_main_process(worker: int) -> None:
    """For ``worker_init_fn``: a data loading process heeds SIGTERM of its main process alone.

    torchrun and SLURM signal every process, and the loss of a loader would end the main process in the middle of its
    step. Ignoring the signal would not do: main processes end their loaders with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    threading.Thread(target=_await_main_process, daemon=True).start()


def _await_main_process() -> None:
    while True:
        received = signal.sigwaitinfo(HEEDED)
        if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
            os._exit(0)
