"""The report and the notebooks' pages: whole, linked, described, and without a request to anybody."""

import base64
import html
import re

import nbformat
import pytest
from book import figures
from conftest import says

from pardemo import claims, cli, project
from pardemo.book.run import report, runner, scorecard, site
from pardemo.book.run.report import command, pages
from pardemo.claims import Ledger
from pardemo.claims.lines import Line

REFERENCE = project.root() / "outputs" / "reference"
README = project.root() / "README.md"


#: What a browser would fetch: by a tag, or by a style.
FETCHES = re.compile(
    r'<(?:script|img|link|iframe|source|video|object)\b[^>]*\b(?:src|href|data)="(?!data:)|url\((?!data:)'
)


def links(page):
    return re.findall(r'<a\b[^>]*\bhref="([^"]+)"', page)


def described(page):
    """Whether every picture has alternative text."""
    pictures = re.findall(r"<img\b[^>]*>", page)
    return all(re.search('alt="(?!No description)[^"]', picture) for picture in pictures)


@pytest.mark.parametrize("name", sorted(["report", *(path.stem for path in REFERENCE.glob("*.ipynb"))]))
def test_a_page_of_the_reference_is_whole(reference_pages, name):
    page = (reference_pages / f"{name}.html").read_text()
    beside = page.replace('src="figures/', 'src="data:')  # the report's pictures lie beside it
    assert not FETCHES.search(beside if name == "report" else page), "a page asks nobody for anything"
    assert described(page)


def test_every_link_of_the_reference_leads_somewhere(reference_pages):
    site._check(reference_pages)


def test_the_checks_above_can_fail():
    for bad in (
        "<style>p{background:url(x.png)}</style>",
        '<script defer src="a.js"></script>',
        '<img alt="" src="x">',
    ):
        assert FETCHES.search(bad)
    assert not described('<img alt="" src="data:x">')
    assert not described('<img src="data:x">')


def test_the_reference_has_a_page_for_each_of_its_notebooks(reference_pages):
    names = {path.stem for path in REFERENCE.glob("*.ipynb")}
    assert names == set(project.notebooks())
    assert {path.stem for path in reference_pages.glob("*.html")} == names | {"report"}
    page = (reference_pages / "report.html").read_text()
    assert {f"{name}.html" for name in names} <= {link.partition("#")[0] for link in links(page)}


def test_the_reference_is_of_moderate_size():
    """Each picture is a file, and in the notebook's copy as PNG; players are most of the rest. No pages."""
    committed = [path for path in REFERENCE.rglob("*") if path.is_file() and path.suffix != ".html"]
    assert sum(path.stat().st_size for path in committed) < len(list(REFERENCE.glob("*.ipynb"))) * 0.6e6
    assert "outputs/reference/*.html" in (project.root() / ".gitignore").read_text().splitlines()


def test_the_report_shows_every_claim_statement_and_picture(reference_pages):
    text = (reference_pages / "report.html").read_text()
    rows = claims.read(REFERENCE)
    for claim in claims.by_claim(rows):
        assert f">{claim}</a>" in text, claim
    assert len(re.findall(r'<td class="verdict ', text)) == len(rows), "every case has its line"
    assert all(html.escape(row["because"]) in text.replace("&#39;", "&#x27;") for row in rows), (
        "and its tolerance a reason"
    )
    for statement in scorecard.statements():
        assert f">{statement['id']}<" in text, statement["id"]
    assert text.count("<img ") == len(list((REFERENCE / "figures").glob("*.svg")))


def test_readme_and_documents_quote_the_reference():
    rows = claims.read(REFERENCE)
    assert command.counts(rows) in README.read_text(), "make reference writes it"
    assert command.chapters(rows) in README.read_text()
    assert command.markdown(rows) in (README.parent / "docs" / "records" / "measured.md").read_text()


def test_formulas_are_text_so_that_every_page_shows_them():
    for name, path in project.notebooks().items():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                assert not re.search(r"\$[^$]+\$|\\\(|\\\[|\\frac", cell.source), f"{name} {cell.id} needs MathJax"


@pytest.fixture
def run(out):
    """A run of one notebook with a claim, a picture and a link; and one that failed before its copy was written."""
    fig, _ = figures.new()
    picture = figures.save(fig, "01_picture", "a line < a curve")
    Ledger("01_a").check(claims.Claim("s09.x", "a < b", evidence="wire"), 1, 1)
    show = nbformat.v4.new_code_cell("figures.save(fig)")
    data, metadata = picture._repr_mimebundle_()
    png = {"image/png": base64.b64encode(data["image/png"]).decode()}
    table = nbformat.v4.new_output("display_data", {"text/html": "<table><td>s09.x</td></table>"})
    streams = [nbformat.v4.new_output("stream", text=text) for text in ("one", "\n")]
    show.outputs = [nbformat.v4.new_output("display_data", png, metadata=metadata), table, *streams]
    link = '# 01 A *title*\n<a href="01_a.ipynb#cell-id=x">here</a> <a href="02_b.ipynb">there</a>'
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(link), show])
    nbformat.write(notebook, out / "01_a.ipynb")
    (out / "run.json").write_text("[]")
    outcomes = [runner.NotebookEnding("01_a", "ok", 1.0), runner.NotebookEnding("02_b", "failed", 1.0, "KernelDied")]
    report.write_pages(out, outcomes, claims.read(out))
    return out, show.id


def test_a_page_stands_alone(run):
    out, _ = run
    text = (out / "01_a.html").read_text()
    assert not FETCHES.search(text)
    assert 'alt="a line &lt; a curve"' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "<script" not in text
    assert "<pre>one\n</pre>" in text, "what the kernel sent in two parts is one block"


def test_links_lead_to_pages_where_there_are_any(run):
    out, cell = run
    page, whole = (links((out / f"{name}.html").read_text()) for name in ("01_a", "report"))
    assert "01_a.html#cell-id=x" in page
    assert "02_b.ipynb" in page, "that one has no page"
    assert f"01_a.html#cell-id={cell}" in whole, "a claim leads to the cell that shows it"
    assert "02_b.html" not in whole
    assert "KernelDied" in (out / "report.html").read_text()


def test_pages_go_into_another_folder(run, tmp_path_factory):
    out, _ = run
    project.write_json(out / "run.json", [vars(runner.NotebookEnding("01_a", "ok", 1.0))])
    there = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    into = tmp_path_factory.mktemp("into")
    assert report.rebuild(out, into) == into / "report.html"
    assert {path.name for path in into.iterdir()} == {"01_a.html", "report.html"}
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == there, "the run is as it was"


def test_a_chapters_title_is_its_first_heading(run, tmp_path):
    out, _ = run
    assert pages.notebook_title(out, "01_a") == "A *title*"
    assert pages.notebook_title(out, "99_nothing") == "99_nothing"
    (out / "03_half.ipynb").write_text('{"cells": [')
    assert pages.notebook_title(out, "03_half") == "03_half"


def test_the_command_writes_a_finished_runs_pages_again(run, capsys):
    out, _ = run
    runner_rows = [vars(runner.NotebookEnding("01_a", "ok", 1.0))]
    project.write_json(out / "run.json", runner_rows)
    for page in out.glob("*.html"):
        page.unlink()
    readme = out / "README.md"
    readme.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    assert cli.main(["report", str(out), "--readme", str(readme)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert {page.name for page in out.glob("*.html")} == {"01_a.html", "report.html"}
    table = command.markdown(claims.read(out))
    assert readme.read_text() == f"before\n{command.BEGIN}\n{table}{command.END}\nafter\n"
    assert says(table, "counted", "1", "1")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "no run in nothing: `pardemo run` makes one"),
        (["{reference}", "--readme", "{file}"], "has no place for the table"),
        (["{reference}", "--readme", "gone.md"], "there is no gone.md"),
    ],
)
def test_bad_input_is_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    rebuild = report.rebuild
    monkeypatch.setattr(report, "rebuild", lambda folder: folder if folder == REFERENCE else rebuild(folder))
    (tmp_path / "file.md").write_text("no marks")
    places = {"reference": REFERENCE, "file": tmp_path / "file.md"}
    assert cli.main(["report", *(argument.format(**places) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert (tmp_path / "file.md").read_text() == "no marks"


def test_a_scorecard_is_read_again_when_a_chapter_was_run_again(tmp_path, monkeypatch):
    """With --resume the scorecard must not show what another chapter measured before."""
    executed = []
    chapters = {name: project.root() / "notebooks" / f"{name}.ipynb" for name in ("01_data_parallel", scorecard.OWN)}
    monkeypatch.setattr(project, "notebooks", lambda: chapters)

    def execute(name, path, parameters, folder, *rest):
        executed.append(name[:2])
        claim = claims.Claim(f"{name[:2]}.run", "runs until now", at_least=0, because="each is counted")
        claims.Ledger(name, folder).check(claim, None, len(executed))
        (folder / f"{name}.ipynb").write_text(nbformat.writes(nbformat.v4.new_notebook()))
        return runner.NotebookEnding(name, "failed" if len(executed) == 1 else "ok")

    monkeypatch.setattr(runner, "_execute", execute)
    runner.run_notebooks(out=tmp_path, say=lambda *a, **k: None)
    assert executed == ["01", scorecard.OWN[:2]]
    runner.run_notebooks(out=tmp_path, resume=True, say=lambda *a, **k: None)
    assert executed[2:] == ["01", scorecard.OWN[:2]], "01 failed before; what it now measured belongs on the scorecard"
    runner.run_notebooks(out=tmp_path, resume=True, say=lambda *a, **k: None)
    assert len(executed) == 4, "nothing changed: nothing is run again"


def test_the_report_is_by_question(out):
    """A chapter's question, then its claims below the section that shows them."""
    ledger = Ledger("01_a")
    for claim in ("01.bytes", "01.seconds", "01.more"):
        ledger.check(claims.Claim(claim, f"what {claim} says"), 1, 1)
    shown = [Line([row])._repr_html_() for row in claims.read(out)]
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_markdown_cell("text\n\n## 1 How many bytes?\n\nx")]
    for place, text in enumerate(shown):
        cells.append(nbformat.v4.new_code_cell("claim()"))
        cells[-1].outputs = [nbformat.v4.new_output("display_data", {"text/html": text})]
        if place == 0:
            cells.append(nbformat.v4.new_markdown_cell("## 2 How long?"))
    metadata = {"pardemo": {"question": "What does a step cost?"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), out / "01_a.ipynb")
    assert scorecard.sections(out, "01_a") == {
        "01.bytes": "How many bytes?",
        "01.seconds": "How long?",
        "01.more": "How long?",
    }
    report.write_pages(out, [runner.NotebookEnding("01_a", "ok", 1.0)], claims.read(out))
    text = (out / "report.html").read_text()
    order = ["What does a step", "<h3>How many bytes?</h3>", "01.bytes", "<h3>How long?</h3>", "01.seconds", "01.more"]
    places = [text.index(part, text.index('id="claims"')) for part in order]
    assert places == sorted(places)


def test_a_page_begins_with_the_list_of_its_sections():
    body = pages._addressed("<h2>1 What <em>is</em> it?</h2><p>a</p><h2>Remember</h2><h2>Remember</h2>")
    assert pages.sections(body) == [
        ("1-what-is-it", "1 What is it?"),
        ("remember", "Remember"),
        ("remember-2", "Remember"),
    ]


def test_no_line_ends_inside_of_a_number_or_a_short_name_in_code():
    told = "<p>1 S ± 0.5 % (t = 4), N · S, 1e-05 of a t-th; p > q = 4</p>"
    kept = (
        told.replace("± 0.5 %", "±_0.5_%").replace("1 S ±", "1_S_±").replace("t = 4", "t_=_4").replace("N · S", "N_·_S")
    )
    kept = kept.replace("q = 4", "q_=_4").replace("_", "\N{NO-BREAK SPACE}")
    for word in ("1e-05", "t-th"):
        kept = kept.replace(word, f'<span class="unbroken">{word}</span>')
    assert pages._unbroken(told) == kept
    spaces_of_its_own = '<pre>t = 4</pre><td>1 ± 2 %</td><svg><text>1 ± 2 %</text></svg><img alt="1 ± 2 %">'
    assert pages._unbroken(spaces_of_its_own) == spaces_of_its_own
    short = pages._unbroken("<code>--get</code> <code>a b</code>")
    assert short == '<code class="unbroken">--get</code> <code>a b</code>'
    option = pages._unbroken("<code>prove --stop -- a-b</code> <pre><code>a --stop</code>\n</pre>")
    assert says(option, 'class="unbroken">--stop</span>', 'class="unbroken">--</span>')


def test_each_section_of_a_page_can_be_reached_from_its_list(run):
    out, _ = run
    text = (out / "01_a.html").read_text()
    assert [anchor for anchor, _ in pages.sections(text)] == re.findall(r'<li><a href="#([^"]+)">', text)


def test_the_report_has_a_cases_unit_before_its_tolerance():
    row = {"relation": "equal", "predicted": 5.5, "rel": 0.1, "measured": 5.263, "unit": "%"}
    assert report._table_row(row, "")["predicted"] == "5.5 % ± 10 %"
    assert report._table_row(row | {"relation": "at most", "unit": "s"}, "")["predicted"] == "≤ 5.5 s"
    assert report._table_row(row | {"predicted": None}, "")["predicted"] == ""
