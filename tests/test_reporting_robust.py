"""Records under kills, full disks, read-only folders and many writers: none is lost, none is half-written.

Real processes; each tells by its exit code whether all it had to write was written.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.check import check
from mae_bench.reporting.files import write_whole
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
        assert all(name.startswith(".unfinished-") and name.endswith(".tmp") for name in leftovers)


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


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: json.dumps(json.loads(text), sort_keys=True).encode(),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.encode("utf-16"),
        lambda text: ('{"x": 1, ' + text.strip()[1:]).encode(),
    ],
    ids=["sorted", "utf-8 with a mark", "utf-16", "another first key"],
)
def test_a_record_that_another_program_wrote_anew_never_vanishes(
    rewrite: Callable[[str], bytes], tmp_path: Path
) -> None:
    kept = write_record(record(seed=1), tmp_path, "a.json")
    path = write_record(record(), tmp_path, "b.json")
    path.write_bytes(rewrite(path.read_text(encoding="utf-8")))
    with pytest.raises(UserError, match=rf"^{path} looks like a record that another program wrote anew: "):
        list(load_records([tmp_path]))
    path.write_text('{"first": 1, "schema_version": "of something else"}')
    assert list(load_records([tmp_path])) == [read_record(kept)]


# Other files.


def test_a_file_is_written_whole_whatever_it_is(tmp_path: Path) -> None:
    target, link = tmp_path / "a.md", tmp_path / "link.md"
    assert write_whole(target, "ä\r\n") and target.read_bytes() == "ä\r\n".encode()
    target.chmod(0o600)
    link.symlink_to(target)
    assert write_whole(link, b"new") and link.is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert not write_whole(target, "x", exclusive=True) and target.read_bytes() == b"new"
    assert write_whole(Path("/dev/null"), "x") and not Path("/dev/null").is_file()
    code = "from pathlib import Path; from mae_bench.reporting.files import write_whole; "
    code += "write_whole(Path('/dev/stdout'), 'x')"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"x"
    assert {path.name for path in tmp_path.iterdir()} == {"a.md", "link.md"}


def test_of_many_writers_of_one_file_one_wins_whole(tmp_path: Path) -> None:
    """A fixed name beside the file, which all of them would write to, mixes them or fails."""
    code = (
        "import sys; from pathlib import Path; from mae_bench.reporting.files import write_whole\n"
        "for _ in range(100): write_whole(Path(sys.argv[1]), sys.argv[2] * 100_000)"
    )
    target = tmp_path / "baselines.json"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(target), letter]) for letter in "abcd"]
    while any(process.poll() is None for process in processes):
        if target.exists():
            content = target.read_text()
            assert len(content) == 100_000 and len(set(content)) == 1
    assert [process.returncode for process in processes] == [0] * 4
    assert list(tmp_path.iterdir()) == [target]


def test_a_table_and_a_page_survive_a_full_disk(tmp_path: Path) -> None:
    """What was there is there still: ``table --out``, ``report --out`` and ``gate --write`` replace in one step."""
    folder = write_record(record(), tmp_path / "runs").parent
    baseline = {"task": "t", "protocol": "t@1", "backbone": "b", "metric": "top1", "value": 1.0, "tolerance": 1.0}
    words = {
        "t.md": ["table", "--records", str(folder), "--stale", "--out"],
        "p.html": ["report", "--records", str(folder), "--stale", "--out"],
        "b.json": ["gate", "--records", str(folder), "--write", "--against"],
    }
    code = (
        "import resource, signal, sys; from mae_bench import cli\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    for name, command in words.items():
        target = tmp_path / name
        target.write_text(json.dumps([baseline]))
        line = [sys.executable, "-c", code, *command, str(target)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "File too large" in done.stderr, done.stderr
        assert json.loads(target.read_text()) == [baseline]
    assert {path.name for path in tmp_path.iterdir()} == {*words, "runs"}


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
