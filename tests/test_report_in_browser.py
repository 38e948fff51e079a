"""The committed report and pages, as a browser shows them: on a desk and on a phone, light and dark."""

import pytest

from pardemo import claims, project

REFERENCE = project.root() / "outputs" / "reference"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture
def show(chromium):
    """``show(page, …)`` opens a page from the file system; what it asks of others, and its errors, are the page's."""
    contexts = []

    def open_(name, viewport=DESK, scheme="light"):
        contexts.append(chromium.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.asked, page.told = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.told.append(str(error)))
        page.goto((REFERENCE / name).as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", sorted(path.name for path in REFERENCE.glob("*.html")))
def test_a_page_fits_a_phone_and_asks_nobody(show, name):
    page = show(name, PHONE, "dark")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE["width"], "what is wide scrolls in itself"
    assert [url for url in page.asked if not url.startswith("data:")] == [(REFERENCE / name).as_uri()]
    assert page.told == []


@pytest.mark.parametrize(("scheme", "light"), [("light", True), ("dark", False)])
@pytest.mark.parametrize("name", ["report.html", "01_data_parallel.html"])
def test_paper_and_ink_follow_the_readers_choice(show, name, scheme, light):
    page = show(name, DESK, scheme)
    paper, ink = page.evaluate(
        """() => ["backgroundColor", "color"].map(
            what => getComputedStyle(document.body)[what].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"""
    )
    assert (paper > 600) is light
    assert (ink < 300) is light


def test_filters_leave_what_was_chosen(show):
    page = show("report.html")
    rows = claims.read(REFERENCE)
    form = page.locator("form[data-table=claims]")
    shown = page.locator("#claims tbody tr:visible")
    assert shown.count() == len(rows)
    form.locator("[name=verdict]").select_option("differs")
    differ = [row for row in rows if row["verdict"] == "differs"]
    assert shown.count() == len(differ)
    assert form.locator("output").inner_text() == f"{len(differ)} of {len(rows)}"
    form.locator("[name=chapter]").select_option("06_zero_memory")
    assert shown.count() == sum(row["notebook"] == "06_zero_memory" for row in differ)
    form.locator("[name=text]").fill("S72.OVER")
    assert shown.locator("td").first.inner_text().startswith("s72.over_stage_2")
    page.locator("form[data-table=statements] [name=judgement]").select_option("wrong or garbled")
    assert page.locator("#statements tbody tr:visible").count() == sum(
        s["judgement"] == "no" for s in claims.statements()
    )


def test_a_claim_leads_to_the_cell_that_shows_it(show):
    page = show("report.html")
    page.get_by_role("link", name="s09.per_rank.n4_sent", exact=True).click()
    page.wait_for_url("**/01_data_parallel.html#*")
    cell = page.locator(":target")
    assert "s09.per_rank" in cell.inner_text()
    assert cell.bounding_box()["y"] < DESK["height"], "in sight"
