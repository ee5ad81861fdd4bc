"""A page that is served: all rows and cards to whoever has its address, and nothing to anybody else."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval
from dualeval.comparison.worst import JudgedRows
from dualeval.errors import UsageError
from dualeval.report.page.all_rows import AllRows
from dualeval.report.page.rows import columns_of, rows_of
from dualeval.report.page.runs import Runs
from dualeval.report.page.server import PageServer, ServedPage
from tests.comparison.test_comparison import changed, table_of
from tests.conftest import Launch
from tests.report.test_page_content import COUNT, EVIL, runs
from tests.report.test_page_in_browser import Visit, browser, cells

__all__ = ["browser", "runs"]  # fixtures
RUN = ("dualeval", "run", "--limit", "300", "--no-progress")
# One server for all.
pytestmark = pytest.mark.xdist_group("browser")


@contextmanager
def served(launch: Launch, *words: object) -> Iterator[str]:
    """The address of a page that is served, until Ctrl-C."""
    with launch.started(["dualeval", "report", *map(str, words), "--serve"]) as process:
        assert process.stdout is not None
        line, behind = process.stdout.readline(), process.stdout.readline()
        found = re.fullmatch(r"the report is at (http://127\.0\.0\.1:\d+/[\w-]{32}/)\n", line)
        try:
            assert found is not None, line
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=30)
    assert (process.returncode, behind, out, error) == (0, "Ctrl-C ends it.\n", "", "")


@pytest.fixture(scope="module")
def address(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    for name in ("a", "b"):
        launch([*RUN, "--out", folder / name]).ok()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with served(launch, folder / "b", "--against", folder / "a") as address:
        yield address
    # Nothing was written.
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(
    address: str, path: str = "", *, method: str = "GET", host: str | None = None
) -> tuple[int, Any, str]:
    """Status, headers and text of an answer; a path with a slash before it is a whole one."""
    _, _, place, token, _ = address.split("/")
    connection = http.client.HTTPConnection(place, timeout=30)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path if path.startswith("/") else f"/{token}/{path}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def query(first: int = 0, last: int = 10, **wanted: Any) -> str:
    whole = {"search": "", "tests": [], "sorted": [-1, 1], **wanted}
    return urlencode({"query": json.dumps(whole), "first": first, "last": last})


def test_the_page_its_rows_and_its_cards_are_there(address: str) -> None:
    status, headers, page = asked(address)
    assert status == 200 and page.startswith("<!doctype html>") and "connect-src &#39;self&#39;" in page
    policy = headers["Content-Security-Policy"]
    assert (
        policy.startswith("default-src 'none'") and "unsafe" not in policy and "connect-src 'self'" in policy
    )
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert "Server" not in headers
    found = json.loads(asked(address, f"rows?{query(sorted=[0, -1])}")[2])
    assert found["found"] == 300 and found["rows"][0][:2] == [299, "t10k-00299"]
    for which in ("row=7", "id=t10k-00007"):
        card = asked(address, f"card?{which}")[2]
        assert (
            card.strip().startswith('<article class="card" data-row="7">') and 'src="data:image/png' in card
        )
    assert asked(address, "card?id=none")[2] == asked(address, "card?row=300")[2] == ""


def test_whoever_is_not_meant_gets_nothing(address: str) -> None:
    token, port = address.split("/")[3], address.split("/")[2].rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example", f"[::1]:{port}"):
        assert asked(address, host=host)[0] == 403, host
    for host in (f"localhost:{port}", "localhost:8000", "127.0.0.1"):  # as behind `ssh -L`
        assert asked(address, host=host)[0] == 200, host
    for path in (
        "/",
        "//",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/{quote('ü')}/",
        f"/?{token}",
        f"/x/{token}/",
    ):
        status, headers, text = asked(address, path)
        assert (status, token in text, headers["Cache-Control"]) == (403, False, "no-store"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert asked(address, "", method=method)[0] == 501


def test_no_name_in_a_request_is_a_file(address: str) -> None:
    token = address.split("/")[3]
    for path in ("../result.json", "%2e%2e/result.json", "result.json", "rows/../card", "/etc/passwd"):
        wanted = f"/{token}/{path}"
        assert asked(address, wanted)[0] == 404, path
    for path in ("card?id=../../result.json", "card?id=/etc/passwd", "card?row=-1"):
        assert asked(address, path)[::2] == (200, ""), path


def test_what_makes_no_sense_is_refused_and_the_server_goes_on(address: str) -> None:
    for path in (
        *("rows", "card", "card?row=x", "rows?query=[]&first=0&last=1", "rows?query={&first=0&last=1"),
        *(f"rows?{query(sorted=[99, 1])}", f"rows?{query(tests=[[4, 'x', 1]])}", f"rows?{query(search=7)}"),
        "card?" + "&".join(f"a{number}=1" for number in range(9)),
    ):
        assert asked(address, path)[0] == 400, path
    place = address.split("/")[2].split(":")
    with socket.create_connection((place[0], int(place[1])), timeout=30) as silent:
        # One that says nothing keeps nobody waiting, and one that goes leaves no trace.
        assert asked(address)[0] == 200
        silent.sendall(b"nonsense\r\n\r\n")
        assert silent.recv(100).startswith(b"Open the whole address")
    assert asked(address)[0] == 200
    assert len(json.loads(asked(address, f"rows?{query(last=10**9)}")[2])["rows"]) == 300


def test_rows_are_found_as_in_the_file(runs: tuple[Path, Path]) -> None:
    a, b = map(table_of, runs)
    ours, theirs = (JudgedRows.open(run) for run in runs[::-1])
    columns = columns_of(Runs(name="b", rows=ours, others={"a": theirs}))
    table, names = AllRows(columns), [each.name for each in columns]

    def found(**wanted: Any) -> list[int]:
        text = json.dumps({"search": "", "tests": [], "sorted": [-1, 1], **wanted})
        answer = table.rows(text, 0, COUNT)
        assert answer["found"] == len(answer["rows"]) or answer["found"] > 500
        return [row[0] for row in answer["rows"]]

    head = table.head()
    assert (
        head["of"] == COUNT and head["served"] and EVIL[0] in head["columns"][names.index("target")]["texts"]
    )
    assert found(search=b.id[17].upper()) == [at for at, each in enumerate(b.id) if b.id[17] in each]
    # Each word in any column.
    words = f"wrong {b.id[17][:-1]}"
    assert found(search=words) == [
        at
        for at in found(search=b.id[17][:-1])
        if b.target[at] != b.prediction[at] or a.target[at] != a.prediction[at]
    ]
    # By all digits, also of losses that look equal; in a file, too.
    by_loss = b.loss.sort_values(ascending=False, kind="stable").index
    [of_file] = [each for each in rows_of(columns, ours)["columns"] if each["name"] == "loss"]
    assert np.array_equal(np.array(of_file["values"], np.float32), b.loss.to_numpy(np.float32))
    assert found(sorted=[names.index("loss"), -1]) == [*by_loss][:500]
    assert found(sorted=[0, 1]) == [*b.id.sort_values().index][:500]
    wrong = [names.index("right"), 0, 0]
    lost = (a.target == a.prediction) & (b.target != b.prediction) & (b.loss >= 1)
    tests = [wrong, [names.index("right in a"), 1, 1], [names.index("loss"), 1, None]]
    assert found(tests=tests, sorted=[names.index("loss"), -1]) == [at for at in by_loss if lost[at]]
    assert table.place_of(b.id[17]) == 17 and table.place_of("none") == -1


def test_a_run_that_has_changed_or_gone_is_named(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = changed(runs[1], tmp_path / "run")
    with PageServer() as server:
        server.page = ServedPage(Runs.open(run), None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asked(server.address, "card?row=1")[0] == 200
        write_bytes = (run / "predictions.parquet").read_bytes()
        (run / "predictions.parquet").unlink()
        status, _, text = asked(server.address, "card?row=1")
        assert status == 409 and "No such file" in text
        (run / "predictions.parquet").write_bytes(write_bytes)
        status, _, text = asked(server.address, "card?row=1")
        assert status == 409 and "start 'dualeval report RUN --serve' again" in text
        server.shutdown()


@pytest.mark.needs("browser")
def test_the_table_in_a_browser_has_all_rows(browser: Any, address: str) -> None:
    visit = Visit(browser, address)
    page = visit.page
    found, first, shown = map(visit.sees, ("#rows-found", page.locator(cells()).first, "#large .id"))
    first.to_have_text("t10k-00000")
    found.to_have_text("300 of 300 samples")
    page.fill("#search", "0012")
    found.to_have_text("11 of 300 samples")
    visit.sees(cells()).to_have_count(11)
    page.locator("#rows-table thead >> text='id'").click()
    page.locator("#rows-table thead >> text='id'").click()
    first.to_have_text("t10k-00129")
    visit.sees(page.locator(cells()).nth(1)).to_have_text("t10k-00128")

    # A cell of the matrix has as many rows.
    cell = page.locator("#matrix tbody td:not(:empty)").last
    cell.click()
    found.to_have_text(f"{cell.inner_text()} of 300 samples")
    page.locator("#row-filters button").click()
    page.fill("#search", "0012")
    first.to_have_text("t10k-00129")

    # A card with its picture, its neighbours, and a link.
    page.locator("#rows-table tbody button").first.click()
    visit.sees("#large img").to_be_visible()
    page.keyboard.press("ArrowRight")
    shown.to_have_text("t10k-00128")
    visit.awaits_address("/#sample=t10k-00128")

    # Neither a row nor a card that comes after the view was closed opens it again.
    held: list[Any] = []
    for late in ("rows", "card"):
        page.route(f"**/{late}?*", lambda route: held.append(route))
        with page.expect_request(f"**/{late}?*") as request:
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Escape")
        visit.sees("#large").to_be_hidden()
        held.pop().continue_()
        page.unroute(f"**/{late}?*")
        request.value.response().finished()
        page.locator("#rows-table tbody button").nth(2).click()
        shown.to_have_text("t10k-00127")
    page.goto("about:blank")
    page.goto(f"{address}#sample=t10k-00299")
    shown.to_have_text("t10k-00299")
    assert visit.said == []
    assert all(url.startswith((address, "data:image/", "about:")) for url in visit.asked)
    page.context.close()


@pytest.mark.needs("browser")
def test_a_table_higher_than_a_browser_draws_has_its_last_row(browser: Any, tmp_path: Path) -> None:
    from dualeval.report.page.html import render
    from tests.report.pages import content

    page_of = content(
        rows={"of": 1_100_000, "columns": [{"name": "id", "texts": [*map(str, range(1_100_000))]}]}
    )
    (tmp_path / "page.html").write_text(render(page_of, 10**9), "utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    for where, row in (("0", "0"), ("box.scrollHeight / 2", "55"), ("box.scrollHeight", "1099999")):
        visit.page.eval_on_selector("#rows-table", f"(box) => {{ box.scrollTop = {where}; }}")
        visit.page.wait_for_function(
            f"""() => [...document.querySelectorAll('#rows-table tbody button')].some((each) => {{
                const box = document.querySelector('#rows-table').getBoundingClientRect();
                const row = each.getBoundingClientRect();
                return each.textContent.startsWith('{row}') && row.top >= box.top && row.bottom <= box.bottom;
            }})"""
        )
    visit.end()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "--out", "x.html"], "leave out --out and --paths"),
        (["--serve", "--paths"], "leave out --out and --paths"),
        (["--port", "8000"], "also give --serve"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    runs: tuple[Path, Path], words: list[str], said: str
) -> None:
    done = CliRunner().invoke(dualeval, ["report", str(runs[0]), *words])
    assert isinstance(done.exception, UsageError) and said in str(done.exception)


def test_a_port_that_is_taken_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(dualeval, ["report", str(tmp_path), "--serve", "--port", str(port)])
    assert isinstance(done.exception, UsageError)
    assert f"--port {port} cannot be taken" in str(done.exception)


def test_a_sample_that_is_asked_for_has_the_first_card(runs: tuple[Path, Path]) -> None:
    b = table_of(runs[1])
    best = b.id[b.loss.idxmin()]  # of no list
    done = CliRunner().invoke(dualeval, ["show", str(runs[1]), best, "--html"])
    page = runs[1] / "sample.html"
    assert not (runs[1] / "report.html").exists()  # it may have a comparison
    assert done.stdout == f"{page.as_uri()}#sample={quote(best, safe='')}\n"
    cards = re.findall(r'class="id"><a[^>]*>(.*?)</a>', page.read_text("utf-8"))
    assert cards[0].replace("<wbr>", "") == best
    page.unlink()
    for words, said in (
        (["--html"], "dualeval show RUN ID --html"),
        (["none", "--html"], "has no sample 'none'"),
    ):
        done = CliRunner().invoke(dualeval, ["show", str(runs[1]), *words])
        assert isinstance(done.exception, UsageError) and said in str(done.exception)
    assert not page.exists()
