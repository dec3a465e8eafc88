"""Progress display away from a terminal."""

from __future__ import annotations

import pytest

from mae_bench.engine.progress import Progress


def test_a_few_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000, "toy") as progress:
        for step in range(1, 1001):
            progress.update(step, loss=1 / step, lr=0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("toy  100/1000  loss 0.01  lr 0.1  ")
    assert lines[-1] == "toy  1000/1000  loss 0.001  lr 0.1  0:00 left"


def test_work_within_work_prints_nothing_while_it_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, "outer") as outer:
        with Progress(2, "inner") as inner:
            inner.update(2)
        outer.update(2)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["outer"]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, "outer", quiet=True) as outer, Progress(2, "inner", quiet=True) as inner:
        inner.update(2)
        outer.update(1)
    assert capsys.readouterr() == ("", "")


def test_bars_may_be_nested_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(2, "outer") as outer:
        for _ in range(2):
            with Progress(3, "inner") as inner:
                inner.update(3, loss=0.5)
        outer.update(2)
    assert Progress._bars is None
    assert "outer" in capsys.readouterr().err
