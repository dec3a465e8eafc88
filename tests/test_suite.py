"""Suites: the file, the plan, runs that are done once, faults that stop nothing, the table."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reporting_records import values

from mae_bench import runs, suite
from mae_bench.engine.job import Options
from mae_bench.engine.plan import make_plan
from mae_bench.errors import UserError
from mae_bench.hashing import file_hash
from mae_bench.pretraining.images import Noise, augmentation
from mae_bench.pretraining.objectives import refuse_idle
from mae_bench.recipes import digest, load_backbone, resolve_task
from mae_bench.reporting.published import load_published
from mae_bench.reporting.record import read_record, record_from, write_record

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
name = "toy"
summary = "a toy"
reference = "ours"
backbone = "vit_t_mae"
task = "tiny_pretrain"
settings = { steps = 2, warmup_steps = 1, batch = 8 }
"""
ONE_EPOCH = 'transfer = [{ task = "tiny_linear", settings = { epochs = 1, warmup_epochs = 0, batch = 500 } }]\n'


def write(folder: Path, text: str, name: str = "toy") -> str:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# The file.


def test_the_bundled_suite_is_table_1_and_both_figures() -> None:
    bundled = suite.load("mae_ablations")
    tables = [cell.table for cell in bundled.cells]
    counts = {table: tables.count(table) for table in dict.fromkeys(tables)}
    tables_1 = {"Table 1a": 5, "Table 1b": 5, "Table 1c": 2, "Table 1d": 4, "Table 1e": 4, "Table 1f": 4}
    assert counts == tables_1 | {"Fig.5": 10, "Fig.7": 5}
    full, tiny = suite.plan(bundled), suite.plan(bundled, tiny=True)
    assert [cell.cell for cell, chain in tiny if chain is None] == ["dVAE tokens"]
    # The default of every table is one run: cells and runs differ by the seven other places where it stands.
    shared = max((chain for _, chain in full if chain), key=lambda chain: len(chain.labels))
    assert len(shared.labels) == 8 and len({table.split()[0] for table in shared.labels}) == 3
    assert [len({id(chain) for _, chain in planned if chain}) for planned in (full, tiny)] == [32, 31]


def test_every_published_number_of_the_bundled_suite_has_its_cell() -> None:
    bundled = suite.load("mae_ablations")
    rows = [row for row in load_published() if row.source == bundled.source and row.metric == "top1"]
    text = suite.table("mae_ablations")
    meant = [row for row in rows if row.source_locator.startswith(("Table 1", "Fig.5", "Fig.7")) and row.value]
    meant = [row for row in meant if row.source_locator.partition(" (")[0] in {cell.table for cell in bundled.cells}]
    assert len(meant) == 2 * len(bundled.cells)
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| ") and "published" not in line]
    cells = [[part.strip(" *") for part in line] for line in cells]
    shown = [part for line in cells if line[2] and "---" not in line[1] for part in (line[4], line[6])]
    assert sorted(map(float, shown)) == sorted(row.value for row in meant)
    by_cell = {line[1]: (line[4], line[6]) for line in cells}
    assert by_cell["block 75 %"] == ("82.8", "63.9")
    assert by_cell["mask ratio 90 %"] == ("83.0", "66.1")
    assert by_cell["1600 epochs"] == ("85.1", "75.1")
    assert "Not comparable" not in text
    assert "Not comparable" in suite.table("mae_ablations", tiny=True)


@pytest.mark.parametrize("tiny", [False, True])
def test_every_cell_of_the_bundled_suite_can_be_trained(tiny: bool) -> None:
    """Values that nothing reads, masks that no grid has and schedules that do not fit are refused by these."""
    for cell, chain in suite.plan(suite.load("mae_ablations"), tiny=tiny):
        if chain is None:
            continue
        step = chain.pretraining
        backbone = load_backbone(step.backbone)
        trained = resolve_task(step.task, backbone, list(step.settings)).values
        refuse_idle(trained)
        architecture = backbone.architecture
        grid = (architecture.grid, architecture.grid)
        assert len(Noise(grid, architecture.patch, trained)()[0]) == architecture.grid**2, cell.label
        augmentation(trained, (architecture.image_size, architecture.image_size))
        plan = make_plan(trained, 8_000 if tiny else 1_281_167, Options(), 1)
        if not tiny:
            assert plan.steps == 312 * trained.epochs
        assert trained.norm_pix == (cell.cell == "pixels, normalised")
    finetuning = resolve_task("imagenet_finetune", load_backbone("vit_l_mae_pixel")).values
    assert (finetuning.base_lr, finetuning.layer_decay, finetuning.drop_path) == (
        1e-3,
        0.75,
        0.1,
    )  # the paper's Table 9


def test_a_grid_is_the_product_of_its_lists(tmp_path: Path) -> None:
    text = HEAD + "[grid]\nmask_ratio = [0.5, 0.75]\nflip = [true, false]\ncrop_scale = [[0.2, 1.0]]\n"
    chains = [chain for _, chain in suite.plan(suite.load(write(tmp_path, text))) if chain]
    assert [chain.labels[0] for chain in chains][1] == "mask_ratio 0.5, flip false, crop_scale 0.2 to 1.0"
    assert len(chains) == 4
    assert chains[1].pretraining.settings[-3:] == ("mask_ratio=0.5", "flip=false", "crop_scale=[0.2, 1.0]")


def test_cells_may_have_a_backbone_and_a_task_of_their_own(tmp_path: Path) -> None:
    text = HEAD + ONE_EPOCH + "[grid]\nbackbone = ['vit_t_mae', 'vit_b_mae']\n"
    text += "[tiny]\nbackbone = 'vit_t_mae'\ntask = 'tiny_pretrain'\n"
    toy = suite.load(write(tmp_path, text))
    steps = [(chain.pretraining, *chain.transfers) for _, chain in suite.plan(toy) if chain]
    assert [[step.backbone for step in chain] for chain in steps] == [["vit_t_mae"] * 2, ["vit_b_mae"] * 2]
    assert steps[1][0].settings == ("steps=2", "warmup_steps=1", "batch=8")
    assert len({id(chain) for _, chain in suite.plan(toy, tiny=True)}) == 1  # which has one backbone
    text = HEAD + 'run = [{ cell = "a", task = "cifar10_pretrain" }]'
    ((_, chain),) = suite.plan(suite.load(write(tmp_path, text)))
    assert chain is not None and chain.pretraining.task == "cifar10_pretrain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('run = [{ cell = "a", setings = {} }]', r"unknown key 'run\.0\.setings' \(did you mean 'settings'\?\)"),
        ('run = [{ cell = "a" }, { cell = "a" }]', "two cells are 'a'"),
        ("[grid]", r"needs \[\[run\]\] entries or a \[grid\]"),
        ("[grid]\nmask_ratio = []", "grid.mask_ratio is an empty list"),
        ('run = [{ cell = "a", settings = { mask_ratoi = 0.5 } }]', "toy', a: --set mask_ratoi=0.5: unknown key"),
        ('run = [{ cell = "a", settings = { mask_ratio = 2.0 } }]', "mask_ratio: .* less than 1"),
        ('transfer = [{ task = "tiny_liner" }]\nrun = [{ cell = "a" }]', "did you mean 'tiny_linear'"),
        ("[grid]\nbackbone = [3]", "backbone: Input should be a valid string, not 3"),
        ('tiny = 3\nrun = [{ cell = "a" }]', "tiny"),
    ],
)
def test_faults_of_a_file_are_named_before_anything_runs(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        suite.run(write(tmp_path, HEAD + text), options=Options(out=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown suite 'mae_ablation' \(did you mean 'mae_ablations'\?\)"):
        suite.load("mae_ablation")
    with pytest.raises(UserError, match=r"no suite at .*none\.toml"):
        suite.load(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="differs from the file's name 'other'"):
        suite.load(write(tmp_path, HEAD + 'run = [{ cell = "a" }]', "other"))
    toy = suite.load(write(tmp_path, HEAD + 'run = [{ cell = "a" }]'))
    with pytest.raises(UserError, match="has no tiny form"):
        suite.plan(toy, tiny=True)
    with pytest.raises(UserError, match="--only b: no cell"):
        suite.plan(toy, only="b")
    with pytest.raises(UserError, match="--jobs 0"):
        suite.run(write(tmp_path, HEAD + 'run = [{ cell = "a" }]'), jobs=0)


def test_only_takes_a_part_of_a_label_or_a_pattern() -> None:
    bundled = suite.load("mae_ablations")
    assert len(suite.plan(bundled, only="table 1c")) == 2
    assert [cell.cell for cell, _ in suite.plan(bundled, only="fig.5*90")] == ["mask ratio 90 %"]


def test_the_suite_of_the_guide_is_a_suite(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/suites.md").read_text(encoding="utf-8"), re.DOTALL)
    planned = suite.plan(suite.load(write(tmp_path, text, "my_question")))
    assert [cell.label for cell, _ in planned][1] == "mask_ratio 0.5, sampling block"
    assert len(planned) == 4


# Carrying it out, with processes that write a record and no more.


class Written:
    """Stands in for the processes: writes what a run leaves, without training. ``fault(words)`` is what went wrong."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = out
        self.words: list[list[str]] = []
        self.lock = threading.Lock()
        self.fault: Callable[[list[str]], str] = lambda words: ""
        monkeypatch.setattr(suite.Processes, "run", lambda _, words, log: self.write(words))

    def write(self, words: list[str]) -> str:
        with self.lock:  # cells may run side by side
            self.words.append(words)
            number = len(self.words)
        if fault := self.fault(words):
            return fault
        given = dict(zip(words[1::2], words[2::2], strict=False))
        first, seed = words[0] == "pretrain", int(given["--seeds"])
        backbone = load_backbone(given["--backbone"])
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        resolved = resolve_task(given["--task"], backbone, settings)
        recipe = runs.recipe_of(resolved, runs.untrained(backbone) if first else backbone)
        weights: dict[str, Any] = {"kind": "none"}
        if not first:
            file = Path(given["--weights"])
            maker = {"recipe_hash": read_record(file.with_name("record.json")).recipe_hash}
            weights = {"kind": "given", "sha256": file_hash(file), "maker": maker}
        kind = {"engine": "pretraining", "metric": "loss"} if first else {"engine": "classification", "metric": "top1"}
        folder = self.out / resolved.task.name / backbone.name / f"seed{seed}-{number:08x}"
        changes = kind | {"task": resolved.task.name, "metrics": {kind["metric"]: 40.0 + seed}, "weights": weights}
        write_record(record_from(values(seed=seed) | changes | {"recipe_hash": digest(recipe)}), folder)
        if first:
            (folder / "encoder.safetensors").write_text(" ".join(words))
        return ""


TWO = HEAD + ONE_EPOCH + 'run = [{ cell = "half", settings = { mask_ratio = 0.5 } }, { cell = "default" }]\n'


def test_runs_are_done_once_and_every_encoder_goes_to_its_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, written = tmp_path / "runs", Written(tmp_path / "runs", monkeypatch)
    name = write(tmp_path, TWO)
    assert suite.run(name, seeds=[0, 1], options=Options(out=out, workers=0)) == 0
    assert [words[0] for words in written.words] == ["pretrain", "run"] * 4
    made = [words for words in written.words if words[0] == "run"]
    assert len({words[words.index("--weights") + 1] for words in made}) == 4
    assert all(words[words.index("--workers") + 1] == "0" and "--resume" in words for words in written.words)
    assert "4 done, 0 skipped, 0 failed" in capsys.readouterr().out
    # The same again: nothing runs. Another seed: only that one.
    assert suite.run(name, seeds=[0, 1, 1], options=Options(out=out)) == 0
    assert len(written.words) == 8
    assert "0 done, 4 skipped, 0 failed" in capsys.readouterr().out
    assert suite.run(name, seeds=[0, 2], only="half", options=Options(out=out)) == 0
    assert len(written.words) == 10
    # Other weights under the same name: their transfers are to be done again.
    encoder = next((out / "tiny_pretrain").rglob("seed0-*/encoder.safetensors"))
    encoder.write_text("other weights")
    assert suite.run(name, options=Options(out=out)) == 0
    assert [words[0] for words in written.words[10:]] == ["run"]


def test_a_failed_run_stops_neither_the_rest_nor_its_fellows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Written(tmp_path / "runs", monkeypatch)
    text = TWO.replace("transfer = [", 'transfer = [{ task = "tiny_finetune" }, ')
    broken = "mask_ratio=0.5"
    written.fault = lambda words: "out of memory" if broken in words or "tiny_finetune" in words else ""
    assert suite.run(write(tmp_path, text), options=Options(out=tmp_path / "runs")) == 2
    assert [words[2] for words in written.words] == ["tiny_pretrain", "tiny_pretrain", "tiny_finetune", "tiny_linear"]
    said = capsys.readouterr().out
    assert "tiny_pretrain: out of memory" in said and "tiny_finetune: out of memory" in said
    assert "0 done, 0 skipped, 2 failed" in said
    written.fault = lambda words: ""
    assert suite.run(write(tmp_path, text), jobs=2, options=Options(out=tmp_path / "runs")) == 0
    done = sorted((words[0], words[2]) for words in written.words[4:])
    assert done == [("pretrain", "tiny_pretrain"), *[("run", "tiny_finetune")] * 2, ("run", "tiny_linear")]


def test_a_record_that_does_not_count_is_no_done_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smoke run, and a run on data that the recipe does not mean, of the same recipe and seed."""
    written = Written(tmp_path / "runs", monkeypatch)
    name = write(tmp_path, HEAD + 'run = [{ cell = "default" }]')
    assert suite.run(name, options=Options(out=tmp_path / "runs")) == 0
    file = next((tmp_path / "runs").rglob("record.json"))
    record = read_record(file)
    for change in ({"smoke": True}, {"data": record.data.model_copy(update={"matches": False})}):
        file.unlink()
        write_record(record.model_copy(update={**change, "protocol": record.recipe_protocol + "+other"}), file.parent)
        before = len(written.words)
        assert suite.run(name, options=Options(out=tmp_path / "runs")) == 0
        assert len(written.words) == before + 1
        for extra in (tmp_path / "runs").rglob("record.json"):
            if extra != file:
                extra.unlink()


def test_what_is_lost_or_damaged_is_a_failure_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Written(tmp_path / "runs", monkeypatch)
    name = write(tmp_path, HEAD + 'run = [{ cell = "default" }]')
    assert suite.run(name, options=Options(out=tmp_path / "runs")) == 0
    next((tmp_path / "runs").rglob("encoder.safetensors")).unlink()
    assert suite.run(name, options=Options(out=tmp_path / "runs")) == 1
    assert "holds a record but no encoder.safetensors; move that folder away" in capsys.readouterr().out
    next((tmp_path / "runs").rglob("record.json")).write_text("{")
    assert suite.run(name, options=Options(out=tmp_path / "runs")) == 1
    assert "is not a record" in capsys.readouterr().out
    monkeypatch.setattr(suite.Processes, "run", lambda *_: "")
    assert suite.run(name, options=Options(out=tmp_path / "elsewhere")) == 1
    assert "it left no record" in capsys.readouterr().out
    assert len(written.words) == 1


def test_a_dry_run_prints_commands_and_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Written(tmp_path / "runs", monkeypatch)
    name, options = write(tmp_path, TWO), Options(out=tmp_path / "runs", micro_batch=4)
    assert suite.run(name, only="half", options=options) == 0
    capsys.readouterr()
    assert suite.run(name, dry_run=True, options=options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["half;", "done", "done", "default;", "to", "to"]
    assert lines[4].startswith(
        "  to run  python -m mae_bench pretrain --task tiny_pretrain --backbone vit_t_mae --seeds"
    )
    assert "--micro-batch 4" in lines[4] and "--set steps=2 --set warmup_steps=1 --set batch=8" in lines[4]
    assert "--weights" in lines[5]
    assert len(written.words) == 2


def test_a_cell_without_settings_runs_below_out_all_the_same(tmp_path: Path) -> None:
    """`pretrain` of a recipe as it is fills the cache; a setting that changes nothing keeps the run here."""
    text = HEAD.replace("settings = { steps = 2, warmup_steps = 1, batch = 8 }\n", "") + 'run = [{ cell = "as it is" }]'
    (chain,) = [chain for _, chain in suite.plan(suite.load(write(tmp_path, text))) if chain]
    assert chain.pretraining.settings == ("batch=64",)
    backbone = load_backbone("vit_t_mae")
    plain = runs.recipe_of(resolve_task("tiny_pretrain", backbone), runs.untrained(backbone))
    assert chain.pretraining.recipe_hash == digest(plain)


def test_the_table_has_mean_spread_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Written(tmp_path / "runs", monkeypatch)
    name = write(tmp_path, TWO + "[tiny]\nbackbone = 'vit_t_mae'\ntask = 'tiny_pretrain'\n")
    suite.run(name, seeds=[0, 1], only="half", options=Options(out=tmp_path / "runs"))
    text = suite.table(name, out=tmp_path / "runs")
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["cell", "changed", "tiny&#95;linear"] or rows[0] == ["cell", "changed", "tiny_linear"]
    assert rows[2:] == [["half", "mask_ratio 0.5", "40.50 ± 0.71 (n=2)§"], ["default", "–", "–"]]
    assert "1 numbers are still to be run" in text
    assert suite.table(name, out=tmp_path / "nowhere").count("–") >= 2


# Real processes.


@pytest.mark.slow
def test_a_real_suite_and_one_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = 'target = "tokens", norm_pix = false, tokenizer = "none"'
    cells = f'run = [{{ cell = "default" }}, {{ cell = "tokens", settings = {{ {tokens} }} }}]\n'
    text = HEAD + ONE_EPOCH + cells
    options = Options(out=tmp_path / "runs", device="cpu", workers=0)
    assert suite.run(write(tmp_path, text), jobs=2, options=options) == 1
    said = capsys.readouterr().out
    assert "'none' is no entry point of the group mae_bench.tokenizers" in said
    assert "1 done, 0 skipped, 1 failed" in said
    transfer = read_record(next((tmp_path / "runs" / "tiny_linear").rglob("record.json")))
    made = read_record(next((tmp_path / "runs" / "tiny_pretrain").rglob("record.json")))
    assert transfer.weights.maker["recipe_hash"] == made.recipe_hash
    assert transfer.command[:4] == ["python", "-m", "mae_bench", "run"]
    assert f"{transfer.value:.2f} (n=1)" in suite.table(str(tmp_path / "toy.toml"), out=tmp_path / "runs")
    assert suite.run(str(tmp_path / "toy.toml"), only="default", options=options) == 0
    assert "0 done, 1 skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_every_run_and_prints_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_BENCH_CACHE", str(tmp_path / "cache"))  # what is being made there is lost
    text = HEAD.replace("steps = 2", "steps = 100000") + 'run = [{ cell = "endless" }]\n'
    out = tmp_path / "runs"
    code = "import sys, pathlib; from mae_bench import suite; from mae_bench.engine.job import Options\n"
    code += "suite.run(sys.argv[1], options=Options(out=pathlib.Path(sys.argv[2]), device='cpu', workers=0))"
    words = [sys.executable, "-c", code, write(tmp_path, text), str(out)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not list((out / "suites").rglob("*.log")):
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"0 done, 0 skipped, 0 failed, 1 not carried out" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing of it is left
