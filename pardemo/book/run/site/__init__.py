"""The book as a site: the README as its first page, chapters, report and documents in one frame, with a search.

The bodies are those of a run's own pages, built anew (:mod:`pardemo.book.run.report`); the search is Pagefind's, which
indexes what was built and answers in the browser, as does :mod:`pardemo.book.run.site.plan_page`.
Any static host can serve the folder.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pardemo import project
from pardemo.book.run import endings, report
from pardemo.book.run.report import pages
from pardemo.book.run.site import course_pages, plan_page

MARK = ".pardemo-site"  # a folder that has it was made here and may be replaced
FIRST = "index.html"
#: Documents in the order of the list at the side, and the site's page of each.
DOCUMENTS = {f"docs/{name}.md": f"{name.rpartition('/')[2]}.html" for name in (
    "light-core", "commands", "measure", "compare", "prove", "pull-requests", "testing", "soak", "in-your-code", "plan",
    "cost-model", "fine-tune", "course", "glossary", "troubleshooting", "cloud", "related-work", "architecture",
    "adding-a-chapter", "security",
    "records/measured", "records/speed", "records/planner-error", "records/found", "records/silent-bugs",
    "records/broken-releases", "records/published-scripts", "records/resumed", "records/soak-run",
)} | {"docs/plan.md": "planning.html"}  # fmt: skip


class Entry(NamedTuple):
    """A page of the site: its file there, its title, the part of the list it stands in, and its body as HTML."""

    file: str
    title: str
    part: str
    body: str

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Address and text of the headings below the page's own."""
        return pages.sections(self.body)


def build_site(run: Path, out: Path, find_pyodide: Callable[[], Path | None] = lambda: None) -> Path:
    """Builds the site of a finished run in ``out``, anew, and returns its first page.

    ``find_pyodide`` is asked for the folder of Pyodide; where there is none, the page that plans says so.

    Raises:
        FileNotFoundError: ``run`` holds no run.
        ValueError: ``out`` holds something else than a site, or a page leads to one that is not there.
        OSError: Pagefind could not make its index.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ValueError(f"{out} is not empty and holds no site of pardemo's: name a new folder, or empty that one")
    if not endings.finished(run):
        raise FileNotFoundError(f"no run in {run}: `pardemo run` makes one, or name a run's folder")
    runtime = find_pyodide()
    new, old = (out.with_name(f"{out.name}.{which}") for which in ("new", "old"))
    for left in (new, old):  # by a build that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    (new / MARK).touch()
    report.rebuild(run, into=new)
    plan_page.write_plan_page(new, runtime)
    entries = [*_entries(run, new), Entry(plan_page.FILE, plan_page.TITLE, "", plan_page.body(runtime is not None))]
    for index, entry in enumerate(entries):
        (new / entry.file).write_text(_framed(entries, index), encoding="utf-8")
    page = (new / "report.html").read_text(encoding="utf-8")
    back = f'<main>\n<p><a href="{FIRST}">← What it is</a></p>'
    (new / "report.html").write_text(page.replace("<main>", back, 1), encoding="utf-8")
    if (run / "figures").is_dir():
        shutil.copytree(run / "figures", new / "figures")
    for notebook in run.glob("*.ipynb"):
        shutil.copy(notebook, new)
    _check(new)
    _index(new)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out / FIRST


def _entries(run: Path, built: Path) -> list[Entry]:
    """README, the chapters of a run whose own pages are in ``built``, cards and problems, documents."""
    root = project.root()
    names = [ending.notebook for ending in endings.finished(run) if pages.executed_copy(run, ending.notebook)]
    entries = [Entry(FIRST, "What it is", "", _document(root / "README.md", root, run, names))]
    for name in names:
        title = f"{name[:2]} {pages.notebook_title(run, name)}"
        entries.append(Entry(f"{name}.html", title, "Chapters", _chapter(built / f"{name}.html")))
    for file, body in course_pages.bodies(run, names).items():
        entries.append(Entry(file, course_pages.TITLES[file], "Course", body))
    for name, file in DOCUMENTS.items():
        path = root / name
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        part = "Records" if "/records/" in name else "Documents"
        entries.append(Entry(file, title, part, _document(path, root, run, names)))
    return entries


def _document(path: Path, root: Path, run: Path, names: Sequence[str]) -> str:
    """A Markdown file's body, its links leading to the site's pages; those that lead elsewhere in the tree are text."""
    from nbconvert.filters import markdown2html

    # badges are pictures from other sites, and the site loads nothing from a network
    text = re.sub(r"<!-- badges -->.*?<!-- end of badges -->\n?", "", path.read_text(encoding="utf-8"), flags=re.S)
    body = markdown2html(re.sub(r"<!--.*?-->\n?", "", text, flags=re.S))
    body = re.sub(r'<a class="anchor-link"[^>]*>.*?</a>', "", body)  # the list at the side has them
    body = re.sub(
        r"<h([1-4])[^>]*>(.*?)</h\1>", lambda h: f'<h{h[1]} id="{pages.slug(h[2])}">{h[2]}</h{h[1]}>', body, flags=re.S
    )

    def site_link(link: re.Match) -> str:
        before, address, after = link.groups()
        if re.match(r"(?:[a-z]+:|#)", address):
            return link[0]
        target, mark, anchor = address.partition("#")
        file = (path.parent / target).resolve()
        if not file.exists():
            raise ValueError(f"{path.relative_to(root)} leads to {address}, which is not there")
        documents = {"README.md": FIRST, **DOCUMENTS}
        if page := documents.get(file.relative_to(root).as_posix()):
            return f"{before}{page}{mark}{anchor}{after}"
        if file.is_relative_to(root / "outputs" / "reference"):  # the committed run stands for the one that is shown
            name = pages.to_page(file.relative_to(root / "outputs" / "reference").as_posix())
            if file.stem in names or ((run / name).is_file() and name.startswith("figures/")):
                return f"{before}{name}{mark}{anchor}{after}"
        return f"{before.replace('href', 'data-in-the-tree')}{address}{after}"

    return re.sub(r'((?:href|src)=")([^"]+)(")', site_link, body)


def _chapter(page: Path) -> str:
    """What stands between the frame of a run's own page, and its notebook.

    A chapter names documents and the page that plans as code, since a notebook lies elsewhere; here they are links.
    """
    body = page.read_text(encoding="utf-8").partition("<main>")[2].rpartition("</main>")[0]
    for text, file in {**DOCUMENTS, plan_page.FILE: plan_page.FILE}.items():
        body = body.replace(f"<code>{text}</code>", f'<a href="{file}"><code>{text}</code></a>')
    return f'{body}<p><a href="{page.stem}.ipynb">This chapter as a notebook</a></p>'


def _framed(entries: list[Entry], number: int) -> str:
    before = entries[number - 1] if number else None
    after = entries[number + 1] if number + 1 < len(entries) else None
    template = report.environment(Path(__file__).resolve().parent).get_template("site.html.j2")
    return template.render(
        entries=entries, page=entries[number], before=before, after=after, highlight=pages.highlight()
    )


def _check(folder: Path) -> None:
    """Every link of every page leads to a file of the site, and to a place in it.

    Raises:
        ValueError: one does not.
    """
    from bs4 import BeautifulSoup

    ids_and_links: dict[str, Any] = {}
    for path in folder.glob("*.html"):
        page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        links = [tag.get("href") or tag.get("src") for tag in page.find_all(["a", "img"])]
        ids_and_links[path.name] = {tag["id"] for tag in page.find_all(id=True)}, [link for link in links if link]
    for name, (_, links) in ids_and_links.items():
        for link in links:
            if re.match(r"(?:https?|mailto|data):", link):
                continue
            target, _, anchor = link.partition("#")
            target = target or name
            if not (folder / target).is_file():
                raise ValueError(f"{name} leads to {link}, which the site has not")
            if anchor and target in ids_and_links and anchor not in ids_and_links[target][0]:
                raise ValueError(f"{name} leads to {link}: {target} has no such place")


def _index(folder: Path) -> None:
    command = [sys.executable, "-m", "pagefind", "--site", str(folder), "--exclude-selectors", "svg, style, .unseen"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode or not (folder / "pagefind" / "pagefind-ui.js").is_file():
        raise OSError(
            f"the search's index was not made: {(process.stderr or process.stdout).strip().splitlines()[-1:]}"
        )
