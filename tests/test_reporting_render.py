"""One table in four formats: what each shows, and that hostile text stays text in each."""

from __future__ import annotations

import csv
import html
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mae_bench.errors import UserError
from mae_bench.reporting.grid import Cell, Column, Row, Table, ranked
from mae_bench.reporting.papers import load, paper_table
from mae_bench.reporting.published import load_published
from mae_bench.reporting.render import FORMS, TEX, render
from mae_bench.reporting.store import frame

TABLE = Table(
    "toy",
    "A table: 50 % of it",
    (Column("name", "left"), Column("top1", group="tiny_linear", code=True, group_code=True),
     Column("gap", group="tiny_linear", group_code=True), Column("p")),
    (
        Row((Cell("protocol"), Cell("tiny-linear@1", code=True), Cell(), Cell()), "head"),
        Row((Cell("baselines"),), "section"),
        Row((Cell("scratch"), Cell("40.00 ± 1.00 (n=3)", 40.0, 1.0, 3, mark="second"), Cell("-1.50", -1.5), Cell("–"))),
        Row((Cell("MAE"), Cell("49.17 (n=1)", 49.1666, float("nan"), 1, "best", "../runs/a b.json", "*†§"),
             Cell("+2.00", 2.0), Cell("<0.0001", 0.00001))),
    ),
    ("± over n seeds, 2·√(s₁² + s₂²)",),
)  # fmt: skip


def test_markdown() -> None:
    assert render(TABLE, "markdown").splitlines() == [
        "| name          | `tiny_linear` `top1` | `tiny_linear` gap |        p |",
        "| ------------- | -------------------: | ----------------: | -------: |",
        "| protocol      |      `tiny-linear@1` |                   |          |",
        "| **baselines** |                      |                   |          |",
        "| scratch       | *40.00 ± 1.00 (n=3)* |             -1.50 |        – |",
        r"| MAE           |  **49.17 (n=1)**\*†§ |             +2.00 | \<0.0001 |",
        "",
        "- bold: best, italic: second best",
        "- ± over n seeds, 2·√(s₁² + s₂²)",
    ]
    assert render(TABLE, "markdown", title=True).startswith("**A table: 50 % of it**\n\n| name")


def test_latex() -> None:
    text = render(TABLE, "latex")
    assert "\\caption{A table: 50 \\% of it}\n\\begin{tabular}{lrrr}\n\\toprule\n" in text
    assert "\\multicolumn{2}{c}{\\texttt{tiny\\_linear}}" in text
    assert "\\cmidrule(lr){2-3}" in text
    assert "\\multicolumn{4}{l}{\\textit{baselines}} \\\\\n" in text
    assert "scratch & \\underline{40.00 $\\pm$ 1.00 (n=3)} & -1.50 & \\textendash{} \\\\\n" in text
    assert "MAE & \\textbf{49.17 (n=1)}{*}\\dag{}\\S{} & +2.00 & \\textless{}0.0001 \\\\\n\\bottomrule" in text
    assert "$\\pm$ over n seeds, 2$\\cdot$$\\surd$(s$_1$$^2$ + s$_2$$^2$)\\par\n" in text
    assert text.count("\\midrule") == 1


def test_csv_has_numbers_in_columns_of_their_own() -> None:
    _, first, second = csv.DictReader(io.StringIO(render(TABLE, "csv")))
    assert first == {
        "section": "baselines", "name": "scratch", "tiny_linear top1": "40.0000", "tiny_linear top1 std": "1.0000",
        "tiny_linear top1 n": "3", "tiny_linear top1 notes": "", "tiny_linear gap": "-1.5000", "p": "–",
        "note": "A table: 50 % of it",
    }  # fmt: skip
    assert (second["tiny_linear top1 std"], second["tiny_linear top1 notes"], second["p"]) == ("", "*†§", "1e-05")


def test_csv_says_what_the_other_forms_say() -> None:
    """The title in every row, for a row may be taken out; the notes in the first; both also where there is no row."""
    found = list(csv.DictReader(io.StringIO(render(TABLE, "csv"))))
    assert found[0]["note"] == "A table: 50 % of it; ± over n seeds, 2·√(s₁² + s₂²)"
    assert {row["note"] for row in found[1:]} == {"A table: 50 % of it"}
    notes = tuple(f"{i} runs left out" for i in range(1000))
    (row,) = csv.DictReader(io.StringIO(render(Table("x", "Not comparable", (Column("a"),), (), notes), "csv")))
    assert row["a"] == "" and row["note"] == "; ".join(("Not comparable", *notes))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (-0.0, "0.0000"), (9.9e-4, "0.00099"), (1e-3, "0.0010"), (3.2e-12, "3.2e-12"), (50.0, "50.0000")],
)
def test_small_numbers_in_csv_are_not_rounded_away(value: float, text: str) -> None:
    table = Table("x", "t", (Column("p"),), (Row((Cell(value=value),)),))
    assert next(csv.DictReader(io.StringIO(render(table, "csv"))))["p"] == text


@pytest.mark.parametrize(
    "text",
    ["@octocat look", "a @octocat", "(@octocat)", "a_@octocat", "mail a.b@example.org", "http://example.org",
     "see https://a", "www.example.org", "WWW.example.org", "ftp://a/b", "mailto:a@b.de", "&@octocat"],
)  # fmt: skip
def test_foreign_text_is_no_mention_and_no_link(text: str) -> None:
    """GitHub looks for them in the text that a reader sees, so that an entity would not help."""
    table = Table("x", text, (Column(text),), (Row((Cell(text),)),), (text,))
    shown = html.unescape(render(table, "markdown", title=True))
    assert not re.search(r"(?<![A-Za-z0-9])@\w|@[\w-]+\.[\w-]|\w://|www\.", shown, re.IGNORECASE)
    assert "".join(text.split()) in "".join(shown.split()).replace("\\", "")


def test_protocol_ids_stay_as_they_are() -> None:
    table = Table("x", "", (Column("a"),), (Row((Cell("1"),)),), ("ours: in1k-finetune-mae@1 (task x), y@2+set:1.",))
    assert "- ours: in1k-finetune-mae@1 (task x), y@2+set:1.\n" in render(table, "markdown")


class Page(HTMLParser):
    """Elements and text of HTML; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def test_html() -> None:
    text = render(TABLE, "html")
    page = Page(text)
    assert page.elements[0] == ("table", {})
    assert "<caption>A table: 50 % of it</caption>" in text
    assert '<th scope="colgroup" colspan="2"><code>tiny_linear</code></th>' in text
    assert '<th scope="rowgroup" colspan="4">baselines</th>' in text
    assert (
        '<th scope="row">MAE</th><td><a href="../runs/a%20b.json"><strong>49.17 (n=1)</strong></a><sup>*†§</sup>'
        in text
    )
    assert "<u>40.00 ± 1.00 (n=3)</u>" in text and "&lt;0.0001" in text
    rows = text.split("<tr>")[1:]
    widths = [sum(int(span or 1) for span in re.findall(r'<t[hd](?: scope="\w+")?(?: colspan="(\d+)")?>', row))
              for row in rows]  # fmt: skip
    assert set(widths) == {4}


def test_unknown_format_and_a_row_of_another_width() -> None:
    with pytest.raises(UserError, match=r"unknown format 'markdwon' \(did you mean 'markdown'\?\); known: markdown, "):
        render(TABLE, "markdwon")
    with pytest.raises(ValueError, match="a row of 1 cells, expected 4"):
        Table("x", "", TABLE.columns, (Row((Cell(),)),))


@pytest.mark.parametrize("href", ["javascript:alert(1)", "http://a/b", "//a/b", "/work/x.json", 'a" onclick="b'])
def test_links_are_relative_paths(href: str) -> None:
    """A colon and quotes are percent-encoded, so no scheme, host or attribute can be spelled."""
    page = Page(render(Table("x", "", (Column("a"),), (Row((Cell("1", href=href),)),)), "html"))
    links = [attributes["href"] or "" for tag, attributes in page.elements if tag == "a"]
    assert all(re.fullmatch(r"[\w./%~-]+", link) and not link.startswith("/") for link in links)
    assert not any("onclick" in attributes for _, attributes in page.elements)


def hostile(text: str) -> Table:
    """``text`` wherever a table has text."""
    cell = Cell(text, code=True, href=text, notes=text)
    row = Row((Cell(text), cell, Cell(text, 1.0, 2.0, 3, "best", text, text)))
    columns = (Column(text), Column(text, group=text), Column(text, code=True, group=text, group_code=True))
    return Table("x", text, columns, (Row(row.cells, "head"), Row((Cell(text),), "section"), row, row), (text, text))


HOSTILE = [
    "a|b\\|c",
    "<script>alert(1)</script>",
    "*a* _b_ ~~c~~ &amp; `d`",
    "line\nbreak | - |",
    "![x](http://a) <http://b>",
    "\\input{x} $x^2$ #1 {a} %c\\",
    "[x] * -- ?` !` ~",
    "-->",
    "# 1",
    "1. a",
    "=",
    "    code",
    "\x00\x1b[31m\u202e\ufeff",
    "é ü ñ Ł 中文 😀 ﬁ",
    "\\\\[1cm]",
]


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=40))
def test_hostile_text_stays_text(text: str) -> None:
    check_hostile(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_examples_stay_text(text: str) -> None:
    check_hostile(text)


def check_hostile(text: str) -> None:
    table = hostile(text)
    page = Page(render(table, "html"))
    assert {tag for tag, _ in page.elements} <= {
        "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "code", "strong", "sup", "a", "ul", "li",
    }  # fmt: skip
    assert {name for _, attributes in page.elements for name in attributes} <= {"scope", "colspan", "href"}
    types = [token.type for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(
        render(table, "markdown")) for token in (token, *(token.children or ()))]  # fmt: skip
    assert not {"html_block", "html_inline", "link_open", "image", "heading_open", "fence", "hr"} & set(types)
    assert types.count("tr_open") == 5  # the head, a head line, the section, two rows
    assert types.count("th_open") == 3 and types.count("td_open") == 12
    parsed = list(csv.reader(io.StringIO(render(table, "csv"))))
    assert len({len(row) for row in parsed}) == 1 and len(parsed) == 4
    assert not any(field[:1] in "=+-@" for row in parsed for field in row if field)
    latex = render(table, "latex")
    assert latex.isascii()
    body = latex.partition("\\toprule")[2].partition("\\bottomrule")[0]
    assert len(re.findall(r"\\\\\n", body)) == 6  # groups, heads, and the four rows
    plain = re.sub("|".join(map(re.escape, sorted(set(TEX.values()), key=len, reverse=True))), "", latex)
    assert plain.count("{") == plain.count("}")


@settings(max_examples=50)
@given(st.lists(st.one_of(st.none(), st.floats(allow_infinity=False)), max_size=6), st.booleans())
@example([1.0, 1.001, 2.0], False)
def test_ranks(values: list[float | None], lower: bool) -> None:
    """The best and the second best are marked; equal as shown is equal."""
    cells = ranked([Cell(value=value) for value in values], lower=lower)
    shown = sorted({round(v, 2) for v in values if v is not None and v == v}, reverse=not lower)
    for value, cell in zip(values, cells, strict=True):
        place = shown.index(round(value, 2)) if value is not None and value == value and len(shown) > 1 else 9
        assert cell.mark == {0: "best", 1: "second"}.get(place, "")


@pytest.mark.parametrize("form", FORMS)
def test_a_table_without_rows(form: str) -> None:
    assert render(Table("x", "t", (Column("a"),), ()), form).endswith("\n")


def compile_latex(folder: Path, *tables: str) -> str:
    """The text of the PDF's log; fails where pdflatex does."""
    body = "\n\\clearpage\n".join(tables)
    (folder / "t.tex").write_text(
        "\\documentclass{article}\n\\usepackage[paperwidth=2000mm,paperheight=2000mm]{geometry}\n\\usepackage{booktabs}\n"
        f"\\begin{{document}}\n{body}\n\\end{{document}}\n", encoding="utf-8"
    )  # fmt: skip
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "t.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    log = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, log[-3000:]
    return log


@pytest.mark.slow
def test_latex_compiles(tmp_path: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed: apt-get install texlive-latex-recommended")
    every = Table("x", "every character", (Column("".join(TEX)),), (Row((Cell("".join(TEX)),)),), ("".join(TEX),))
    published = load_published()
    real = [paper_table(source, table, frame([]), published) for source, table in load().values()]
    log = compile_latex(tmp_path, *(render(table, "latex") for table in (TABLE, every, *map(hostile, HOSTILE), *real)))
    assert "Missing character" not in log
