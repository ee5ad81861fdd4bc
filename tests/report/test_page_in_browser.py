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

    def sees(self, what: Any) -> Any:
        """What is awaited of a selector or a locator: right after an action an assertion may be early."""
        from playwright.sync_api import expect

        expect.set_options(timeout=30_000)
        return expect(self.page.locator(what) if isinstance(what, str) else what)

    def awaits_address(self, end: str) -> None:
        """Wait until the address ends so; that of ``page.url`` is known later than the page's."""
        self.page.wait_for_function("(end) => location.href.endsWith(end)", arg=end)

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


CARDS = ".card:not([hidden]) .id"


def test_filters_and_sorting_choose_the_cards(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    visit.sees(CARDS).to_have_count(24)
    visit.sees("#found").to_contain_text("40 of 40")
    page.click("#more")
    visit.sees(CARDS).to_have_count(40)
    visit.sees("#more").to_be_hidden()

    page.select_option("[data-by=reason]", "loss")
    visit.sees(CARDS).to_have_text([f"val/{name}/{at}" for at, name in _samples() if at % 4 == 1])
    page.select_option("[data-by='facet scanner']", "A")  # none of them
    visit.sees(CARDS).to_have_count(0)
    visit.sees("#found").to_contain_text("0 of 40")
    page.click("text=Clear")
    page.select_option("#filters [data-by=target]", MARKUP)
    page.select_option("#filters [data-by=prediction]", ESCAPED)
    visit.sees(CARDS).to_have_text([f"val/{MARKUP}/{at}" for at in (0, 5, 10, 20, 25, 30)])

    # From a comparison to the samples.
    page.click("[data-reason='gained:0']")
    visit.sees(CARDS).to_have_text([f"val/{name}/{at}" for at, name in _samples() if at % 4 == 3])

    by_class = page.locator("section:has(#classes) table")
    recalls = by_class.locator("tbody tr td:nth-child(3)")
    by_class.locator("text='recall'").click()
    visit.sees(recalls).to_have_text(["0.9000", "0.7000", "0.6000", "0.5000", "–"])
    by_class.locator("text='recall'").click()
    visit.sees(recalls).to_have_text(["0.5000", "0.6000", "0.7000", "0.9000", "–"])
    visit.sees(by_class.locator("th[aria-sort=ascending]")).to_have_text("recall")
    by_class.locator("text=support").click()
    visit.sees(by_class.locator("tbody th").first).to_have_text(MARKUP)
    visit.end()


def test_figures_lead_to_their_rows(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.fill("#search", "nothing of this")
    visit.sees("#rows-found").to_have_text("nothing found: 0 of 500 samples")

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
        found = sum(map(bool, map(wanted, range(500))))
        visit.sees("#rows-found").to_have_text(f"{found} of 500 samples")
        menus = page.locator("#row-filters select").all()
        assert [each.get_attribute("data-by") for each in menus if each.input_value()] == chosen
        visit.sees("#rows-table").to_be_visible()
        page.wait_for_function("() => scrollY > 100")
    assert page.inner_text("li:has-text('Largest fall')").startswith(
        f"Largest fall by class: {MARKUP}, recall -10.00 pp"
    )
    visit.end()


def test_a_class_of_masks_leads_to_the_most_wrong_pixels_of_it(browser: Any, tmp_path: Path) -> None:
    columns = [each for each in content().rows["columns"] if each["name"] not in ("target", "prediction")]
    (tmp_path / "page.html").write_text(render(content(rows={"of": 500, "columns": columns})), "utf-8")
    visit = Visit(browser, tmp_path / "page.html", viewport={"width": 390, "height": 844})
    of_classes = visit.page.locator("section:has(#classes) tbody th a")
    visit.sees(of_classes).to_have_text(["cat"])
    of_classes.click()
    sorted_by = visit.page.locator("#rows-table th[aria-sort=descending]")
    visit.sees(sorted_by).to_have_text("wrong pixels of cat")
    visit.sees(sorted_by).to_be_in_viewport()
    visit.sees(visit.page.locator(cells(len(columns))).first).to_have_text("499")
    # By it one only sorts.
    assert "wrong pixels" not in visit.page.inner_text("#row-filters")
    # A matrix of pixels counts no samples, and leads to none.
    visit.sees("section:has(#matrix) > .note").not_to_contain_text("Select a cell")
    visit.page.locator("#matrix tbody td:not(:empty)").first.click()
    visit.sees("#rows-found").to_contain_text("500 of 500")
    visit.end()


def cells(column: int = 1) -> str:
    """A column of the rows in sight."""
    return f"#rows-table tbody tr:not([aria-hidden]) > :nth-child({column})"


def test_all_rows_are_searched_filtered_and_sorted(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    found = visit.sees("#rows-found")
    found.to_contain_text("500 of 500")
    visit.sees(page.locator(cells()).first).to_have_text(f"val/{MARKUP}/0")
    assert page.locator(cells()).count() < 60
    # Only what is in sight is there; at the end the last row.
    page.eval_on_selector("#rows-table", "(box) => { box.scrollTop = box.scrollHeight; }")
    visit.sees("#rows-table tbody").to_contain_text("/499")

    page.fill("#search", "CAT/12")
    visit.sees(cells()).to_have_text([f"val/cat/{at}" for at in (12, 122, 127)])
    page.fill("#search", " right  CAT/12 ")  # words, in any columns
    visit.sees(cells()).to_have_text(["val/cat/12", "val/cat/122"])
    page.fill("#search", "dog CAT/12")  # the prediction
    visit.sees(cells()).to_have_text(["val/cat/127"])
    page.fill("#search", "CAT/12")
    page.locator("#rows-table thead >> text='loss'").click()
    visit.sees(cells(4)).to_have_text(["444", "199", "14"])
    page.fill("#search", "")
    page.locator("#rows-table thead >> text='loss'").click()
    for at in range(3):
        visit.sees(page.locator(cells(4)).nth(at)).to_have_text(str(at))
    page.fill("#row-filters input[type=number] >> nth=0", "490")
    found.to_have_text("10 of 500 samples")  # the one without a number is not there
    page.locator("#row-filters button").click()
    found.to_have_text("500 of 500 samples")

    page.select_option("#row-filters [data-by=right]", label="wrong")
    found.to_have_text("250 of 500 samples")
    page.select_option(f"[data-by='flips, {MARKUP}']", label=f"right in {MARKUP}, wrong in net")
    wanted = sum(at % 2 == 1 and at % 3 % 2 == 0 for at in range(500))
    found.to_have_text(f"{wanted} of 500 samples")
    visit.end()


def test_a_sample_opens_alone_with_its_neighbours_and_has_a_link(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    shown = visit.sees("#large .id")
    page.locator("#cards .card img").first.click()
    shown.to_have_text(f"val/{MARKUP}/0")
    page.keyboard.press("ArrowRight")
    shown.to_have_text(f"val/{ESCAPED}/1")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")  # none is before the first
    shown.to_have_text(f"val/{MARKUP}/0")
    link = page.evaluate("location.href")
    page.keyboard.press("Escape")
    visit.sees("#large").to_be_hidden()
    visit.awaits_address(file.name)

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
    visit.sees("#large").to_be_visible()
    visit.awaits_address(link)
    page.keyboard.press("Escape")
    visit.awaits_address(file.name)

    # A row without a card says what it has; its link is one, too.
    page.fill("#search", "dog/498")
    page.locator("#rows-table tbody button").click()
    has = ["val/dog/498", "dog", "right", "426", "right", "486", "dog"]
    visit.sees("#large dd").to_have_text(has)
    visit.sees("#large .note").to_contain_text("dualeval show RUN ID --against RUN --html")
    page.click("#close")
    page.goto("about:blank")
    page.goto(link)
    shown.to_have_text(f"val/{MARKUP}/0")
    assert visit.said == []
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
        visit.sees("#large .note").to_contain_text(said)
        for key in ("ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        visit.awaits_address(f"#sample={name.replace('/', '%2F')}")
        for step in ("#previous", "#next"):
            visit.sees(step).to_have_attribute("aria-disabled", "true")
    # The browser's Back closes the view.
    page.go_back()
    page.go_back()
    visit.sees("#large").to_be_hidden()
    visit.awaits_address("#samples")
    page.locator("#cards .card img").first.click()
    visit.sees("#previous").to_have_attribute("aria-disabled", "true")
    visit.sees("#next").to_have_attribute("aria-disabled", "false")
    page.context.close()


def test_samples_whose_ids_look_the_same_open_each_its_own_card(browser: Any, tmp_path: Path) -> None:
    """As of an escape character and of its four letters: the page shows both alike."""
    ids = ["a", "a", "b", "a"]
    samples = [
        replace(each, id=ids[at], row=10 * at, target=f"of {at}", correct=False, others=())
        for at, each in enumerate(content(count=3).samples)
    ]
    columns = [{"name": "id", "texts": ids}, {"name": "target", "texts": ["of 0", "of 1", "of 2", "of 3"]}]
    rows = {"of": 40, "gaps": [0, 10, 10, 10], "columns": columns}
    (tmp_path / "page.html").write_text(render(content(samples=samples, rows=rows)), "utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    page, target = visit.page, visit.sees("#large dt:text-is('target') + dd")
    page.locator("#cards .id a").nth(1).click()
    target.to_have_text("of 1")
    page.keyboard.press("ArrowRight")
    target.to_have_text("of 2")
    page.keyboard.press("ArrowLeft")
    target.to_have_text("of 1")
    page.keyboard.press("Escape")
    page.locator("#cards img").first.click()
    target.to_have_text("of 0")
    page.keyboard.press("Escape")
    for at in range(4):  # the last one has no card
        page.locator(cells()).nth(at).get_by_role("button").click()
        target.to_have_text(f"of {at}")
        page.keyboard.press("Escape")
    visit.end()


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
    visit.sees("#large dd").to_have_text(["100%.png", "1", long[0]])
    page.keyboard.press("Escape")
    for ids in (["b", "100%.png", "d", "c"], ["d", "100%.png", "b", "c"]):
        page.locator("#rows-table thead >> text='loss'").click()
        visit.sees(cells()).to_have_text(ids)
    visit.sees(cells(2)).to_have_text(["1", "1", "nan", "–"])
    visit.sees(page.locator(cells(3)).first).to_have_text(f"{'x' * 60}…")
    page.fill("#row-filters input[type=number] >> nth=0", "1.00003")
    visit.sees(cells()).to_have_text(["100%.png", "b"])
    page.fill("#search", "dog")
    visit.sees(cells()).to_have_text(["b"])
    visit.end()


def test_layers_are_switched_in_all_pictures_by_the_keyboard(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    visit.sees("#samples ~ .legend label").to_have_text(["mask", MARKUP, "cat"])
    # What strangers have written makes pictures that can be drawn.
    layers = page.locator("#cards .card:nth-child(5) [data-layer]")
    assert [one.evaluate("(each) => each.naturalWidth > 0") for one in layers.all()] == [True, True]
    plain, boxes = layers.all()
    assert plain.bounding_box() == page.locator("#cards .card:nth-child(5) img").first.bounding_box()

    page.focus("#samples ~ .legend input >> nth=1")
    page.keyboard.press("Space")
    visit.sees(boxes).to_be_hidden()
    visit.sees(plain).to_be_visible()
    page.focus("#cards .card:nth-child(5) .id a")
    page.keyboard.press("Enter")
    first, second = (visit.sees(page.locator("#large [data-layer]").nth(at)) for at in range(2))
    first.to_be_visible()
    second.to_be_hidden()
    switch = page.locator("#large .legend input >> nth=1")
    visit.sees(switch).not_to_be_checked()
    switch.focus()
    page.keyboard.press("Space")
    second.to_be_visible()
    first.to_be_visible()
    page.keyboard.press("Escape")
    visit.sees("#large").to_be_hidden()
    visit.sees(boxes).to_be_visible()
    visit.sees("#samples ~ .legend input >> nth=1").to_be_checked()
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
    visit.sees(":focus").to_have_attribute("title", "0.75")
    assert page.evaluate("getComputedStyle(document.activeElement, '::after').content") == '"0.75"'
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
    shown, steps = visit.sees("#large .id"), visit.sees(page.locator("#large .steps").first)
    shown.to_have_text(f"val/{MARKUP}/5")
    steps.to_be_visible()
    page.focus("#next")
    page.keyboard.press("ArrowRight")
    shown.to_have_text(f"val/{ESCAPED}/6")
    steps.to_be_hidden()
    visit.end()


def test_menus_without_a_choice_are_not_there(browser: Any, tmp_path: Path) -> None:
    samples = [replace(each, target=None, prediction=None) for each in content(count=5).samples]
    (tmp_path / "page.html").write_text(render(content(samples=samples)), "utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    shown = visit.page.locator("#filters select:visible").all()
    assert [each.get_attribute("data-by") for each in shown] == ["reason", "facet scanner", f"facet {MARKUP}"]
    visit.sees("#filters button").to_be_visible()
    visit.end()
    (tmp_path / "page.html").write_text(render(content(samples=[replace(samples[0], facets={})])), "utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    visit.sees("#found").to_be_visible()
    visit.sees("#filters :is(select, button):visible").to_have_count(0)
    visit.end()


def _samples() -> list[tuple[int, str]]:
    names = [MARKUP, ESCAPED, "cat", "dog", "{{ 7 * 7 }}"]
    return [(at, names[at % 5]) for at in range(40)]


def test_the_page_works_by_keyboard_alone(browser: Any, file: Path) -> None:
    visit = Visit(browser, file)
    page = visit.page
    page.keyboard.press("Tab")
    visit.sees("#theme").to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.focus("[data-by=reason]")
    page.keyboard.press("ArrowDown")
    visit.sees("#found").to_contain_text("10 of 40")
    page.focus("section:has(#classes) .sort >> nth=1")
    page.keyboard.press("Space")
    visit.sees("section:has(#classes) th[aria-sort=descending]").to_have_text("support")

    # Of the matrix one cell is a stop; the arrow keys end at its edges, and Enter chooses its samples.
    page.focus("#zoom")
    page.keyboard.press("Tab")
    visit.sees("[aria-label='Confusion matrix']").to_be_focused()
    page.keyboard.press("Tab")
    for key in ("ArrowUp", "ArrowLeft", "ArrowDown", "ArrowDown", *["ArrowRight"] * 4, "ArrowLeft"):
        page.keyboard.press(key)
    visit.sees("#matrix tr:nth-child(3) td:nth-child(5)").to_be_focused()
    visit.sees("#matrix [tabindex='0']").to_have_count(1)
    page.keyboard.press("Enter")
    visit.sees("#rows-found").to_have_text("50 of 500 samples")
    visit.sees("#rows-table").to_be_focused()
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
        visit.sees("#large").to_be_hidden()
    # The other theme by the button.
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for name in ("light", "dark")[: 1 + (theme == "light")]:
        page.click("#theme")
        visit.sees("#theme").to_have_text(f"Theme: {name}")
    visit.sees("body").not_to_have_css("background-color", colour)
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
    # Alone, what is said of a picture is beside it where there is room, and all of the picture is in sight:
    # of one with layers, and of one of a few pixels.
    for at in (5, 9):
        visit.page.locator(f"#cards .card:nth-child({at}) .id a").click()
        visit.sees("#large").to_be_visible()
        picture, facts = (visit.page.locator(f"#large {each}").first.bounding_box() for each in ("img", "dl"))
        assert picture["width"] > width / 2 and picture["y"] + picture["height"] < 800
        assert (facts["x"] >= picture["x"] + picture["width"]) == (width == 1200)
        assert (facts["y"] >= picture["y"] + picture["height"]) == (width == 390)
        assert visit.page.evaluate("large.scrollWidth <= large.clientWidth")
        visit.page.click("#close")
    visit.end()


def test_a_command_is_copied_and_the_matrix_is_zoomed(browser: Any, file: Path) -> None:
    visit = Visit(browser, file, permissions=["clipboard-read", "clipboard-write"])
    page = visit.page
    page.click(".copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"dualeval run --data '{MARKUP}'"
    before = page.locator("#matrix tbody td").first.bounding_box()["width"]
    page.locator("#zoom").fill("4")
    page.wait_for_function(
        "(before) => document.querySelector('#matrix tbody td').offsetWidth > 1.5 * before", arg=before
    )
    visit.end()


def test_without_scripts_all_cards_are_there(browser: Any, file: Path) -> None:
    visit = Visit(browser, file, java_script_enabled=False)
    visit.sees(".card").to_have_count(40)
    assert all(one.is_visible() for one in visit.page.locator("[data-layer]").all())
    assert visit.page.is_visible(".legend >> nth=0") and not visit.page.is_visible(".legend input >> nth=0")
    assert not visit.page.is_visible("#filters") and not visit.page.is_visible(".copy >> nth=0")
    visit.end()
