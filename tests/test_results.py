"""Committed results: every promoted record is whole, and the committed tables are what they give."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mae_bench import cli, doctor, tabulate
from mae_bench.errors import UserError
from mae_bench.reporting import cells, store

ROOT = Path(__file__).resolve().parent.parent
RUNS, SUITES = ROOT / "results" / "runs", ROOT / "results" / "suites"


def copy_of_the_results(folder: Path, runs: list[Path]) -> Path:
    """A tree with the README and some records, written in the given order."""
    (folder / "results" / "tables").mkdir(parents=True)
    shutil.copy(ROOT / "README.md", folder)
    for file in runs:
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return folder


@pytest.fixture(scope="module")
def records() -> list[Path]:
    found = sorted(RUNS.rglob("*.json"))
    assert found, "no committed record: nothing below would be tested"
    return found


def test_committed_tables_are_what_the_records_give() -> None:
    assert tabulate.check(ROOT) == []


def test_the_committed_runs_hold_the_committed_baselines() -> None:
    assert cli.main(["gate", "--against", str(ROOT / "results" / "baselines.json")]) == 0


def test_the_readme_is_one_of_them() -> None:
    made = tabulate.committed(ROOT)
    block = made[ROOT / "README.md"].split(tabulate.BEGIN)[1].split(tabulate.END)[0]
    assert block.strip() == made[ROOT / "results" / "tables" / "mae_against_scratch.md"].strip()
    assert "tiny_linear" in block


def test_check_names_the_file_and_the_first_line(tmp_path: Path, records: list[Path]) -> None:
    root = copy_of_the_results(tmp_path, [file for file in records if file.parts[-3] == "tiny_linear"])
    assert any("results/tables/all.md is missing" in fault for fault in tabulate.check(root))
    assert root / "results" / "tables" / "all.md" in tabulate.write(root)
    assert tabulate.check(root) == [] and tabulate.write(root) == []
    table = root / "results" / "tables" / "all.md"
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    table.write_text("".join([*lines[:3], lines[3].replace(".", ",", 1), *lines[4:]]), encoding="utf-8")
    (fault,) = tabulate.check(root)
    assert fault.startswith("results/tables/all.md line 4 is not what the records give: ")
    table.write_text("".join(lines[:-1]), encoding="utf-8")
    (fault,) = tabulate.check(root)
    assert f"line {len(lines)} is not what the records give: '', expected '- " in fault
    table.write_bytes("".join(lines).replace("\n", "\r\n").encode())
    assert "all.md line 1 " in tabulate.check(root)[0]
    table.write_text("".join(lines), encoding="utf-8")
    readme = root / "README.md"
    edited = readme.read_text(encoding="utf-8").replace(tabulate.BEGIN, tabulate.BEGIN + "edited\n")
    readme.write_text(edited, encoding="utf-8")
    assert tabulate.check(root)[0].startswith("README.md line ")
    tabulate.write(root)
    (root / "results" / "tables" / "old.md").write_text("", encoding="utf-8")
    assert tabulate.check(root) == ["results/tables/old.md: no record gives it; delete it"]


def test_a_record_that_is_gone_changes_the_tables(tmp_path: Path, records: list[Path]) -> None:
    root = copy_of_the_results(tmp_path, records)
    tabulate.write(root)
    next((root / "results" / "runs" / "tiny_linear").rglob("*.json")).unlink()
    assert {fault.split()[0] for fault in tabulate.check(root)} >= {"results/tables/all.md", "results/tables/all.csv"}


def test_a_readme_without_its_marks_is_refused(tmp_path: Path, records: list[Path]) -> None:
    root = copy_of_the_results(tmp_path, records[:1])
    (root / "README.md").write_text("# no marks\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"README\.md: expected one line <!-- table: mae_against_scratch -->"):
        tabulate.committed(root)


def test_without_a_record_that_counts_the_tables_say_why(tmp_path: Path, records: list[Path]) -> None:
    root = copy_of_the_results(tmp_path, [file for file in records if "pretrain" in file.parts[-3]])
    made = tabulate.committed(root)
    assert made[root / "results" / "tables" / "all.md"].startswith("no results to show: 1 run left out (pre-training")
    assert made[root / "results" / "tables" / "mae_against_scratch.md"].startswith("nothing to compare")


def test_the_same_bytes_whatever_the_process(tmp_path: Path, records: list[Path]) -> None:
    """Order of the files on disk, hash seed, locale and time zone."""
    code = "import sys, pathlib; from mae_bench import tabulate; tabulate.write(pathlib.Path(sys.argv[1]))"
    found = []
    for i, (seed, zone) in enumerate([("0", "UTC"), ("1", "Asia/Kathmandu")]):
        root = copy_of_the_results(tmp_path / str(i), records[:: (-1) ** i])
        environment = os.environ | {"PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": ["C", "C.UTF-8"][i]}
        subprocess.run([sys.executable, "-c", code, str(root)], cwd=ROOT, env=environment, check=True)
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")
        found.append({str(path.relative_to(root)): path.read_bytes() for path in files})
    assert found[0] == found[1]
    assert found[0]["README.md"] == (ROOT / "README.md").read_bytes()


def test_promoted_records_are_real_runs_without_paths_of_a_machine(records: list[Path]) -> None:
    for file in [*records, *sorted(SUITES.rglob("*.json"))]:
        record = next(iter(store.load_records([file])))
        shelf = RUNS if file.is_relative_to(RUNS) else SUITES / file.relative_to(SUITES).parts[0]
        assert not record.smoke
        assert file.name == f"{record.run_id}.json"
        assert file.parent == shelf / record.task / record.backbone
        assert not any(word.startswith("/") for word in record.command), f"{file}: an absolute path in the command"


def test_mae_beats_scratch_by_more_than_the_spread_of_five_seeds() -> None:
    """The claim of the README, from the records that a table counts."""
    pairs = cells.compare(tabulate.frame([RUNS]), "mae", "scratch").set_index("task")
    for task in ("tiny_linear", "tiny_finetune"):
        pair = pairs.loc[task]
        assert pair["pairs"] >= 5
        assert pair["difference"] > pair["bound"] > 0
        assert pair["adjusted"] < 0.01 and pair["low"] > 0


def test_a_fault_is_shown_around_the_first_difference(tmp_path: Path) -> None:
    table = tmp_path / "all.md"
    for there, text in (("x" * 500 + "1", "x" * 500 + "2"), ("a" * 200 + "\t", "a" * 200 + " "), ("ab", "ab\n")):
        table.write_text(there, encoding="utf-8")
        said, given = re.findall(r"give: (.*), expected (.*); `python", tabulate._difference(table, text, tmp_path))[0]
        assert said != given and len(said) + len(given) < 300


def test_files_are_replaced_at_once_or_kept(tmp_path: Path, records: list[Path]) -> None:
    """A disk that is full in the middle of a table, as far as a process can make one for itself."""
    root = copy_of_the_results(tmp_path, records[:1])
    tabulate.write(root)
    table = root / "results" / "tables" / "all.md"
    table.write_text("as it was", encoding="utf-8")
    code = (
        "import resource, signal, sys, pathlib\n"
        "from mae_bench import tabulate; from mae_bench.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "try: tabulate.write(pathlib.Path(sys.argv[1]))\n"
        "except UserError as error: sys.exit(str(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith(f"cannot write {table}: File too large; free space, then")
    assert table.read_text(encoding="utf-8") == "as it was"
    assert not [path for path in table.parent.iterdir() if path.name.startswith(".")]


def test_two_tasks_of_one_protocol_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one's runs would stand in a paper's table as runs of the first."""
    recipe = (ROOT / "tasks" / "tiny_linear" / "task.toml").read_text(encoding="utf-8")
    copy = tmp_path / "tasks" / "mine" / "task.toml"
    copy.parent.mkdir(parents=True)
    copy.write_text(recipe.replace('name = "tiny_linear"', 'name = "mine"'), encoding="utf-8")
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=rf"the protocol 'tiny-linear@1': {copy} and .*tiny_linear/task\.toml; give one"
    ):
        tabulate.frame([RUNS])
    assert doctor.report("tiny_linear") == 1
    assert f"two task recipes have the protocol 'tiny-linear@1': {copy}" in capsys.readouterr().out
    copy.write_text(copy.read_text(encoding="utf-8").replace("tiny-linear@1", "mine@1"), encoding="utf-8")
    assert len(tabulate.frame([RUNS]))


# Tables by name.


def test_names() -> None:
    names = tabulate.names()
    assert {"table_3", "figure_9", "vitdet_5", "mae_ablations", "mae_ablations_tiny"} <= set(names)
    assert names["table_1a"] == "Table 1a: decoder depth (MAE paper arXiv:2111.06377v3)"
    with pytest.raises(UserError, match=r"unknown table 'mae_ablation' \(did you mean 'mae_ablations'\?\)"):
        tabulate.named("mae_ablation")


def test_a_suite_by_name(tmp_path: Path) -> None:
    """Without records: the cells with the published numbers, and that these are not comparable."""
    table = tabulate.named("mae_ablations_tiny", [tmp_path])
    assert table.name == "mae_ablations_tiny"
    assert table.title.endswith("(not comparable with the published numbers)")
    assert table.notes[0].startswith("Not comparable: ")
    sections = [row.cells[0].text for row in table.rows if row.kind == "section"]
    assert sections == ["Table 1a", "Table 1b", "Table 1c", "Table 1d", "Table 1e", "Table 1f", "Fig.5", "Fig.7"]
    numbers = [row.cells[2].text for row in table.rows if row.kind == "data"]
    assert set(numbers) == {"–"}
    assert "not comparable" not in tabulate.named("mae_ablations", [tmp_path]).title
    with pytest.raises(UserError, match="give one folder of records, not 2"):
        tabulate.named("mae_ablations", [tmp_path, tmp_path])


def test_a_paper_by_name_and_free_tables() -> None:
    assert tabulate.named("vitdet_5", [RUNS]).columns[2].head == "ours"
    free = tabulate.free([RUNS], by=(["init"], ["task", "protocol", "backbone"]))
    assert [column.head for column in free.columns][:1] == ["init"]
    with pytest.raises(UserError, match=r"--metric top9: no run has it; the runs have .*top1"):
        tabulate.free([RUNS], metric="top9")
    assert tabulate.free([RUNS], compare=("mae", "scratch")).name == "mae_against_scratch"


def test_a_command_lines_table() -> None:
    assert tabulate.text("table_3", [RUNS]).startswith("**Table 3: end-to-end fine-tuning")
    assert tabulate.text(paths=[RUNS], rows="init", columns="task, protocol,backbone").startswith("| init ")
    assert tabulate.text(paths=[RUNS], form="csv").startswith("task,protocol,metric,size,")
    assert tabulate.text(paths=[RUNS], form="csv", layout="wide").startswith("size,backbone,")
    assert tabulate.text(paths=[RUNS], compare=("mae", "scratch"), metric="top1", form="html").startswith("<table>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "table_3", "layout": "long"}, "table table_3 has rows and columns of its own: leave out --layout"),
        ({"name": "mae_ablations", "stale": True}, "leave out --stale"),
        ({"compare": ("mae", "scratch"), "rows": "init"}, "leave out --rows"),
        ({"rows": "init", "columns": "task", "layout": "long"}, "leave out --layout"),
        ({"rows": "init"}, "--cols is missing"),
        ({"name": "no"}, "unknown table 'no'"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tabulate.text(paths=[RUNS], **options)
