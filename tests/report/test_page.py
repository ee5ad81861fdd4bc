"""The page of a run: one safe file that says what it leaves out, and costs a run nothing but itself."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from markupsafe import escape
from PIL import Image

from dualeval.cli import dualeval
from dualeval.errors import UsageError
from dualeval.report.page import page as writing
from dualeval.report.page.html import render
from dualeval.report.page.things import Shown, others_than
from tests.conftest import Launch
from tests.report.pages import ESCAPED, ESCAPES, MARKUP, content, sample

RUN = ("dualeval", "run", "--limit", "256", "--no-progress")


class Elements(HTMLParser):
    """Names and attributes of a page's elements, and the texts within."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_markup_in_names_is_text_on_the_page() -> None:
    page = render(content())
    elements = Elements(page)
    assert MARKUP not in page and ESCAPES not in page and "\x1b" not in page
    # In a script it is text as well.
    assert page.count("</script>") == 3
    assert {MARKUP, ESCAPED, "{{ 7 * 7 }}", f"net: {MARKUP}"} <= {text.strip() for text in elements.texts}
    page.encode("utf-8")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    elements = Elements(render(content()))
    policy = next(each["content"] for _, each in elements.found if each.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag, attributes in elements.found:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), (tag, attributes)
    identities = [each["id"] for _, each in elements.found if "id" in each]
    assert len(identities) == len({*identities})


def test_the_filters_know_the_samples_that_are_there() -> None:
    page = render(content(count=5))
    found = re.search(r'id="index">(.*?)</script>', page)
    assert found is not None and not {*"<>&"} & {*found[1]}
    index = json.loads(found[1])["samples"]
    assert [each["reason"] for each in index] == [
        ["mistake"],
        ["loss"],
        ["lost:0"],
        ["gained:0"],
        ["mistake"],
    ]
    assert index[0] == {
        "reason": ["mistake"],
        "target": [MARKUP],
        "prediction": [ESCAPED],
        "facet scanner": ["A"],
        f"facet {MARKUP}": [ESCAPED, "x"],
    }


def test_above_the_limit_there_are_fewer_samples_of_each_reason() -> None:
    whole, limit = content(count=80, picture=(400, 300)), 160_000
    assert len(render(whole).encode()) > limit
    page = render(whole, limit)
    assert len(page.encode()) <= limit
    shown = page.count('<article class="card"')
    assert 8 < shown < 80
    assert f"{shown} of 80 samples are shown: the page has room for no more." in page
    assert all(f'"{reason}":' in page for reason in ("mistake", "loss", "lost:0", "gained:0"))


def test_a_page_of_many_pictures_is_below_8_mb() -> None:
    noise = Image.effect_noise((640, 480), 200).convert("RGB")
    shown = (Shown(kind="picture", picture=noise), Shown(kind="picture", picture=noise))
    samples = [replace(sample(number, (28, 28)), shown=shown) for number in range(210)]
    assert len(render(content(samples=samples)).encode()) <= 8_000_000


def test_tiny_pictures_are_kept_and_large_ones_are_thumbnails() -> None:
    pages = {size: render(content(count=1, picture=size)) for size in ((28, 28), (900, 300))}
    assert 'width="28" height="28" class="tiny"' in pages[28, 28] and "data:image/png" in pages[28, 28]
    assert 'width="240" height="80" alt' in pages[900, 300] and "data:image/webp" in pages[900, 300]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_pictures_of_all_modes_are_on_the_page(mode: str) -> None:
    for size in ((20, 20), (200, 100)):
        shown = (Shown(kind="picture", picture=Image.new(mode, size)),)
        assert "data:image/" in render(content(samples=[replace(sample(0, (28, 28)), shown=shown)]))


def test_a_long_text_is_folded_and_a_short_one_is_not() -> None:
    prompt, document = (f"{MARKUP} {letter * 500} end of it" for letter in "pd")
    table = Shown(kind="table", table={"prompt": prompt, "answer": "four"})
    shown = (table, Shown(kind="text", text=document), Shown(kind="text", text="z" * 9000))
    page = render(content(samples=[replace(sample(0, (28, 28)), shown=shown, others=())]))
    cards = page[page.index('<div class="cards"') : page.index('id="more"')]
    assert cards.count("<details>") == 3 and "<dt>answer</dt><dd>four</dd>" in cards
    summary = cards[cards.index("<summary>") : cards.index("</summary>")]
    assert (
        summary.endswith("p end of it") and " … " in summary and len(summary) < 300 and MARKUP not in summary
    )
    assert "p" * 500 in cards and "d" * 500 in cards
    assert "z" * 4000 in cards and "z" * 4001 not in cards and "(9,000 letters)" in cards


def test_the_words_that_differ_are_marked_in_both_answers() -> None:
    own, other = (
        Shown(kind="table", table={"prompt": "the same", "answer": answer})
        for answer in (f"It is a red {MARKUP} cat", "It was a red cat, I think")
    )
    whole = sample(0, (28, 28))
    apart = replace(whole.others[0], shown=others_than([own], [other]))
    page = render(content(samples=[replace(whole, shown=(own,), others=(apart,))]))
    cards = page[page.index('<div class="cards"') : page.index('id="more"')]
    marked = [unescape(each) for each in re.findall(r"<mark>(.*?)</mark>", cards)]
    assert [each.strip() for each in marked] == ["is", f"{MARKUP} cat", "was", "cat, I think"]
    assert "<dd>the same</dd>" in cards and MARKUP not in cards


def test_of_tokens_there_are_the_first_with_their_losses() -> None:
    tokens = tuple((f" {MARKUP} {at}", loss) for at, loss in enumerate([0.49, 0.5, 3.999, 8, math.nan] * 200))
    shown = Shown(kind="tokens", tokens=tokens)
    other = replace(shown, beside=(0.54, 0.6, 4.5, 0, 0) * 200)
    whole = sample(0, (28, 28))
    samples = [replace(whole, shown=(shown,), others=(replace(whole.others[0], shown=(other,)),))]
    page = render(content(samples=samples))
    cards = page[page.index('<div class="cards"') : page.index('id="more"')]
    spans = [each for tag, each in Elements(cards).found if tag == "span" and "title" in each]
    first, beside = spans[:5], spans[600:605]
    assert len(spans) == 1200 and cards.count("… and 400 more") == 2 and MARKUP not in page
    assert [(each["class"], each["title"]) for each in first] == [
        *(("o0", "0.49"), ("o2", "0.50"), ("o8", "4.00"), ("o9", "8.00"), ("o9", "nan"))
    ]
    assert [(each["class"], each["title"]) for each in beside] == [
        *(("o0", "+0.05"), ("o3", "+0.10"), ("o5", "+0.50"), ("d9", "-8.00"), ("o9", "+nan"))
    ]
    assert page.count('class="legend steps"') == 4  # above the cards, and in the large view
    # The space before a word has no colour.
    assert f'aria-label="losses of net"> <span class="o0" title="0.49">{escape(MARKUP)} 0<' in cards


def test_losses_are_called_by_their_runs() -> None:
    shown = Shown(kind="tokens", tokens=(("a", 1.0), ("\n", 2.0)))
    whole = sample(0, (28, 28))
    runs = {"a": replace(shown, beside=(2.0, 2.0)), "b": replace(shown, beside=(1.5, 2.5)), "c": shown}
    others = tuple(replace(whole.others[0], run=name, shown=(each,)) for name, each in runs.items())
    page = render(content(samples=[replace(whole, shown=(shown,), others=others)]))
    expected = ["losses of net", "loss: net − a", "loss: net − b", "losses of c"]
    texts = [dict(each)["aria-label"] for tag, each in Elements(page).found if each.get("class") == "tokens"]
    assert texts == re.findall('class="of-tokens">(.*?)<', page) == expected
    legends = re.findall(r'class="legend steps">(.*?) <span', page)
    assert legends[:2] == ["losses of net, losses of c", "loss: net − a, loss: net − b"]


def test_without_losses_there_is_no_legend_of_them() -> None:
    assert "steps" not in render(content(count=1)).partition("</style>")[2]


def test_many_classes_are_shown_as_pairs_of_confused_ones() -> None:
    names = [f"class {number}" for number in range(1200)]
    page = render(
        content(
            confusion_names=names,
            confusion=[(0, 0, 6), (0, 1, 2), (5, 7, 30), (9, -1, 1)],
            class_rows=[(name, 1, 1.0, 0.5) for name in names],
        )
    )
    assert 'id="matrix"' not in page
    assert page.index("class 7") < page.index("class 1<")  # in the order of their counts
    assert "25.0 %" in page and "The first 1,000 of 1,200 rows." in page


def test_a_run_without_figures_has_a_page_of_its_provenance() -> None:
    nothing: dict[str, Any] = {"class_rows": [], "confusion": [], "confusion_names": [], "calibration": []}
    nothing |= {"curves": {}, "rows": {"of": 0, "columns": []}}
    page = render(content(count=0, against=[], slices={}, seconds=[], **nothing))
    links = [each["href"] for tag, each in Elements(page).found if tag == "a"]
    assert links == ["#provenance"]


def test_metrics_with_intervals_are_drawn_and_the_rest_is_in_the_table() -> None:
    metrics = {f"m{number}": 0.5 for number in range(12)}
    headlines = [replace(content().headlines[1], name=name) for name in metrics]
    group = {"label": "A", "samples": 9, "metrics": metrics, "intervals": {"m11": [0.4, 0.6]}, "small": None}
    page = render(content(headlines=headlines, slices={"a": [group]}))
    drawn = re.findall(r'aria-label="(m\d+) by a', page)
    assert drawn == ["m11"]
    assert "More groups and metrics are in the table." in page and ">m10</button>" in page


def test_the_first_metric_has_a_tile_without_an_interval() -> None:
    loss, top1, _ = content().headlines
    plain = [replace(each, low=None, high=None) for each in (replace(loss, name="mean_iou"), loss)]
    page = render(content(headlines=[plain[0], top1, plain[1]]))
    tiles, note = page.partition('<p class="note">Intervals')[::2]
    assert re.findall(r"<h2>(.*?)</h2>\s*<p.*>(.*?)</p>\s*<p>([^<]*)", tiles)[:2] == [
        *(("mean_iou", "0.400000", "no interval"), ("top1", "80.00 %", "70.00 % to 90.00 % "))
    ]
    assert note.partition("</p>")[0] == " are 95 %. Without one: loss 0.400000"


def test_charts_are_not_the_callers_style() -> None:
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True, "figure.facecolor": "red", "svg.fonttype": "path"}):
        assert render(content()) == render(content())
        styled = render(content())
    assert styled == render(content())


def test_a_page_without_a_folder_or_jinja2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give out=DIR"):
        writing.check_report(None, is_main=True)
    monkeypatch.setattr(writing, "find_spec", lambda name: None if name == "jinja2" else True)
    with pytest.raises(UsageError, match=r"needs jinja2.*pip install 'dualeval\[report\]'"):
        writing.check_report("out", is_main=True)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two finished runs of the same job: a with its page, b without."""
    folder = tmp_path_factory.mktemp("runs")
    done = launch([*RUN, "--report", "--out", folder / "a"]).ok()
    assert f"the report is in {folder / 'a/report.html'}" in done.stderr
    launch([*RUN, "--out", folder / "b"]).ok()
    return folder


def test_a_run_and_a_command_write_the_same_page(launch: Launch, runs: Path, tmp_path: Path) -> None:
    launch(["dualeval", "report", runs / "a", "--out", tmp_path / "again.html"]).ok()
    page = (runs / "a/report.html").read_text()
    assert 'class="tiny"' in page
    assert (tmp_path / "again.html").read_text() == page


def test_report_against_compares_with_another_run(launch: Launch, runs: Path) -> None:
    assert not (runs / "b/report.html").exists()
    launch(["dualeval", "report", runs / "b", "--against", runs / "a"]).ok()
    assert "the same on every sample" in (runs / "b/report.html").read_text()


def test_wrong_arguments_of_the_command_are_refused(runs: Path, tmp_path: Path) -> None:
    for words, said in (
        ([runs / "c"], "there is no folder"),
        ([runs / "a", "--against", runs / "c"], "there is no folder"),
        ([runs / "a", "--out", tmp_path / "none/page.html"], "report RUN --out FILE' writes another file"),
        (
            [runs / "a", "--out", runs / "a/predictions.parquet"],
            "expected the name of a file that ends in .html",
        ),
        ([runs / "a", "--out", tmp_path], "expected the name of a file that ends in .html"),
    ):
        done = CliRunner().invoke(dualeval, ["report", *map(str, words)])
        assert isinstance(done.exception, UsageError) and said in str(done.exception)


def test_a_finished_run_asked_for_other_groups_has_a_page_of_these(launch: Launch, tmp_path: Path) -> None:
    launch([*RUN, "--by", "target_name", "--out", tmp_path / "a"]).ok()
    launch([*RUN, "--by", "prediction_name", "--report", "--out", tmp_path / "a"]).ok()
    page = (tmp_path / "a/report.html").read_text()
    assert "by prediction_name, with 95 % intervals" in page and "by target_name, with" not in page


def test_fresh_removes_the_page_of_the_earlier_run(launch: Launch, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    launch([*RUN, "--fresh", "--out", tmp_path / "a"]).ok()
    assert (tmp_path / "a/result.json").exists() and not (tmp_path / "a/report.html").exists()


SCRIPT = """
import sys, torch, dualeval
torch.manual_seed(0)
class Mine(dualeval.ModelTask):
    def show(self, row):
        if row["index"] == 3:
            raise ValueError("no picture </script>")
        return {"number": str(row["index"])}
model = torch.nn.Linear(4, 3).eval()
data = torch.utils.data.TensorDataset(torch.rand(30, 4), torch.arange(30) % 3)
task = Mine(model=model, data=data, metrics=["loss", "top1"])
dualeval.evaluate(task, out=sys.argv[1], report=True)
print(sorted({"matplotlib", "jinja2"} & {*sys.modules}))
"""


def test_a_task_of_ones_own_shows_what_it_likes(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    launch([sys.executable, tmp_path / "mine.py", tmp_path / "out"]).ok()
    page = (tmp_path / "out/report.html").read_text()
    assert "<dt>number</dt><dd>7</dd>" in page
    assert '<div class="error">ValueError: no picture &lt;/script&gt;</div>' in page


def test_a_run_without_a_report_loads_nothing_for_it(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace(", report=True", ""))
    assert launch([sys.executable, tmp_path / "mine.py", tmp_path / "out"]).ok().stdout.endswith("[]\n")
    assert not (tmp_path / "out/report.html").exists()


def test_a_page_that_fails_leaves_the_run_as_it_is(launch: Launch, tmp_path: Path) -> None:
    broken = "import dualeval.report.page.html as html\nhtml.render = lambda content: 1 / 0\n"
    (tmp_path / "mine.py").write_text(f"{broken}{SCRIPT}")
    done = launch([sys.executable, tmp_path / "mine.py", tmp_path / "out"]).ok()
    said = "report.html could not be made, and the result is complete: ZeroDivisionError: division by zero"
    assert done.stderr.count(said) == 1
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "done"
