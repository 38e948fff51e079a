"""The committed run's report and pages, as a browser shows them: on a desk and on a phone, light and dark."""

import pytest
from conftest import few

from pardemo import claims, project
from pardemo.book.run import scorecard

REFERENCE = project.root() / "outputs" / "reference"
PAGES = sorted(f"{path.stem}.html" for path in REFERENCE.glob("*.ipynb"))
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture
def show(chromium, reference_pages):
    """``show(page, …)`` opens a page from the file system; what it asks of others, and its errors, are the page's."""
    contexts = []

    def open_(name, viewport=DESK, scheme="light"):
        contexts.append(chromium.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.asked, page.told = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.told.append(str(error)))
        page.goto((reference_pages / name).as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", few(["report.html", *PAGES], 0, 1, 15, 23))
def test_a_page_fits_a_phone_and_asks_nobody(show, reference_pages, name):
    page = show(name, PHONE, "dark")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE["width"], "what is wide scrolls in itself"
    asked = [url for url in page.asked if not url.startswith("data:") and "/figures/" not in url]
    assert asked == [(reference_pages / name).as_uri()]
    assert page.told == []


def test_a_picture_fits_a_phone_and_its_words_stay_legible(show):
    page = show("01_data_parallel.html", PHONE)
    shown = page.locator(".output_svg img").evaluate_all(
        "images => images.map(i => [parseInt(i.style.minWidth), i.clientWidth, i.parentElement.clientWidth])"
    )
    assert shown
    for least, width, room in shown:
        assert width >= least, "labels stay legible"
        assert width <= max(room, least), "and nothing is cut that would fit"


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


@pytest.mark.parametrize(("viewport", "screens"), [(DESK, 1.1), (PHONE, 2.7)])
def test_the_overview_is_a_screen(show, viewport, screens):
    """Chapters stand in three columns, or two; on a phone each has a line of its own."""
    page = show("report.html", viewport)
    assert page.evaluate("document.documentElement.scrollHeight") < screens * viewport["height"]
    assert page.locator("details[open]").count() == 0


def test_filters_leave_what_was_chosen_and_open_where_it_is(show):
    page = show("report.html")
    rows = claims.read(REFERENCE)
    every = claims.by_claim(rows)
    page.locator("#scorecard > summary").click()
    form = page.locator("form[data-list=claims]")
    shown = page.locator("#claims article:visible")
    assert form.locator("output").inner_text() == f"{len(every)} of {len(every)}"
    assert shown.count() == 0, "folded by chapter"
    form.locator("[name=verdict]").select_option("differs")
    differ = claims.by_claim([row for row in rows if row["verdict"] == "differs"])
    assert shown.count() == len(differ) > 0
    assert form.locator("output").inner_text() == f"{len(differ)} of {len(every)}"
    one = next(iter(differ))
    form.locator("[name=text]").fill(one.upper())
    assert one in shown.first.inner_text()
    assert shown.count() == sum(one in name for name in differ)
    form.locator("[name=verdict]").select_option("")
    form.locator("[name=text]").fill("")
    assert shown.count() == 0, "folded again"
    page.locator("#article > summary").click()
    page.locator("form[data-list=statements] [name=judgement]").select_option("wrong or garbled")
    assert page.locator("#statements article:visible").count() == sum(
        s["judgement"] == "no" for s in scorecard.statements()
    )


def test_an_address_with_a_part_opens_it(show, reference_pages):
    page = show("report.html")
    page.goto((reference_pages / "report.html").as_uri() + "#speed")
    page.wait_for_selector("#speed[open]")


def test_a_claim_leads_to_the_cell_that_shows_it(show):
    page = show("report.html")
    claim = next(row for row in claims.read(REFERENCE) if row["id"].startswith("s09."))
    page.locator("#scorecard > summary").click()
    page.locator("form[data-list=claims] [name=text]").fill(claim["claim"])
    page.get_by_role("link", name=claim["claim"], exact=True).click()
    page.wait_for_url(f"**/{claim['notebook']}.html#*")
    cell = page.locator(":target")
    assert claim["statement"].removesuffix(".") in cell.inner_text()
    assert cell.bounding_box()["y"] < DESK["height"], "in sight"
