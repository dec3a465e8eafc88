"""The page of results: what it says, that it is the same every time, and that nothing in a record breaks out."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reporting_records import record, values

from mae_bench import places, tabulate
from mae_bench.errors import UserError
from mae_bench.reporting import details, page, plots
from mae_bench.reporting.grid import Cell, Column, Row, Table
from mae_bench.reporting.record import Record, record_from, write_record
from mae_bench.reporting.store import load_frame

ASSETS = Path(page.__file__).parent / "assets"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'><img src=x onerror=alert(1)>",
    "a\u202egnp.exe\u2028next\u0000\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "]]></svg><svg onload=alert(1)>",
]
SEEDS = {"mae": [48.0, 49.0, 50.5], "supervised": [40.2, 41.2, 39.4], "scratch": [40.0, 41.0, 39.0]}
RUNS = [
    record(init=init, seed=seed, value=value, baseline={"top1": 12.5}, recipe_hash=str(number) * 64)
    for number, (init, found) in enumerate(SEEDS.items(), start=1)
    for seed, value in enumerate(found)
]


class Parsed(HTMLParser):
    """Elements, their attributes and the text of a page, as a browser's parser cuts it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style") and self.cdata_elem:
            self.scripts[-1] += data
        else:
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def written(folder: Path, *records: Record) -> Path:
    for number, one in enumerate(records):
        write_record(one, folder / f"run{number:05d}")
    return folder


def made(folder: Path, *records: Record, **options: Any) -> str:
    return page.page(load_frame([written(folder, *records)]), **options)


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def words(text: str) -> str:
    return " ".join(Parsed(text).text.split())


def test_the_summary_has_numbers_gaps_and_what_they_are_to(tmp_path: Path) -> None:
    text = made(tmp_path, *RUNS, published=[])
    said = words(text)
    assert "9 of 9 records count here: 3 backbones on 1 task." in said
    assert "49.17 ± 1.26 +9.17 to scratch n = 3" in said
    assert "40.00 ± 1.00 baseline n = 3" in said
    assert "40.27 ± 0.90 +0.27 to scratch, within noise n = 3" in said
    tones = [td["class"] for td in Parsed(text).of("td") if td.get("class") in ("base", "even", "up1", "up2", "up3")]
    assert tones == ["base", "even", "up2"]


def test_a_gap_of_unknown_spread_has_the_faintest_colour_and_without_a_baseline_none(tmp_path: Path) -> None:
    one_seed = made(tmp_path / "1", *[run for run in RUNS if run.seed == 0], published=[])
    assert 'class="up1"' in one_seed and "+8.00" in one_seed
    alone = made(tmp_path / "2", *[run for run in RUNS if run.init == "mae"], published=[])
    assert "no baseline" in words(alone) and 'class="none"' in alone
    worse = made(tmp_path / "3", *RUNS, *[record(init="dino", seed=s, value=20.0 + s) for s in range(3)], published=[])
    assert 'class="down3"' in worse and "-19.00 to scratch" in words(worse)


def test_chance_level_and_what_was_left_out_are_said(tmp_path: Path) -> None:
    chance = [record(seed=seed, value=12.5 + seed / 10, baseline={"top1": 12.5}) for seed in range(2)]
    smoke = record(seed=7, smoke=True, protocol="tiny-linear@1+smoke")
    said = words(made(tmp_path, *chance, smoke, published=[]))
    assert "chance level" in said and "no better than a trivial prediction" in said
    assert "1 run left out (smoke: two steps on made data measure nothing)" in said


def test_a_folder_of_smoke_runs_has_a_page_and_no_records_have_none(tmp_path: Path) -> None:
    smoke = record(smoke=True, protocol="tiny-linear@1+smoke")
    assert "No record counts as a result" in words(made(tmp_path, smoke, published=[]))
    with pytest.raises(UserError, match=r"no records to report: .*mae_bench run"):
        page.page(load_frame([]))


def test_stale_runs_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    runs = load_frame([written(tmp_path, *RUNS)])
    judged = runs.assign(stale=["the task recipe has changed" if i == "mae" else "" for i in runs["init"]])
    assert "49.17" not in page.page(judged, published=[])
    assert "3 runs left out (stale: the task recipe has changed" in words(page.page(judged, published=[]))
    marked = words(page.page(judged, published=[], stale=True))
    assert "49.17 ± 1.26¶" in marked and "n = 3 stale" in marked


def test_the_same_records_make_the_same_bytes(tmp_path: Path) -> None:
    shuffled = list(RUNS)
    random.Random(0).shuffle(shuffled)
    assert made(tmp_path / "a", *RUNS) == made(tmp_path / "b", *shuffled, *RUNS[:2])


def test_every_link_leads_to_a_place_in_the_page_and_every_id_is_there_once(tmp_path: Path) -> None:
    parsed = Parsed(made(tmp_path, *RUNS))
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [one["href"] for one in parsed.of("a")]
    assert links and all(link and link.startswith("#") and link[1:] in ids for link in links)
    for _, attributes in parsed.elements:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in ids


def test_the_policy_admits_this_style_and_this_script_alone(tmp_path: Path) -> None:
    text = made(tmp_path, *RUNS)
    parsed = Parsed(text)
    policy = next(one["content"] for one in parsed.of("meta") if one.get("http-equiv"))
    assert policy and "default-src 'none'" in policy and "unsafe" not in policy
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script"))
    for name, (content,) in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    for tag, attributes in parsed.elements:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), tag
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
    assert not re.findall(r"url\(|@import", style[0]) and not re.findall(r"innerHTML|eval\(|fetch\(|XMLHttp", script[0])


def hostile(word: str, number: int) -> Record:
    changes = {
        "run_id": f"{word} {number}",
        "per_class": {word: {word: 1.0}},
        "notes": [word],
        "command": ["python", word],
        "metrics": {"top1": 50.0, word: 1.0},
        "history": [{"step": 1.0, "loss": 1.0}, {"step": 2.0, "loss": 2.0}],
        "recipe": {"values": {word: word}, "origins": {word: {"place": word, "source": word}}},
        "data": values()["data"] | {"name": word},
        "versions": {word: word},
        "weights": {
            "kind": "file",
            "sha256": "3" * 64,
            "maker": {"run_id": word},
            "load": {"file": word, "new": [word]},
        },
        "effective": {"precision": word},
        "ours": [word],
    }
    return record_from(values(seed=number) | changes | {"task": word, "backbone": word})


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plain = Parsed(made(tmp_path / "plain", *[hostile(f"word{i}", i) for i in range(len(HOSTILE))]))
    text = made(tmp_path / "hostile", *[hostile(word, i) for i, word in enumerate(HOSTILE)])
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.elements] == [tag for tag, _ in plain.elements]  # no element more, none less
    for tag, attributes in parsed.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "a" or str(attributes["href"]).startswith("#")
    assert all(char.isprintable() or char == "\n" for char in text)  # no bidi, no control character, no line separator
    assert "{{ 7 * 7 }}" in parsed.text  # no template of ours
    embedded = text[text.index('id="data">') :]
    assert "<" not in embedded[: embedded.index("</script>")].removeprefix('id="data">')
    titles = {run["title"] for run in data(text)["runs"].values()}
    assert "</script><script>alert(1)</script> 0" in titles


def test_a_command_with_hidden_characters_is_not_to_be_copied(tmp_path: Path) -> None:
    shown = [details.details(record(command=command)) for command in (["a", "b c"], ["a", "b\nrm"], ["a" * 5000])]
    assert (shown[0]["command"], shown[0]["exact"]) == ("a 'b c'", True)
    assert [one["exact"] for one in shown[1:]] == [False, False]


def test_a_record_says_what_its_number_depends_on(tmp_path: Path) -> None:
    load = {
        "file": "mae.pth",
        "layout": "FAIR",
        "matched": 51,
        "total": 59,
        "new": ["rel_pos"],
        "verified": "published",
    }
    weights = {"kind": "file", "sha256": "3" * 64, "load": load}
    text = made(tmp_path, record(weights=weights, notes=["a note"], best={"top1": 60.0}))
    one = data(text)["runs"]["run-tiny_linear.vit_t_mae.seed0"]
    assert one["command"] == "python -m mae_bench run" and one["notes"] == ["a note"]
    assert one["metrics"][0] == ["top1", "50.0000", "60.0000", ""]
    facts = {name: dict(rows) for name, rows in one["facts"].items()}
    assert facts["weights"]["proof"] == "51 of 59 encoder tensors loaded from mae.pth (FAIR); published; 1 new: rel_pos"
    assert facts["data"]["fingerprint"] == "4" * 64 and facts["run"]["recipe hash"] == "1" * 64
    assert facts["made with"]["code hash"] == "2" * 64 and facts["made with"]["commit"] == "5" * 40


def test_many_classes_are_cut_to_the_ends() -> None:
    one = details.details(record(per_class={f"c{i}": {"top1": float(i)} for i in range(1000)}))["classes"]
    assert len(one["rows"]) == details.MOST_CLASSES and one["more"] == 1000 - details.MOST_CLASSES
    assert one["rows"][0][0] == "c999" and one["rows"][-1][0] == "c0"


def test_many_records_make_a_bounded_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_RUNS", 20)
    monkeypatch.setattr(page, "MOST_CELLS", 2)
    runs = [record(init=i, seed=s, recipe_hash=str(n) * 64) for n, i in enumerate(SEEDS) for s in range(30)]
    text = made(tmp_path, *runs)
    assert len(data(text)["runs"]) == 20
    said = words(text)
    assert "records not in the page: 70; name fewer with --records or --only" in said
    assert "cells not in summary and results: 1;" in said


def png(width: int, height: int, *, noise: bool = False) -> bytes:
    stream = io.BytesIO()
    picture = Image.effect_noise((width, height), 90) if noise else Image.new("RGB", (width, height), "red")
    picture.save(stream, "png")
    return stream.getvalue()


def test_pictures_are_embedded_when_they_are_what_they_say(tmp_path: Path) -> None:
    good = png(60, 40)
    contents = [good, b"<svg onload=alert(1)>", png(700, 700, noise=True), good, good[:-20]]
    for number, content in enumerate(contents):
        write_record(record(seed=number), tmp_path / f"run{number}")
        (tmp_path / f"run{number}" / "samples.png").write_bytes(content)
    text = page.page(load_frame([tmp_path]))
    (picture,) = Parsed(text).of("img")
    assert picture["src"] == f"data:image/png;base64,{base64.b64encode(good).decode()}"
    assert (
        picture["alt"] == "Validation pictures with the predicted classes: vit_t_mae on tiny_linear, seed 0; top1 50.00"
    )
    said = words(text)
    for reason in ("no PNG", "larger than 300000 bytes", "cut off", "pictures left out: 1; one a task and backbone"):
        assert reason in said


def test_paper_tables_are_shown_and_open_where_ours_is_in_them(tmp_path: Path) -> None:
    columns = (Column("model", "left"), Column("ours"))
    tables = [
        Table("a", "Table <A>", columns, (Row((Cell("ViT"), Cell("1.0", 1.0, 0.1, 3))),)),
        Table("b", "Table B", columns, (Row((Cell("ViT"), Cell("–"))),)),
    ]
    text = made(tmp_path, *RUNS, tables=tables)
    opened = [one for one in Parsed(text).of("details") if one.get("class") == "paper"]
    assert ["open" in one for one in opened] == [True, False]
    assert "Table &lt;A&gt;" in text and "Table <A>" not in text


def test_the_repositorys_own_page_is_small_and_lists_every_published_file() -> None:
    root = places.checkout()
    assert root is not None
    text = page.page(load_frame([root / "results" / "runs"]))
    assert 50_000 < len(text.encode()) < 3_000_000
    files = {path.name for path in (root / "results" / "published").glob("*.csv")}
    assert {file for file, _, _ in page.licences()} == files


def test_only(tmp_path: Path) -> None:
    runs = load_frame([written(tmp_path, *RUNS)])
    assert set(page.matching(runs, "scratch")["init"]) == {"scratch"}
    assert len(page.matching(runs, "tiny-linear@1")) == len(RUNS)
    with pytest.raises(UserError, match="--only dino: no run's task"):
        page.page(runs, only="dino")


def test_only_shows_fewer_runs_and_counts_the_same(tmp_path: Path) -> None:
    """A run that a newer one supersedes does not count again because the newer one is not shown."""
    older = record(run_id="older", value=99.0, recipe_hash="1" * 64)
    newer = record(run_id="newer", value=50.0, recipe_hash="1" * 64, created="2026-02-01T00:00:00+00:00")
    folder = written(tmp_path, older, newer)
    said = words(page.page(load_frame([folder]), published=[], only="older"))
    assert "99.00" not in said.partition("Every record")[0]
    assert "0 of 1 records count here" in said and "only runs that contain 'older': 1 of 2" in said
    text = tabulate.report([folder], only="newer", stale=True)
    assert "50.00" in words(text) and set(data(text)["runs"]) == {"run-newer"}


def test_writing(tmp_path: Path) -> None:
    page.write("<p>", tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == "<p>"
    with pytest.raises(UserError, match=r"name it \.html"):
        page.write("<p>", tmp_path / "a.json")
    with pytest.raises(UserError, match=r"cannot write --out .*No such file"):
        page.write("<p>", tmp_path / "nowhere" / "a.html")


# Style


def colours() -> dict[str, tuple[str, str]]:
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in
            re.findall(r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style)}  # fmt: skip


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


TONES = ["up1", "up2", "up3", "down1", "down2", "down3", "even"]
PAIRS = [
    *(("ink", ground, 4.5) for ground in ("page", "raised", *TONES)),
    *((text, ground, 4.5) for text in ("quiet", "link") for ground in ("page", "raised")),
    *((f"s{i}", "page", 3.0) for i in range(plots.COLOURS)),
    *((line, "page", 3.0) for line in ("edge", "focus")),
]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("front", "ground", "least"), PAIRS)
def test_contrast(front: str, ground: str, least: float, theme: int) -> None:
    """WCAG 2.2 AA: 4.5 for text (1.4.3), 3 for what a chart or a control is made of (1.4.11)."""
    known = colours()
    high, low = sorted((luminance(known[name][theme]) for name in (front, ground)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= least
