"""The page: it needs nothing beside it, breaks nowhere, and works in a browser, wide and narrow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape

import pytest

from flashattn.report.html import write
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--allow-file-access-from-files", "--virtual-time-budget=5000"),
)
PHONE = 390  # pixels across
GROUNDS = {False: "rgb(255, 255, 255)", True: "rgb(20, 23, 28)"}  # by whether it is dark
# A window is at least 500 pixels wide, a frame in it as narrow as it is told to be.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="page" src="probe.html" style="border:0" width="{width}" height="2000"></iframe>
<pre id="said"></pre>
<script>
addEventListener("message", (event) => {{ said.textContent = event.data; }});
</script></body>"""
# Ahead of the page's own script, to hear what goes wrong in it.
LISTEN = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message || event.target)), true);
for (const name of ["error", "warn"]) console[name] = (...words) => wrong.push(words.join(" "));
</script>"""
# After it: click, press, measure, and tell the window around.
ASK = """<script>
addEventListener("load", () => {
  const root = document.documentElement;
  const ground = (element) => getComputedStyle(element).backgroundColor;
  const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
  const table = [...document.querySelectorAll("#flash table")].at(-1);
  const head = table.tHead.rows[0].cells[1];
  const words = table.tHead.rows[0].cells[0];
  const said = { width: innerWidth, room: root.clientWidth, scroll: root.scrollWidth };
  for (const _ of [1, 2]) words.querySelector("button").click();  // the longest first
  said.before = column(table, 1);
  head.querySelector("button").click();
  said.rising = column(table, 1);
  said.risingSort = head.getAttribute("aria-sort");
  head.querySelector("button").click();
  said.falling = column(table, 1);
  said.fallingSort = head.getAttribute("aria-sort");
  words.querySelector("button").click();
  said.words = column(table, 0);
  said.headSort = head.getAttribute("aria-sort");
  said.focusable = [...document.querySelectorAll("thead button")].every((b) => b.tabIndex === 0);
  const boxes = [...document.querySelectorAll(".wide")];
  said.wide = boxes.some((box) => box.scrollWidth > box.clientWidth);
  said.images = [...document.images].map((image) => image.naturalWidth);
  said.ground = ground(document.body);
  said.cards = [...document.querySelectorAll("figure")].map(ground);
  said.wrong = wrong;
  parent.postMessage(JSON.stringify(said), "*");
});
</script>"""


@pytest.fixture(scope="module")
def page(made_run, tmp_path_factory):
    """The page of the made-up run, as a file."""
    return write(made_run, tmp_path_factory.mktemp("report"))


def test_every_study_is_on_the_page(page, made_run, made_pictures):
    """A section for each study, in the table of contents too, with its findings and tables."""
    text = unescape(page.read_text())
    for study in STUDIES:
        assert f'<a href="#{study.NAME}">{study.TITLE}</a>' in text
        assert f'<section id="{study.NAME}">' in text
        assert all(f"<li>{sentence}</li>" in text for sentence in study.findings(made_run))
        for table in study.tables(made_run):
            assert f"<h3>{table.caption}</h3>" in text
            assert all(f">{cell}</td>" in text for line in table.lines for cell in line)
    assert text.count("<img ") == sum(map(len, made_pictures.values()))
    assert text.count('<p class="origin">') >= text.count("<table>")
    assert "fa3 gave a reason (- in" in text


def test_every_tag_is_closed_and_every_row_is_whole(page):
    """The page parses: what opens is closed, and a row has a cell for each name in the head."""
    text = page.read_text()
    for tag in ("section", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "figure", "p"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>") > 0
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        widths = {line.count("</td>") for line in re.findall(r"<tr><td.*?</tr>", table)}
        assert widths == {table.count("</th>")}


def test_page_needs_nothing_beside_it(page):
    """Neither a file nor the network: every source is data, every link is within the page."""
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page.read_text())
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"https?://|@import|url\(|fetch\(", text)


def test_pictures_are_kept_both_ways(page, made_pictures):
    """Each picture is beside the page as PNG and SVG, and the Markdown shows it."""
    markdown = (page.parent / "report.md").read_text()
    for name in (name for pictures in made_pictures.values() for name in pictures):
        assert (page.parent / f"{name}.svg").exists()
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in markdown


def test_nothing_from_a_run_is_markup(made_run, tmp_path):
    """Names, reasons, kernels and machines may hold anything: it is shown and not obeyed."""
    evil = '</script><script>alert(\'"&")</script>'
    kernels = [{"name": evil, "category": evil, "calls": 1, "seconds": 1.0}]
    facts = {"study": "profile", "name": evil, "status": "ok", "reason": None}
    row = facts | {"step": evil, "size": evil, "categories": {evil: 1.0}, "kernels": kernels}
    failed = {"study": "profile", "name": "b", "status": "failed", "reason": evil}
    run = replace(made_run, machine={"gpu": evil}, command=evil, name=evil, rows=[row, failed])
    text = write(run, tmp_path).read_text()
    assert text.count("<script>") == text.count("</script>") == 1
    assert text.count("&lt;script&gt;") > 8


def test_a_page_without_pictures_or_a_gpu(tmp_path):
    """Where nothing could be measured, on a machine without a GPU, the page says why."""
    bare = {"study": "flash", "name": "a", "status": "unsupported", "reason": "no luck"}
    text = write(Run(machine={"accelerator": "cpu-x"}, rows=[bare]), tmp_path).read_text()
    assert "<h1>cpu-x: transformer and attention</h1>" in text
    assert "<li>no luck (- in 1 case)</li>" in text


def test_nothing_to_tell_is_refused(tmp_path):
    """A run without a row of any study makes no page."""
    with pytest.raises(ValueError, match="wanted rows of at least one study"):
        write(Run(machine={}, rows=[{"study": "mine", "name": "a", "status": "ok"}]), tmp_path)


def asked(page, folder, width, *, dark):
    """Open the page in a frame of this width, click around, and return what it says."""
    text = page.read_text()
    probed = text.replace("<style>", LISTEN + "<style>", 1).replace("</body>", ASK + "</body>", 1)
    (folder / "probe.html").write_text(probed)
    (folder / "frame.html").write_text(FRAME.format(width=width))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    window = f"--window-size={max(width, 500)},2000"
    flags = [*FLAGS, scheme, window, f"--user-data-dir={folder}/user", "--dump-dom"]
    command = [BROWSER, *flags, f"file://{folder}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    assert said, f"the page said nothing: {done.stdout[-500:]}"
    return json.loads(said.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def numbers(cells):
    """Return the cells that begin with a number, as numbers, and how many others follow them."""
    found = [float(match[0]) for cell in cells if (match := re.match(r"[\d.]+", cell))]
    return found, cells[len(found) :]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page in")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (PHONE, True)])
def test_page_works_in_a_browser(page, tmp_path, width, dark):
    """No sideways scrolling, no error, tables that sort both ways, the theme of the system."""
    said = asked(page, tmp_path, width, dark=dark)
    assert said["wrong"] == []
    assert said["width"] == width
    assert said["scroll"] <= said["room"]
    rising, others = numbers(said["rising"])
    assert rising == sorted(rising)
    assert rising != numbers(said["before"])[0]
    assert not any(cell[:1].isdigit() for cell in others)
    assert numbers(said["falling"])[0] == sorted(rising, reverse=True)
    assert (said["risingSort"], said["fallingSort"]) == ("ascending", "descending")
    lengths = [int(re.search(r"-q(\d+)", word)[1]) for word in said["words"]]
    assert lengths == sorted(lengths)  # as numbers, not as text
    assert said["headSort"] is None
    assert said["focusable"]
    assert said["wide"] or width > PHONE
    assert all(size > 0 for size in said["images"])
    assert said["ground"] == GROUNDS[dark]
    assert set(said["cards"]) == {"rgb(255, 255, 255)"}
