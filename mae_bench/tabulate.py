"""Tables by name, and those that are committed: results/tables and the README's, all from records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import pandas as pd

from mae_bench import doctor, places, runs, suite
from mae_bench.errors import UserError
from mae_bench.reporting import page, papers, staleness, store, tables
from mae_bench.reporting.cells import select
from mae_bench.reporting.files import write_whole
from mae_bench.reporting.grid import Table
from mae_bench.reporting.published import load_published
from mae_bench.reporting.record import one_line
from mae_bench.reporting.render import Form, render

TINY = "_tiny"
RUNS, SUITES, TABLES = "results/runs", "results/suites", "results/tables"
PAGE = "results/report.html"
BEGIN, END = "<!-- table: mae_against_scratch -->\n", "<!-- end of table -->\n"  # in the README
MADE = "`python -m mae_bench table --all` writes it"
By = tuple[Sequence[str], Sequence[str]]
Paths = Sequence[Path | str]


def frame(paths: Iterable[Path | str], metrics: Iterable[str] = ()) -> pd.DataFrame:
    """`store.load_frame`'s runs, judged against today's recipes and code. One pass over the files for all metrics.

    Raises:
        UserError: a damaged record, or two task recipes with one protocol id.
    """
    for fault in doctor.shared_protocols():
        raise UserError(fault)
    tree = staleness.Tree(runs.recipe_of, runs.untrained, runs.code_hash)
    return staleness.judge(store.load_frame(paths, *metrics), tree)


def names() -> dict[str, str]:
    """Name -> title of every table that `named` makes."""
    found = {name: f"{table.locator}: {table.title} ({source})" for name, (source, table) in papers.load().items()}
    for path in suite.files().values():
        form = suite.load(str(path))
        found[form.name] = form.summary
        if form.tiny:
            found[form.name + TINY] = f"{form.summary}; small form"
    return found


def named(name: str, paths: Paths = (), *, stale: bool = False, links: Path | None = None) -> Table:
    """A paper's table beside our runs below ``paths``, or a suite's (``…_tiny``: its small form).

    Args:
        paths: default: results/runs; of a suite, results/suites/<name>.

    Raises:
        UserError: unknown name; the message lists all, the nearest first.
    """
    own, short = suite.files(), name.removesuffix(TINY)
    if name in own or short in own:
        if len(paths) > 1:
            raise UserError(f"table {name}: give one folder of records, not {len(paths)}")
        if stale:
            raise UserError(f"table {name}: a suite's table has runs of today's recipes alone; leave out --stale")
        folder = Path(paths[0]) if paths else _root() / SUITES / name
        return suite.tabulate(short, tiny=name not in own, out=folder)
    source, definition = papers.find(name, [other for other in names() if other not in papers.load()])
    published = load_published()
    found = frame(paths or [_root() / RUNS], papers.metrics(source, definition, published))
    return papers.paper_table(source, definition, found, published, stale=stale, links=links)


def free(
    paths: Paths = (),
    *,
    by: By | None = None,
    metric: str | None = None,
    layout: tables.Layout = "wide",
    compare: tuple[str, str] | None = None,
    stale: bool = False,
    links: Path | None = None,
) -> Table:
    """`tables.results`, or `tables.compared` with ``compare``, of the runs below ``paths`` (default: results/runs).

    Raises:
        UserError: as these do, or no run has ``metric``.
    """
    where = paths or [_root() / RUNS]
    found = frame(where, [metric] if metric else ())
    if metric and not found["measured"].any():
        known = sorted({name for record in store.load_records(where) for name in record.metrics})
        raise UserError(f"--metric {metric}: no run has it; the runs have {', '.join(map(one_line, known)) or 'none'}")
    if compare:
        return tables.compared(found, *compare, stale=stale, links=links)
    return tables.results(found, layout=layout, by=by, stale=stale, links=links)


def text(
    name: str = "",
    paths: Paths = (),
    *,
    form: Form = "markdown",
    layout: tables.Layout | None = None,
    rows: str = "",
    columns: str = "",
    metric: str | None = None,
    compare: tuple[str, str] | None = None,
    stale: bool = False,
    links: Path | None = None,
) -> str:
    """The table that a command line asks for: `named` with ``name``, else `free`.

    Args:
        layout: default: wide, and full for CSV.
        rows, columns: properties separated by commas; both or neither.

    Raises:
        UserError: options that contradict each other, or as `named` and `free`.
    """
    given = {"--layout": layout, "--rows": rows, "--cols": columns, "--metric": metric, "--compare": compare}
    asked = [option for option, value in given.items() if value]
    if name:
        if asked:
            raise UserError(f"table {name} has rows and columns of its own: leave out {asked[0]}")
        return render(named(name, paths, stale=stale, links=links), form, title=True)
    if compare and set(asked) - {"--compare", "--metric"}:
        raise UserError(f"--compare has rows and columns of its own: leave out {asked[0]}")
    if (rows or columns) and layout:
        raise UserError("--rows and --cols are the wide layout: leave out --layout")
    by = (_words(rows), _words(columns)) if rows or columns else None
    layout = layout or ("full" if form == "csv" and not by else "wide")
    made = free(paths, by=by, metric=metric, layout=layout, compare=compare, stale=stale, links=links)
    return render(made, form)


def _words(option: str) -> list[str]:
    return [word.strip() for word in option.split(",") if word.strip()]


def report(paths: Paths = (), *, only: str | None = None, stale: bool = False) -> str:
    """The page of results (`reporting.page`) of the runs below ``paths``.

    Args:
        paths: default: results/runs; the tables of committed suites come with it.
        only: what the task, backbone, protocol or id of a run must contain.

    Raises:
        UserError: no run is left.
    """
    beside, found = _with_primary(paths or [_root() / RUNS])
    if only:  # which runs count is decided among all
        beside = page.matching(select(beside, stale=stale)[0], only)
    made = _papers(beside, stale=stale) + ([] if paths or only else list(_suites(_root()).values()))
    return page.page(found, tables=made, published=load_published(), stale=stale, only=only)


def _with_primary(paths: Iterable[Path | str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs in every metric that the papers' tables show or that is their own; and in their own alone."""
    published = load_published()
    metrics = {
        metric for source, table in papers.load().values() for metric in papers.metrics(source, table, published)
    }
    beside = frame(paths, [store.PRIMARY, *sorted(metrics)])
    return beside, beside[beside["primary"]].reset_index(drop=True)


def _root() -> Path:
    return places.checkout() or Path()


def committed(root: Path) -> dict[Path, str]:
    """Path below ``root`` -> text of every file that is made from the committed records.

    The README's part stands between `BEGIN` and `END`. A suite has a table once its folder of records exists.

    Raises:
        UserError: a damaged record, or a README without these two lines.
    """
    beside, judged = _with_primary([root / RUNS])
    shown, suites = _papers(beside), _suites(root)
    everything = [*shown, *suites.values()]
    against = _text(lambda: render(tables.compared(judged, "mae", "scratch"), "markdown"))
    made = {
        "all.md": _text(lambda: render(tables.results(judged, layout="long"), "markdown")),
        "all.csv": _text(lambda: render(tables.results(judged, layout="full"), "csv")),
        "all.tex": _text(lambda: render(tables.results(judged), "latex")),
        "mae_against_scratch.md": against,
        "papers.md": "\n".join(render(one, "markdown", title=True) for one in shown),
    }
    made |= {f"{name}.md": render(one, "markdown", title=True) for name, one in suites.items()}
    files = {root / TABLES / name: text for name, text in made.items()}
    return files | {
        root / PAGE: _text(lambda: page.page(judged, tables=everything, published=load_published())),
        root / "README.md": _readme(root / "README.md", against),
    }


def _text(make: Callable[[], str]) -> str:
    """The table, or the line that says why there is none: every record may be stale."""
    try:
        return make()
    except UserError as error:
        return f"{one_line(error)}\n"


def _suites(root: Path) -> dict[str, Table]:
    """The tables of the suites whose records are committed."""
    folders = sorted(path for path in (root / SUITES).glob("*") if path.is_dir())
    return {folder.name: named(folder.name, [folder]) for folder in folders}


def _papers(beside: pd.DataFrame, *, stale: bool = False) -> list[Table]:
    """Every paper's tables beside our runs."""
    published = load_published()
    every = papers.load().values()
    return [papers.paper_table(source, table, beside, published, stale=stale) for source, table in every]


def _readme(path: Path, block: str) -> str:
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{path}: expected one line {BEGIN.strip()} and below it one line {END.strip()}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def write(root: Path) -> list[Path]:
    """Write the files of `committed` that differ. Returns them."""
    changed = [(path, text) for path, text in committed(root).items() if _read(path) != text]
    for path, text in changed:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; free space, then {MADE}") from error
    return [path for path, _ in changed]


def check(root: Path) -> list[str]:
    """One line per committed file that is not what the records give, and per file that nothing makes."""
    made = committed(root)
    faults = [fault for path, text in made.items() if (fault := _difference(path, text, root))]
    extra = sorted(path for path in (root / TABLES).glob("*") if path not in made)
    return faults + [f"{path.relative_to(root)}: no record gives it; delete it" for path in extra]


def _difference(path: Path, text: str, root: Path) -> str:
    name, there = path.relative_to(root), _read(path)
    if there is None:
        return f"{name} is missing; {MADE}"
    if there == text:
        return ""
    lines = zip_longest(there.splitlines(keepends=True), text.splitlines(keepends=True), fillvalue="")
    number, pair = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1])
    # Around the first difference, or both might read the same.
    start = max(0, next(i for i, (old, new) in enumerate(zip_longest(*pair)) if old != new) - 60)
    said, given = (("…" if start else "") + repr(line[start : start + 120]) for line in pair)
    return f"{name} line {number} is not what the records give: {said}, expected {given}; {MADE}"


def _read(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8", "replace") if path.is_file() else None
