"""Shared by all tests: a cache of their own, so that no test reads or fills the user's, and no clock that decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # how fast a busy machine is decides no test
settings.load_profile("unhurried")
# In a shell's background Ctrl-C is ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the whole session; parallel workers share it, which also tests its locking."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAE_BENCH_CACHE", str(base / "mae_bench_cache"))
        patch.setenv("HF_DATASETS_CACHE", str(base / "hugging_face_data"))
        patch.delenv("MAE_BENCH_DATA", raising=False)
        patch.delenv("MAE_BENCH_WEIGHTS", raising=False)
        patch.delenv("MAE_BENCH_PATH", raising=False)
        yield
