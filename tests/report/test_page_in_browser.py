"""The page in a browser: it works, asks for nothing, says nothing on the console, and all can use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualeval.report.page.html import render
from tests.report.pages import ESCAPED, MARKUP, content
from tests.vehicles.requirements import BROWSER

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container no sandbox can be made; the page is ours.
        browser = playwright.chromium.launch(executable_path=str(BROWSER), args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """The page, opened; and what it has said and asked for."""

    def __init__(self, browser: Any, file: Path | str, **options: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_context(**options).new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", self._dismiss)
        self.page.goto(file if isinstance(file, str) else file.as_uri())

    def _dismiss(self, dialog: Any) -> None:
        self.said.append(dialog.message)
        dialog.dismiss()

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def cards(self) -> list[str]:
        return self.texts(".card:not([hidden]) .id")

    def end(self) -> None:
        """Nothing was said, and nothing asked for but the file itself and what it holds."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:image/")] == [
            self.page.url.split("#")[0]
        ]
        self.page.context.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(content()), "utf-8")
    return path


def test_filters_and_sorting_choose_the_cards(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    assert len(visit.cards()) == 24 and "40 of 40" in page.inner_text("#found")
    page.click("#more")
    assert len(visit.cards()) == 40 and not page.is_visible("#more")

    page.select_option("[data-by=reason]", "loss")
    assert visit.cards() == [f"val/{name}/{at}" for at, name in _samples() if at % 4 == 1]
    page.select_option("[data-by='facet scanner']", "A")  # none of them
    assert visit.cards() == [] and "0 of 40" in page.inner_text("#found")
    page.click("text=Clear")
    page.select_option("#filters [data-by=target]", MARKUP)
    page.select_option("#filters [data-by=prediction]", ESCAPED)
    assert visit.cards() == [f"val/{MARKUP}/{at}" for at in (0, 5, 10, 20, 25, 30)]

    # From a comparison to the samples.
    page.click("[data-reason='gained:0']")
    assert {int(each.rpartition("/")[2]) % 4 for each in visit.cards()} == {3}

    by_class = page.locator("section:has(#classes) table")
    recalls = by_class.locator("tbody tr td:nth-child(3)")
    by_class.locator("text='recall'").click()
    assert recalls.all_inner_texts() == ["0.9000", "0.7000", "0.6000", "0.5000", "–"]
    by_class.locator("text='recall'").click()
    assert recalls.all_inner_texts() == ["0.5000", "0.6000", "0.7000", "0.9000", "–"]
    assert by_class.locator("th[aria-sort=ascending]").inner_text() == "recall"
    by_class.locator("text=support").click()
    assert by_class.locator("tbody th").first.inner_text() == MARKUP
    visit.end()


def test_figures_lead_to_their_rows(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.fill("#search", "nothing of this")
    found = "() => document.querySelector('#rows-found').textContent === "
    page.wait_for_function(f"{found}'nothing found: 0 of 500 samples'")

    def lost(at: int) -> bool:
        return at % 2 == 1 and at % 3 % 2 == 0

    of_classes, flips = "section:has(#classes) tr:nth-child", f"flips, {MARKUP}"
    for where, chosen, wanted in (
        (
            "#matrix tr:nth-child(3) td:nth-child(5)",
            ["target", "prediction"],
            lambda at: at % 5 == 2 and at % 2,
        ),
        (f"{of_classes}(3) th a", ["target"], lambda at: at % 5 == 2),
        (f"{of_classes}(1) td:last-child a", ["target", flips], lambda at: at % 5 == 0 and lost(at)),
        ("li:has-text('Largest fall') a", ["target", flips], lambda at: at % 5 == 0 and lost(at)),
        ("li:has-text('right in'):has-text('8 samples') a", [flips], lost),
    ):
        page.click(where)
        page.wait_for_function(f"{found}'{sum(map(bool, map(wanted, range(500))))} of 500 samples'")
        menus = page.locator("#row-filters select").all()
        assert [each.get_attribute("data-by") for each in menus if each.input_value()] == chosen
        assert page.locator("#rows-table").is_visible() and page.evaluate("scrollY") > 100
    assert page.inner_text("li:has-text('Largest fall')").startswith(
        f"Largest fall by class: {MARKUP}, recall -10.00 pp"
    )
    visit.end()


def rows(visit: Visit, column: int = 1) -> list[str]:
    """A column of the rows in sight."""
    return visit.texts(f"#rows-table tbody tr:not([aria-hidden]) > :nth-child({column})")


def test_all_rows_are_searched_filtered_and_sorted(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    assert "500 of 500" in page.inner_text("#rows-found")
    assert len(rows(visit)) < 60 and rows(visit)[0] == f"val/{MARKUP}/0"
    # Only what is in sight is there; at the end the last row.
    page.eval_on_selector("#rows-table", "(box) => { box.scrollTop = box.scrollHeight; }")
    page.wait_for_function("() => document.querySelector('#rows-table tbody').textContent.includes('/499')")

    page.fill("#search", "CAT/12")
    assert rows(visit) == [f"val/cat/{at}" for at in (12, 122, 127)]
    page.fill("#search", " right  CAT/12 ")  # words, in any columns
    assert rows(visit) == ["val/cat/12", "val/cat/122"]
    page.fill("#search", "dog CAT/12")  # the prediction
    assert rows(visit) == ["val/cat/127"]
    page.fill("#search", "CAT/12")
    page.locator("#rows-table .by >> text='loss'").click()
    losses = [float(each) for each in rows(visit, 4)]
    assert losses == sorted(losses, reverse=True)
    page.fill("#search", "")
    page.locator("#rows-table .by >> text='loss'").click()
    assert rows(visit, 4)[:3] == ["0", "1", "2"]
    page.fill("#row-filters input[type=number] >> nth=0", "490")
    assert page.inner_text("#rows-found").startswith("10 of 500")  # the one without a number is not there
    page.locator("#row-filters button").click()
    page.wait_for_function("() => document.querySelector('#rows-found').textContent.startsWith('500')")

    page.select_option("#row-filters [data-by=right]", label="wrong")
    assert page.inner_text("#rows-found").startswith("250 of 500")
    page.select_option(f"[data-by='flips, {MARKUP}']", label=f"right in {MARKUP}, wrong in net")
    wanted = sum(at % 2 == 1 and at % 3 % 2 == 0 for at in range(500))
    assert page.inner_text("#rows-found").startswith(f"{wanted} of 500")
    visit.end()


def test_a_sample_opens_alone_with_its_neighbours_and_has_a_link(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.locator("#cards .card img").first.click()
    assert page.locator("#large .id").inner_text() == f"val/{MARKUP}/0"
    page.keyboard.press("ArrowRight")
    assert page.locator("#large .id").inner_text() == f"val/{ESCAPED}/1"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")  # none is before the first
    assert page.locator("#large .id").inner_text() == f"val/{MARKUP}/0"
    link = page.url
    page.keyboard.press("Escape")
    page.wait_for_function("() => !location.hash")  # the event of closing comes later than the closing
    assert not page.is_visible("#large") and page.url == file.as_uri()

    # A sample that is opened before that event keeps its link.
    page.evaluate(
        """async () => {
          const large = document.querySelector("#large"), image = document.querySelector("#cards .card img");
          image.click();
          const closed = new Promise((resolve) => large.addEventListener("close", resolve));
          large.close();
          image.click();
          await closed;
        }"""
    )
    assert page.is_visible("#large") and page.url == link
    page.keyboard.press("Escape")
    page.wait_for_function("() => !location.hash")

    # A row without a card says what it has; its link is one, too.
    page.fill("#search", "dog/498")
    page.locator("#rows-table tbody button").click()
    has = ["val/dog/498", "dog", "right", "426", "right", "dog"]
    assert page.locator("#large dd").all_inner_texts() == has
    assert "dualeval show RUN ID --against RUN --html" in page.inner_text("#large .note")
    page.click("#close")
    page.goto("about:blank")
    page.goto(link)
    assert page.locator("#large .id").inner_text() == f"val/{MARKUP}/0"
    visit.said.clear()
    page.context.close()


def test_a_link_to_a_sample_that_has_no_card_or_none_says_so_and_leads_nowhere(
    browser: Any, file: Path
) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.click("nav a[href='#samples']")
    for name, said in (
        ("val/dog/498", "no more of this sample than its row"),
        ("none", "no sample of this id"),
    ):
        page.evaluate(f"location.hash = 'sample={name}'")
        page.wait_for_function(
            f"() => document.querySelector('#large .note')?.textContent.includes('{said}')"
        )
        for key in ("ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.url.endswith(f"#sample={name.replace('/', '%2F')}")
        assert [each.get_attribute("aria-disabled") for each in page.locator("#previous, #next").all()] == [
            "true"
        ] * 2
    # The browser's Back closes the view.
    page.go_back()
    page.go_back()
    page.wait_for_function("() => !document.querySelector('#large').open")
    assert page.url.endswith("#samples")
    page.locator("#cards .card img").first.click()
    states = [each.get_attribute("aria-disabled") for each in page.locator("#previous, #next").all()]
    assert states == ["true", "false"]
    page.context.close()


def test_rows_are_found_by_all_digits_and_letters_and_nan_is_the_worst(browser: Any, tmp_path: Path) -> None:
    long = [f"{'x' * 70} {animal}" for animal in ("cat", "dog", "cat", "dog")]
    columns = [
        {"name": "id", "texts": ["100%.png", "b", "c", "d"]},
        {"name": "loss", "values": [1.00004, "nan", None, 1.00001]},
        {"name": "text", "texts": long},
    ]
    (tmp_path / "page.html").write_text(render(content(0, rows={"of": 4, "columns": columns})), "utf-8")
    visit = Visit(browser, f"{(tmp_path / 'page.html').as_uri()}#sample=100%.png")
    page = visit.page
    assert page.locator("#large dd").all_inner_texts() == ["100%.png", "1", long[0]]
    page.keyboard.press("Escape")
    for ids in (["b", "100%.png", "d", "c"], ["d", "100%.png", "b", "c"]):
        page.locator("#rows-table .by >> text='loss'").click()
        assert rows(visit) == ids
    assert rows(visit, 2) == ["1", "1", "nan", "–"] and rows(visit, 3)[0] == f"{'x' * 60}…"
    page.fill("#row-filters input[type=number] >> nth=0", "1.00003")
    assert rows(visit) == ["100%.png", "b"]
    page.fill("#search", "dog")
    assert rows(visit) == ["b"]
    visit.end()


def test_layers_are_switched_in_all_pictures_by_the_keyboard(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    assert visit.texts("#samples ~ .legend label") == ["mask", MARKUP, "cat"]
    # What strangers have written makes pictures that can be drawn.
    layers = page.locator("#cards .card:nth-child(5) [data-layer]")
    assert [one.evaluate("(each) => each.naturalWidth > 0") for one in layers.all()] == [True, True]
    plain, boxes = layers.all()
    assert plain.bounding_box() == page.locator("#cards .card:nth-child(5) img").first.bounding_box()

    page.focus("#samples ~ .legend input >> nth=1")
    page.keyboard.press("Space")
    assert plain.is_visible() and not boxes.is_visible()
    page.focus("#cards .card:nth-child(5) .id a")
    page.keyboard.press("Enter")
    there = page.locator("#large [data-layer]")
    there.last.wait_for(state="attached")
    assert [one.is_visible() for one in there.all()] == [True, False]
    switch = page.locator("#large .legend input >> nth=1")
    assert not switch.is_checked()
    switch.focus()
    page.keyboard.press("Space")
    assert [one.is_visible() for one in there.all()] == [True, True]
    page.keyboard.press("Escape")
    assert boxes.is_visible() and page.is_checked("#samples ~ .legend input >> nth=1")
    visit.end()


def test_tokens_are_read_by_the_keyboard_and_say_their_losses(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    tokens, differences = page.locator("#cards .card:nth-child(6) .tokens").all()
    assert tokens.locator("span").all_inner_texts()[2:4] == [MARKUP, ESCAPED]
    colours = [
        each.locator("span").nth(at).evaluate("(each) => getComputedStyle(each).backgroundColor")
        for each in (tokens, differences)
        for at in (0, 16, 47)
    ]
    assert len({*colours}) == 5  # nothing, and two steps of one colour; of differences also another colour
    page.locator("#cards .card:nth-child(6) .id a").click()
    text = page.locator("#large .tokens").first
    text.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    said = "[document.activeElement.title, getComputedStyle(document.activeElement, '::after').content]"
    assert page.evaluate(said) == ["0.75", '"0.75"']
    # At the end of a line it ends with its token, within the text; it is in one line.
    placed = page.evaluate(
        """() => [...document.querySelectorAll("#large .tokens span")].slice(0, 47).map((each) => {
          const within = each.parentElement;
          each.click();
          const { left, right, whiteSpace } = getComputedStyle(each, "::after");
          return [left === "0px", right === "0px", whiteSpace, within.scrollWidth <= within.clientWidth];
        })"""
    )
    assert {(*each,) for each in placed} == {(True, False, "nowrap", True), (False, True, "nowrap", True)}
    # The sample is the same, and its legend is there.
    assert page.locator("#large .id").inner_text() == f"val/{MARKUP}/5"
    assert page.locator("#large .steps").first.is_visible()
    page.focus("#next")
    page.keyboard.press("ArrowRight")
    assert page.locator("#large .id").inner_text() == f"val/{ESCAPED}/6"
    assert not page.locator("#large .steps").first.is_visible()
    visit.end()


def test_menus_without_a_choice_are_not_there(browser: Any, tmp_path: Path) -> None:
    samples = [replace(each, target=None, prediction=None) for each in content(count=5).samples]
    (tmp_path / "page.html").write_text(render(content(samples=samples)), "utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    shown = visit.page.locator("#filters select:visible").all()
    assert [each.get_attribute("data-by") for each in shown] == ["reason", "facet scanner", f"facet {MARKUP}"]
    visit.end()


def _samples() -> list[tuple[int, str]]:
    names = [MARKUP, ESCAPED, "cat", "dog", "{{ 7 * 7 }}"]
    return [(at, names[at % 5]) for at in range(40)]


def test_the_page_works_by_keyboard_alone(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.focus("[data-by=reason]")
    page.keyboard.press("ArrowDown")
    assert "10 of 40" in page.inner_text("#found")
    page.focus("section:has(#classes) .sort >> nth=1")
    page.keyboard.press("Space")
    assert page.locator("section:has(#classes) th[aria-sort=descending]").inner_text() == "support"
    visit.end()


def serious(found: Any) -> list[Any]:
    return [each for each in found["violations"] if each["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_violation_in_either_theme(browser: Any, file: Path, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = Visit(browser, file, color_scheme=theme)
    page = visit.page
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = Axe().run(page).response
    assert found["testEngine"]["name"] == "axe-core" and found["url"] == file.as_uri()
    assert serious(found) == []
    # A picture with layers, boxes among them, and texts by the losses of their tokens, alone.
    for place, within in ((5, "[data-layer]"), (6, ".tokens")):
        page.locator(f"#cards .card:nth-child({place}) .id a").click()
        page.locator(f"#large {within}").first.wait_for()
        if within == ".tokens":
            page.locator("#large .tokens").first.press("ArrowRight")
        assert serious(Axe().run(page, context="#large").response) == []
        page.click("#close")
    # The other theme by the button, which a reload remembers.
    colours = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
    while page.inner_text("#theme") != f"Theme: {'light' if theme == 'dark' else 'dark'}":
        page.click("#theme")
    colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len({*colours}) == 2
    visit.end()


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_is_no_wider_than_its_window(browser: Any, file: Path, width: int) -> None:
    visit = Visit(browser, file, viewport={"width": width, "height": 800})
    if width == 390:
        # Names of classes stay, and the other run's answer is below the picture.
        table = visit.page.locator("section:has(#classes) .scroll")
        table.evaluate("(each) => { each.scrollLeft = 100; }")
        name = table.locator("tbody th").first.bounding_box()
        assert abs(name["x"] - table.bounding_box()["x"]) < 2
        card = visit.page.locator("#cards .card").first
        card.evaluate("(each) => each.querySelector('dl').remove()")  # what is beside the picture is short
        picture, other = (card.locator(each).first.bounding_box() for each in ("img", ".other"))
        assert other["y"] >= picture["y"] + picture["height"]
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    visit.end()


def test_a_command_is_copied_and_the_matrix_is_zoomed(browser: Any, file: Path) -> None:
    visit = Visit(browser, file, permissions=["clipboard-read", "clipboard-write"])
    page = visit.page
    page.click(".copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"dualeval run --data '{MARKUP}'"
    before = page.locator("#matrix tbody td").first.bounding_box()["width"]
    page.locator("#zoom").fill("4")
    assert page.locator("#matrix tbody td").first.bounding_box()["width"] > 1.5 * before
    visit.end()


def test_without_scripts_all_cards_are_there(browser: Any, file: Path) -> None:
    visit = Visit(browser, file, java_script_enabled=False)
    assert len(visit.texts(".card")) == 40
    assert all(one.is_visible() for one in visit.page.locator("[data-layer]").all())
    assert visit.page.is_visible(".legend >> nth=0") and not visit.page.is_visible(".legend input >> nth=0")
    assert not visit.page.is_visible("#filters") and not visit.page.is_visible(".copy >> nth=0")
    visit.end()
