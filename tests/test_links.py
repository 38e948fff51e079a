"""Links lead somewhere: of the README, the documents, the notebooks, and every file that names a document."""

import re
import subprocess

import nbformat
import pytest

from pardemo import project

ROOT = project.PACKAGE.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
PAGES = [ROOT / name for name in TRACKED if name.endswith(".md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")
#: A document or a table of docs/, as code, messages and notebooks name it.
DOCUMENT = re.compile(r"(?<![\w/.-])docs/(?:records/)?[\w-]+\.(?:md|csv)")
#: Of other projects, and of a test.
OF_OTHERS = {"docs/performance-summary.md", "docs/performance-summary-archive.md", "docs/none.md"}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def targets(text: str) -> list[str]:
    """Addresses of a Markdown text's links, those to other sites left out."""
    return [address for address in LINK.findall(without_code(text)) if not ELSEWHERE.match(address)]


def anchors(text: str) -> set[str]:
    """The addresses that GitHub gives the headings of a text."""
    made: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+)$", without_code(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        made[slug] = made.get(slug, -1) + 1
        if made[slug]:
            made[f"{slug}-{made[slug]}"] = 0
    return set(made)


def broken(text: str, page) -> list[str]:
    """Links of a text that lead to no file, or to no heading of a file."""
    wrong = []
    for address in targets(text):
        name, mark, anchor = address.partition("#")
        file = page.parent / name if name else page
        known = not mark or file.suffix != ".md" or anchor in anchors(file.read_text(encoding="utf-8"))
        if not (file.exists() and known):
            wrong.append(address)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page(page):
    assert broken(page.read_text(encoding="utf-8"), page) == []


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_links_of_a_notebook(name):
    path = project.notebooks()[name]
    cells = nbformat.read(path, 4).cells
    assert [link for c in cells if c.cell_type == "markdown" for link in broken(c.source, path)] == []


def test_documents_that_files_name_are_there():
    """In code, tests, workflows, notebooks, the Makefile; a committed run and the changes tell of their time."""
    kinds = (".py", ".toml", ".yml", ".yaml", ".md", ".ipynb", ".j2", "Makefile", ".cff", ".ci/run")
    wrong = {}
    for name in TRACKED:
        if not name.endswith(kinds) or name.startswith("outputs/") or name == "CHANGELOG.md":
            continue
        said = set(DOCUMENT.findall((ROOT / name).read_text(encoding="utf-8"))) - OF_OTHERS
        if missing := sorted(one for one in said if not (ROOT / one).is_file()):
            wrong[name] = missing
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](README.md), [b](README.md#read), [c](https://example.org/x), ![d](LICENSE)", []),
        ("[a](NOTHING.md)", ["NOTHING.md"]),
        ("[a](README.md#no-such-heading)", ["README.md#no-such-heading"]),
        ("```\n[a](NOTHING.md)\n```", []),
    ],
)
def test_a_link_that_leads_nowhere_is_seen(text, wrong):
    assert broken(text, ROOT / "page.md") == wrong


def test_headings_have_githubs_addresses():
    text = "# What `--write` writes\n## How\n## How\n### [The x](y.md), proven"
    assert anchors(text) == {"what---write-writes", "how", "how-1", "the-x-proven"}
