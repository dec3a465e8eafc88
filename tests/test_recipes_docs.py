"""The documentation says what is true: its links lead somewhere, its recipes validate, its commands parse."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from mae_bench import cli
from mae_bench.recipes import load_backbone, load_task, resolve_task
from mae_bench.schema import DataSpec

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tasks/*/README.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def _toml_blocks(page: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def _commands(text: str) -> list[list[str]]:
    lines = [line.split("#")[0] for line in text.splitlines() if line.startswith("    ") or line.startswith("python")]
    found = [shlex.split(line)[:] for line in lines if "-m mae_bench " in line and "$(" not in line]
    return [words[words.index("mae_bench") + 1 :] for words in found]


@pytest.mark.parametrize("page", NAMES)
def test_links_inside_the_repository_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("https://", "http://")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", NAMES)
def test_commands_parse(page: str) -> None:
    for words in _commands((ROOT / page).read_text(encoding="utf-8")):
        cli._parser().parse_args(words)


def test_the_backbone_of_the_guide_is_a_backbone(tmp_path: Path) -> None:
    (text,) = _toml_blocks("docs/adding_a_backbone.md")
    path = tmp_path / "vit_b_mine.toml"
    path.write_text(text.replace('sha256 = "…"', 'sha256 = "0123abcd"'))
    assert load_backbone(str(path)).name == "vit_b_mine"


def test_the_task_of_the_guide_is_a_task(tmp_path: Path) -> None:
    text, formats = _toml_blocks("docs/adding_a_task.md")
    folder = tmp_path / "my_task"
    folder.mkdir()
    (folder / "task.toml").write_text(text)
    assert resolve_task(str(folder), load_backbone("vit_b_mae")).values.epochs == 10
    assert load_task(str(folder)).data.expected == {"train": 5000, "val": 1000}
    assert DataSpec.model_validate(tomllib.loads(formats)["data"]).repository == "owner/name"


def test_the_layers_of_the_guide_are_layers() -> None:
    (text,) = _toml_blocks("docs/recipes.md")
    first, second = tomllib.loads(text)["layer"]
    assert first["source"] and second["when"] == {"size": ["l"], "init": ["mae"]}
