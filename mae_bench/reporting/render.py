"""Tables as text: Markdown, LaTeX, CSV, HTML. Deterministic; every text is escaped for its format.

Each form ends with a newline. CSV holds numbers in columns of their own, and title and footnotes in a last one.
"""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Literal, get_args
from urllib.parse import quote

from mae_bench.errors import UserError, nearest
from mae_bench.reporting.grid import Cell, Column, Row, Table
from mae_bench.reporting.record import one_line

Form = Literal["markdown", "latex", "csv", "html"]
FORMS: tuple[str, ...] = get_args(Form)
LIMIT = 2000  # characters of a note
MOST = 32_000  # of a field of CSV; spreadsheets take 32,767
# What begins a mention, an e-mail address, an address with and one without a scheme (GitHub's spec, "Autolinks").
LINKED = re.compile(r"(?<![a-z0-9])@(?=\w)|@(?=[\w-]+\.[\w-])|(?<=\w):(?=//)|www(?=\.)", re.IGNORECASE)


def render(table: Table, form: str, *, title: bool = False) -> str:
    """``table`` as text in one of `FORMS`.

    Markdown has one line of heads, so a column's group stands before its head; ``title`` puts the title above, which
    LaTeX and HTML have as a caption. LaTeX is a ``table`` environment that needs the package booktabs. HTML is one
    ``<table>`` element without scripts, styles or addresses outside.

    Raises:
        UserError: unknown form.
    """
    writers = {"markdown": _markdown, "latex": _latex, "csv": _csv, "html": _html}
    if form not in writers:
        raise UserError(f"unknown format '{form}'{nearest(form, FORMS)}; known: {', '.join(FORMS)}")
    above = f"**{_text(table.title)}**\n\n" if title and form == "markdown" else ""
    return above + writers[form](table)


def _legend(table: Table, second: str) -> list[str]:
    """What marks of rank look like; ``second`` is the second best's look in this form."""
    marks = {cell.mark for row in table.rows for cell in row.cells}
    return [f"bold: best, {second}: second best"] if marks - {""} else []


# Markdown


def _markdown(table: Table) -> str:
    head = [_markdown_head(column) for column in table.columns]
    lines = [
        [f"**{_text(row.cells[0].text)}**", *[""] * (len(head) - 1)]
        if row.kind == "section"
        else [_markdown_cell(cell) for cell in row.cells]
        for row in table.rows
    ]
    body = _padded(head, lines, [column.align == "left" for column in table.columns])
    notes = "".join(f"- {_note(note)}\n" for note in [*_legend(table, "italic"), *table.notes])
    return body + (f"\n{notes}" if notes else "")


def _markdown_head(column: Column) -> str:
    parts = ((column.group, column.group_code), (column.head, column.code))
    return " ".join(_name(part) if code else _text(part) for part, code in parts if part)


def _markdown_cell(cell: Cell) -> str:
    text = _name(cell.text) if cell.code else _text(cell.text)
    text = {"best": f"**{text}**", "second": f"*{text}*", "": text}[cell.mark]
    return text + _text(cell.notes)


def _padded(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """A Markdown table, padded so that it also reads well as plain text."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        fields = (t.ljust(w) if is_left else t.rjust(w) for t, w, is_left in zip(row, widths, left, strict=True))
        return "| " + " | ".join(fields) + " |\n"

    rule = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    return line(head) + line(rule) + "".join(line(row) for row in rows)


def _name(value: str) -> str:
    """A name for Markdown: a code span, or escaped text where it holds anything unusual."""
    plain = len(value) <= 100 and re.fullmatch(r"[\w.@+:/=-]+( [\w.@+:/=-]+)*", value, re.ASCII)
    return f"`{value}`" if plain else _text(value)


def _note(value: str) -> str:
    """Text at the beginning of a list's item, where some characters begin a heading or another list."""
    text = _text(value, LIMIT)
    return f"&#{ord(text[0])};{text[1:]}" if re.match(r"[#+=-]|\d+[.)]", text) else text


def _text(value: str, limit: int = 300) -> str:
    """Text of one line and without meaning to Markdown or HTML.

    A space parts what GitHub would make a mention, an e-mail address or a link of. It reads text after entities and
    backslashes are gone, so that these do not help.
    """
    value = LINKED.sub(r"\g<0> ", value)
    special = r"[\\`*\[\]<>|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    readable = "*<"  # a backslash is as safe before these
    return re.sub(special, lambda m: f"\\{m[0]}" if m[0] in readable else f"&#{ord(m[0])};", one_line(value, limit))


# LaTeX

# fmt: off
TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": r"\textasciigrave{}", "[": "{[}", "]": "{]}", "*": "{*}",
    "–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\dots{}", "’": "'", "“": "``", "”": "''",
    "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "√": r"$\surd$", "−": "$-$", "°": r"$^\circ$",
    "§": r"\S{}", "†": r"\dag{}", "‡": r"\ddag{}", "¶": r"\P{}", "‖": r"$\|$",
    "σ": r"$\sigma$", "Δ": r"$\Delta$", "µ": r"$\mu$",
    "≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$", "→": r"$\to$",
    "²": "$^2$", "³": "$^3$", "₁": "$_1$", "₂": "$_2$",
    "ß": r"\ss{}", "ø": r"\o{}", "Ø": r"\O{}", "æ": r"\ae{}",
    "ᵃ": "$^a$", "ᵇ": "$^b$", "ᶜ": "$^c$", "ᵈ": "$^d$", "ᵉ": "$^e$", "ᶠ": "$^f$", "ᵍ": "$^g$", "ʰ": "$^h$",
}
# fmt: on
ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0308": '"',
    "\u030a": "r",
    "\u030c": "v",
    "\u0327": "c",
}  # fmt: skip


def _latex(table: Table) -> str:
    align = "".join("l" if column.align == "left" else "r" for column in table.columns)
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_tex(table.title)}}}",
        f"\\begin{{tabular}}{{{align}}}",
        "\\toprule",
        *_latex_groups(table.columns),
        " & ".join(_latex_text(column.head, column.code) for column in table.columns) + r" \\",
    ]
    previous = "head"
    for row in table.rows:
        if row.kind == "section" or previous == "head" != row.kind:
            lines.append("\\midrule")
        lines.append(_latex_row(row, len(table.columns)))
        previous = row.kind
    lines += ["\\bottomrule", "\\end{tabular}"]
    notes = [*_legend(table, "underlined"), *table.notes]
    if notes:
        lines += ["", "\\medskip", "\\footnotesize", "\\raggedright", *(f"{_tex(note, LIMIT)}\\par" for note in notes)]
    return "\n".join([*lines, "\\end{table}", ""])


def _latex_groups(columns: Sequence[Column]) -> list[str]:
    """The line of group heads with a rule under each; none if no column has a group."""
    if not any(column.group for column in columns):
        return []
    fields, rules = [], []
    for first, width, column in _spans(columns):
        text = _latex_text(column.group, column.group_code) if column.group else ""
        fields.append(f"\\multicolumn{{{width}}}{{c}}{{{text}}}")
        if column.group:
            rules.append(f"\\cmidrule(lr){{{first + 1}-{first + width}}}")
    return [" & ".join(fields) + r" \\", "".join(rules)]


def _spans(columns: Sequence[Column]) -> list[tuple[int, int, Column]]:
    """(first column, number of columns, one of them) of each group; columns without one stand alone."""
    spans, first = [], 0
    for group, members in groupby(columns, key=lambda column: column.group):
        found = list(members)
        spans += [(first, len(found), found[0])] if group else [(first + i, 1, one) for i, one in enumerate(found)]
        first += len(found)
    return spans


def _latex_row(row: Row, width: int) -> str:
    if row.kind == "section":
        return f"\\multicolumn{{{width}}}{{l}}{{\\textit{{{_tex(row.cells[0].text)}}}}} \\\\"
    return " & ".join(map(_latex_cell, row.cells)) + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = _latex_text(cell.text, cell.code)
    text = {"best": f"\\textbf{{{text}}}", "second": f"\\underline{{{text}}}", "": text}[cell.mark]
    return text + _tex(cell.notes)


def _latex_text(text: str, code: bool) -> str:
    return f"\\texttt{{{_tex(text)}}}" if code and text else _tex(text)


def _tex(value: str, limit: int = 300) -> str:
    """Text for pdflatex. A character that its fonts may lack is written as its code point, e.g. U+4E2D."""
    text = "".join(map(_tex_character, unicodedata.normalize("NFC", one_line(value, limit))))
    return re.sub("-(?=-)", "-{}", text)  # two hyphens would become a dash


def _tex_character(char: str) -> str:
    if char in TEX:
        return TEX[char]
    if char.isascii():
        return char
    parts = unicodedata.normalize("NFD", char)
    if len(parts) == 2 and parts[0].isascii() and parts[0].isalpha() and parts[1] in ACCENTS:
        return f"\\{ACCENTS[parts[1]]}{{{parts[0]}}}"
    return f"U+{ord(char):04X}"


# CSV


def _csv(table: Table) -> str:
    """A column of cells with ``n`` becomes value, std and n; marks stand in a column ``notes``; sections go first.

    The last column, ``note``, says in every row what the table is, and in the first one also the table's notes.
    """
    data: list[tuple[str, Row]] = []
    section = ""
    for row in table.rows:
        if row.kind == "section":
            section = row.cells[0].text
        else:
            data.append((section, row))
    parts = [_csv_parts([row.cells[i] for _, row in data]) for i in range(len(table.columns))]
    names = [" ".join(filter(None, (column.group, column.head))) for column in table.columns]
    sections = any(title for title, _ in data)
    head = ["section"] * sections + [
        name + suffix for name, suffixes in zip(names, parts, strict=True) for suffix in suffixes
    ]
    notes = "; ".join(one_line(note, LIMIT) for note in (table.title, *table.notes))
    rows = [
        [title] * sections
        + [_csv_field(cell, part) for cell, suffixes in zip(row.cells, parts, strict=True) for part in suffixes]
        for title, row in data
    ]
    rows = rows or [[""] * len(head)]
    told = [notes, *[one_line(table.title, LIMIT)] * (len(rows) - 1)]
    return csv_text([*head, "note"], [[*row, note] for row, note in zip(rows, told, strict=True)])


def _csv_parts(cells: Sequence[Cell]) -> list[str]:
    spread = [" std", " n"] if any(cell.n is not None for cell in cells) else []
    return ["", *spread, *([" notes"] if any(cell.notes for cell in cells) else [])]


def _csv_field(cell: Cell, part: str) -> object:
    number = cell.value if cell.value is not None else cell.text
    return {"": number, " std": cell.std, " n": cell.n, " notes": cell.notes}[part]


def csv_text(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_csv_safe(value) for value in row] for row in (head, *rows))
    return out.getvalue()


def _csv_safe(value: object) -> str:
    """Numbers with four decimals, small ones with six digits, undefined = empty; text can never be taken for a
    spreadsheet's formula."""
    if isinstance(value, float):
        small = 0 < abs(value) < 1e-3
        return "" if math.isnan(value) else f"{value:.6g}" if small else f"{round(value, 4) + 0.0:.4f}"
    text = "" if value is None else one_line(value, MOST)
    return "'" + text if isinstance(value, str) and text[:1] in set("=+-@") else text


# HTML


def _html(table: Table) -> str:
    lines = ["<table>", f"<caption>{_web(table.title)}</caption>", "<thead>"]
    grouped = any(column.group for column in table.columns)
    if grouped:
        fields = [
            f'<th scope="colgroup" colspan="{width}">{_web_text(column.group, column.group_code)}</th>'
            if column.group
            else "<td></td>"
            for _, width, column in _spans(table.columns)
        ]
        lines.append(f"<tr>{''.join(fields)}</tr>")
    heads = (f'<th scope="col">{_web_text(column.head, column.code)}</th>' for column in table.columns)
    lines.append(f"<tr>{''.join(heads)}</tr>")
    first_data = next((i for i, row in enumerate(table.rows) if row.kind != "head"), len(table.rows))
    lines += [_html_row(row, len(table.columns)) for row in table.rows[:first_data]]
    lines += ["</thead>", "<tbody>", *(_html_row(row, len(table.columns)) for row in table.rows[first_data:])]
    lines.append("</tbody>")
    notes = [*_legend(table, "underlined"), *table.notes]
    if notes:
        items = "".join(f"<li>{_web(note, LIMIT)}</li>" for note in notes)
        lines.append(f'<tfoot><tr><td colspan="{len(table.columns)}"><ul>{items}</ul></td></tr></tfoot>')
    return "\n".join([*lines, "</table>", ""])


def _html_row(row: Row, width: int) -> str:
    if row.kind == "section":
        return f'<tr><th scope="rowgroup" colspan="{width}">{_web(row.cells[0].text)}</th></tr>'
    fields = "".join(f"<td>{_html_cell(cell)}</td>" for cell in row.cells[1:])
    return f'<tr><th scope="row">{_html_cell(row.cells[0])}</th>{fields}</tr>'


def _html_cell(cell: Cell) -> str:
    text = _web_text(cell.text, cell.code)
    text = {"best": f"<strong>{text}</strong>", "second": f"<u>{text}</u>", "": text}[cell.mark]
    if cell.href and not cell.href.startswith("/"):  # a relative path: no other host, no scheme
        text = f'<a href="{quote(cell.href)}">{text}</a>'
    return text + (f"<sup>{_web(cell.notes)}</sup>" if cell.notes else "")


def _web_text(text: str, code: bool) -> str:
    return f"<code>{_web(text)}</code>" if code and text else _web(text)


def _web(value: str, limit: int = 300) -> str:
    return escape(one_line(value, limit))
