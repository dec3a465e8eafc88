"""Records under kills, full disks, read-only folders and many writers: none is lost, none is half-written.

Real processes; each tells by its exit code whether all it had to write was written.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reporting_records import record

from mae_bench.reporting.check import check
from mae_bench.reporting.record import read_record, write_record
from mae_bench.reporting.store import load_records

WRITER = Path(__file__).with_name("reporting_writer.py")
NOBODY = 65534


def writer(
    folder: Path, first: int, count: int, *names: str, prepare: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(WRITER), str(folder), str(first), str(count), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, the names written, and what was said of those that were not."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out.split(), err


def test_eight_writers_lose_nothing(tmp_path: Path) -> None:
    """Each writes 200 records of its own and then, like all others, five contested ones: each has one winner."""
    contested = [f"contested{number}.json" for number in range(5)]
    processes = [writer(tmp_path, 1000 * number, 200, *contested) for number in range(8)]
    results = [finished(process) for process in processes]
    for number, (code, written, said) in enumerate(results):
        own = {f"{seed}.json" for seed in range(1000 * number, 1000 * number + 200)}
        won = set(written) - own
        assert own <= set(written) and won <= set(contested)
        assert code == (0 if won == set(contested) else 2)
        assert said.count("never overwritten") == len(contested) - len(won)
    winners = {name: number for number, (_, written, _) in enumerate(results) for name in written if name in contested}
    assert sorted(name for _, written, _ in results for name in written if name in contested) == contested
    assert len(list(load_records([tmp_path]))) == len(list(tmp_path.iterdir())) == 8 * 200 + 5
    for name, number in winners.items():
        assert read_record(tmp_path / name).seed == 1000 * number


def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    """Killed at any moment: what it said it wrote is there, and a cut-off write is no record."""
    moments = random.Random(0)
    for number in range(6):
        folder = tmp_path / str(number)
        process = writer(folder, 0, 100_000)
        assert process.stdout is not None
        said = [process.stdout.readline().strip()]
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        said += process.communicate()[0].split()
        assert process.returncode == -signal.SIGKILL
        whole = {path.name for path in folder.glob("*.json")}
        assert set(said) <= whole and len(whole) <= len(said) + 1
        assert sorted(found.seed for found in load_records([folder])) == list(range(len(whole)))
        leftovers = {path.name for path in folder.iterdir()} - whole
        assert all(name.startswith(".record-") and name.endswith(".tmp") for name in leftovers)


def test_a_write_that_was_killed_is_found_and_can_be_repeated(tmp_path: Path) -> None:
    """The process dies between the file's content and its name."""
    code = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from reporting_records import sound; from mae_bench.reporting.record import write_record\n"
        "os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_record(sound(), Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(WRITER.parent), str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert list(load_records([tmp_path])) == []
    (finding,) = check([tmp_path])
    assert (finding.severity, finding.file, finding.remedy) == ("warning", leftover, "delete it")
    write_record(record(), tmp_path)
    assert list(load_records([tmp_path])) == [record()]


def test_a_limit_on_file_size_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses the write half way through the file, as a quota does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    code, written, said = finished(writer(tmp_path, 0, 2, prepare=limit))
    assert (code, written) == (2, [])
    assert said.count("cannot write") == said.count("File too large; free space") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [mount or "", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_and_keeps_what_was_written(small_disk: Path) -> None:
    code, written, said = finished(writer(small_disk, 0, 30))
    assert code == 2 and 0 < len(written) < 30
    assert said.count("No space left on device; free space") == 30 - len(written)
    assert {path.name for path in small_disk.iterdir()} == set(written)
    assert len(list(load_records([small_disk]))) == len(written)
    (small_disk / written[0]).unlink()
    assert finished(writer(small_disk, 100, 1))[:2] == (0, ["100.json"])


AS_NOBODY = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import reporting_writer
if os.geteuid() == 0:  # permissions do not bind root
    os.setegid({NOBODY})
    os.seteuid({NOBODY})
sys.exit(reporting_writer.main(Path(sys.argv[2]), 0, 1, []))
"""


def test_a_read_only_folder_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders cannot be entered by other users
        Path(name).chmod(0o755)
        folder = Path(name, "read-only")
        folder.mkdir(mode=0o555)
        command = [sys.executable, "-c", AS_NOBODY, str(WRITER.parent), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"cannot write {folder / '0.json'}: Permission denied" in done.stderr
        assert list(folder.iterdir()) == []
