"""The site: every page in one frame, every link inside it leads somewhere, and its search finds."""

import itertools
import shutil

import pytest
from bs4 import BeautifulSoup
from conftest import served_from

from pardemo import cli, compat, project
from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.book.run import report, site

REFERENCE = project.root() / "outputs" / "reference"


@pytest.fixture(scope="module")
def built(tmp_path_factory, reference_pages):
    out = tmp_path_factory.mktemp("site") / "site"

    def as_built_before(run, into):
        assert run == REFERENCE
        for page in reference_pages.glob("*.html"):
            shutil.copy(page, into)

    with compat.replaced(report, "rebuild", as_built_before):
        site.build_site(REFERENCE, out)  # refuses links that lead nowhere
    return out


@pytest.fixture(scope="module")
def served(built):
    with served_from(built) as address:
        yield address


def test_every_chapter_and_document_is_a_page(built):
    pages = {path.name for path in built.glob("*.html")}
    chapters = {f"{path.stem}.html" for path in REFERENCE.glob("*.ipynb")}
    documents = set(site.DOCUMENTS.values())
    there = {path.relative_to(project.root()).as_posix() for path in (project.root() / "docs").rglob("*.md")}
    assert set(site.DOCUMENTS) == there
    assert len(documents) == len(there)
    assert pages == {"index.html", "report.html", "plan.html", "cards.html", "problems.html"} | chapters | documents


def test_cards_have_what_each_chapter_says_to_remember(built):
    page = BeautifulSoup((built / "cards.html").read_text(), "html.parser").find("main")
    titles = {heading.find("a")["href"].removesuffix(".html"): heading for heading in page.find_all("h2")}
    assert list(titles) == [notebook_of(chapter) for chapter in CHAPTERS]
    for name, heading in titles.items():
        kept = "".join(
            part.text for part in itertools.takewhile(lambda p: p.name != "h2", heading.find_next_siblings())
        )
        assert 300 < len(kept) < 2000, f"{name}: {len(kept)}"
    assert "2(N−1)/N" in titles[notebook_of("data_parallel")].find_next("ul").text
    assert "Exercises" not in page.text


def test_problems_of_all_chapters_are_one_page(built):
    page = BeautifulSoup((built / "problems.html").read_text(), "html.parser").find("main")
    assert len(page.find_all("h2")) == len(CHAPTERS)
    assert len(page.find_all("details", class_="guess")) == 5 * len(CHAPTERS)


def test_documents_lead_to_a_chapters_page_and_that_to_its_notebook(built):
    text = (built / "index.html").read_text()
    assert 'href="00_your_machine.ipynb"' not in text
    assert f'href="{notebook_of("scorecard")}.html"' in (built / "measured.html").read_text()
    assert 'href="00_your_machine.ipynb"' in (built / "00_your_machine.html").read_text(), "and from there the notebook"


def test_what_stands_in_the_tree_alone_is_no_link(built):
    text = (built / "index.html").read_text()
    assert 'href="outputs/' not in text
    assert 'href="docs/' not in text
    assert 'href="01_data_parallel.html"' in text


@pytest.mark.parametrize(
    ("asked", "page"), [("ring all-reduce", "01_data_parallel"), ("流水线", "06_pipeline_parallel")]
)
def test_the_search_finds_a_word_and_its_page(chromium, served, asked, page):
    tab = chromium.new_page()
    tab.goto(f"{served}/index.html")
    tab.locator("#search input").fill(asked)
    tab.wait_for_selector(f'.pagefind-ui__result-link[href*="{page}"]')  # results come one after the other
    tab.close()


@pytest.mark.parametrize(
    "name", ["index.html", "01_data_parallel.html", "planning.html", "plan.html", "glossary.html", "problems.html"]
)
def test_a_page_fits_a_phone(chromium, served, name):
    context = chromium.new_context(viewport={"width": 360, "height": 740})
    tab = context.new_page()
    told = []
    tab.on("pageerror", lambda error: told.append(str(error)))
    tab.goto(f"{served}/{name}")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.locator(".contents[open]").count() == 0, "the list of pages is folded there"
    assert told == []
    context.close()


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#x">b</a>')
    with pytest.raises(ValueError, match=r"a\.html.*b\.html#x"):
        site._check(tmp_path)
    (tmp_path / "b.html").write_text('<p id="y"></p>')
    with pytest.raises(ValueError, match=r"b\.html"):
        site._check(tmp_path)
    (tmp_path / "b.html").write_text('<p id="x"></p>')
    site._check(tmp_path)


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert cli.main(["site", str(REFERENCE), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no site of pardemo's" in error
    assert len(error.strip().splitlines()) == 1
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert cli.main(["site", str(tmp_path / "nothing"), "--out", str(tmp_path / "site")]) == 2
    assert "no run in" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_chapter_leads_to_the_documents_and_the_page_that_it_names(tmp_path):
    page = tmp_path / "16_which_layout.html"
    page.write_text("<main><p><code>docs/plan.md</code>, <code>plan.html</code>, <code>docs/none.md</code></p></main>")
    body = site._chapter(page)
    for file, text in (("planning.html", "docs/plan.md"), ("plan.html", "plan.html")):
        assert f'<a href="{file}"><code>{text}</code></a>' in body
    assert "<p><code>docs/none.md</code>" not in body
    assert ", <code>docs/none.md</code></p>" in body
