"""The page: it is self-contained and well-formed, and works in a browser, wide and narrow."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from flashattn.report.answer import cards
from flashattn.report.html import packed, write
from flashattn.report.runs import Run, kept, merge
from flashattn.report.studies import STUDIES

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--allow-file-access-from-files", "--virtual-time-budget=20000"),
)
PHONE, HEIGHT = 390, 844  # pixels of a phone; a laptop shows as much height
TAGS = "section details summary table thead tbody tr th td ul li figure p form label select"
KEPT = Path(__file__).parents[2] / ".benchmarks"
GROUNDS = {False: "rgb(255, 255, 255)", True: "rgb(20, 23, 28)"}  # by whether it is dark
# A window is at least 500 pixels wide; a frame in it may be narrower.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="page" src="probe.html" style="border:0" width="{width}" height="{height}"></iframe>
<pre id="said"></pre>
<script>
addEventListener("message", (event) => {{ said.textContent = event.data; }});
</script></body>"""
# Runs before the page's own script, and records its errors.
LISTEN = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message || event.target)), true);
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => wrong.push(words.join(" "));
</script>"""
# Runs after it: clicks, chooses, measures, and reports to the outer window.
ASK = """<script>
const root = document.documentElement;
const all = (query) => [...document.querySelectorAll(query)];
const wait = () => new Promise((resolve) => setTimeout(resolve, 50));
const until = async (found) => { for (let i = 0; i < 60 && !found(); i++) await wait(); };
const texts = () => all("#answer svg text").map((text) => text.textContent);
const chosen = () => Object.fromEntries(new FormData(document.forms[0]));

async function pick(name, value) {
  const before = document.querySelector("#answer svg");
  document.forms[0].elements[name].value = value;
  document.forms[0].elements[name].dispatchEvent(new Event("change", { bubbles: true }));
  await until(() => document.querySelector("#answer svg") !== before);
  return { chosen: chosen(), texts: texts() };
}

function sorting() {
  const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
  const table = all("#flash table").at(-1);
  const [words, head] = table.tHead.rows[0].cells;
  const said = {};
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
  said.focusable = all("thead button").every((b) => b.tabIndex === 0);
  return said;
}

addEventListener("load", async () => {
  await until(() => document.querySelector("#answer svg"));
  const said = { width: innerWidth, room: root.clientWidth, height: innerHeight };
  said.card = document.querySelector(".cards li").getBoundingClientRect().bottom;
  said.closed = { charts: all("svg.marks").length, height: root.scrollHeight };
  said.first = { chosen: chosen(), texts: texts() };
  const point = document.querySelector("#answer svg .mark-symbol.role-mark path");
  point.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
  await until(() => document.querySelector("#vg-tooltip-element.visible"));
  said.tip = document.querySelector("#vg-tooltip-element")?.textContent;
  const paths = "#answer svg .mark-line.role-mark path";
  const lines = () => all(paths).map((path) => path.getAttribute("opacity"));
  said.lines = lines();
  const name = document.querySelector("#answer svg .role-legend-symbol path");
  name.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  await wait();
  said.picked = lines();
  said.naive = await pick("peer", "naive");
  said.moved = await pick("mask", "causal");
  location.hash = "#lm";  // as a card does
  await until(() => document.querySelector("#lm svg"));
  said.linked = Boolean(document.querySelector("#lm[open] svg"));
  for (const details of all("details")) details.open = true;
  await until(() => all("svg.marks").length === all("figure").length);
  await wait();
  said.figures = all("figure").length;
  said.charts = all("svg.marks").map((chart) => chart.getBoundingClientRect().width);
  said.named = all(".plot").every((plot) => plot.getAttribute("aria-label"));
  said.scroll = root.scrollWidth;
  Object.assign(said, sorting());
  said.wide = all(".wide").some((box) => box.scrollWidth > box.clientWidth);
  said.ground = getComputedStyle(document.body).backgroundColor;
  said.ink = getComputedStyle(document.body).color;
  const label = all("#answer svg .role-legend-label text")[0];
  said.label = getComputedStyle(label).fill;
  said.wrong = wrong;
  parent.postMessage(JSON.stringify(said), "*");
});
</script>"""


@pytest.fixture(scope="module")
def page(made_run, tmp_path_factory):
    """The page of the made-up run, as a file."""
    return write(made_run, tmp_path_factory.mktemp("report"))


def test_every_study_is_on_the_page(page, made_run, made_pictures):
    """After the answer each study has a section, with its findings, pictures and tables."""
    text = unescape(page.read_text())
    places = [text.index(f'id="{study.NAME}"') for study in STUDIES]
    assert places == sorted(places)
    for card in cards(made_run):
        assert -1 < text.index(f"<strong>{card.value}</strong>") < places[0]
        assert card.text in text
    for study in STUDIES:
        assert f"<h2>{study.TITLE}</h2><span>{study.QUESTION}</span>" in text
        assert all(f"<li>{sentence}</li>" in text for sentence in study.findings(made_run))
        for table in study.tables(made_run):
            assert f"<h3>{table.caption}</h3>" in text
            assert all(f">{cell}</td>" in text for line in table.lines for cell in line)
    assert text.count("<figure ") == 1 + sum(map(len, made_pictures.values()))
    assert text.count("Where these numbers are from") == text.count("<table>")
    assert "fa3 gave a reason (- in" in text


def test_every_tag_is_closed_and_every_row_is_whole(page):
    """Every tag that opens is closed, and a row has a cell for each name in the head."""
    text = page.read_text()
    for tag in TAGS.split():
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>") > 0
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        widths = {line.count("</td>") for line in re.findall(r"<tr><td.*?</tr>", table)}
        assert widths == {table.count("</th>")}


def test_page_needs_nothing_beside_it(page):
    """The page needs no file and no network, which its policy forbids; every link is internal."""
    text = re.sub(r'<script id="library".*?</script>', "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"https?://|@import|url\(|fetch\(", text)
    assert "Content-Security-Policy\" content=\"default-src 'none';" in text


def test_page_of_the_kept_runs_is_small(tmp_path):
    """The page of all runs that the repository keeps has at most two million bytes."""
    page = write(merge(kept(KEPT, "nvidia-h200")), tmp_path)
    assert page.stat().st_size <= 2_000_000


def test_pictures_are_kept_beside_the_page(page, made_pictures):
    """Each picture is beside the page as SVG, and the Markdown shows it."""
    markdown = (page.parent / "report.md").read_text()
    for name in ["answer", *(name for own in made_pictures.values() for name in own)]:
        assert (page.parent / f"{name}.svg").read_text().startswith("<svg")
        assert f"({name}.svg)" in markdown


def test_packed_data_are_the_records():
    """The data of a picture are CSV on the page; false and missing values are empty."""
    records = [{"panel": "a, b", "x": 1, "ours": True}, {"panel": "<c>", "y": 0.5, "ours": False}]
    text = packed({"data": {"values": records}})
    assert "<" not in text
    values = json.loads(text)["data"]["values"]
    assert values == 'panel,x,ours,y\n"a, b",1,True,\n<c>,,,0.5\n'


def test_nothing_from_a_run_is_markup(made_run, tmp_path):
    """Names, reasons, kernels and machines may hold any text: it is shown, and is never markup."""
    evil = '</script><script>alert(\'"&")</script>'
    kernels = [{"name": evil, "category": evil, "calls": 1, "seconds": 1.0}]
    facts = {"study": "profile", "name": evil, "status": "ok", "reason": None}
    row = facts | {"step": evil, "size": evil, "categories": {evil: 1.0}, "kernels": kernels}
    failed = {"study": "profile", "name": "b", "status": "failed", "reason": evil}
    accuracy = made_run.study("accuracy")[0] | {"impl": evil}
    rows = [row, failed, accuracy]
    run = replace(made_run, machine={"gpu": evil}, command=evil, name=evil, rows=rows)
    text = write(run, tmp_path).read_text()
    charts = text.count("<figure ")
    assert charts == 3
    assert text.count("<script") == text.count("</script>") == charts + 3  # setup, library, script
    assert text.count("&lt;script&gt;") > 8


def test_a_page_without_pictures_or_a_gpu(tmp_path):
    """Where nothing could be measured, on a machine without a GPU, the page says why."""
    bare = {"study": "flash", "name": "a", "status": "unsupported", "reason": "no luck"}
    text = write(Run(machine={"accelerator": "cpu-x"}, rows=[bare]), tmp_path).read_text()
    assert "<h1>flashattn on cpu-x</h1>" in text
    assert "<figure" not in text
    assert "<li>no luck (- in 1 case)</li>" in text


def asked(page, folder, width, *, dark):
    """Open the page in a frame of this width, click around, and return what it reports."""
    text = page.read_text()
    probed = text.replace("<style>", LISTEN + "<style>", 1).replace("</body>", ASK + "</body>", 1)
    (folder / "probe.html").write_text(probed)
    (folder / "frame.html").write_text(FRAME.format(width=width, height=HEIGHT))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    window = f"--window-size={max(width, 500)},{HEIGHT}"
    flags = [*FLAGS, scheme, window, f"--user-data-dir={folder}/user", "--dump-dom"]
    command = [BROWSER, *flags, f"file://{folder}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    assert said, f"the page said nothing: {done.stdout[-500:]}"
    return json.loads(unescape(said))


def numbers(cells):
    """Return the cells that begin with a number, as numbers, and how many others follow them."""
    found = [float(match[0]) for cell in cells if (match := re.match(r"[\d.]+", cell))]
    return found, cells[len(found) :]


@pytest.fixture(scope="module", params=[(1280, False), (PHONE, True)], ids=["wide", "phone"])
def said(page, tmp_path_factory, request):
    """Return what the page reports in a browser, on a light screen or on a dark phone."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed to open the page in")
    width, dark = request.param
    folder = tmp_path_factory.mktemp("browser")
    return asked(page, folder, width, dark=dark) | {"wanted": width, "dark": dark}


def test_page_fits_a_browser(said):
    """The page has no errors, does not scroll sideways, and shows its first number at once."""
    assert said["wrong"] == []
    assert said["width"] == said["wanted"]
    assert said["scroll"] <= said["room"]
    assert said["card"] <= said["height"] == HEIGHT
    assert said["closed"]["height"] < 6 * HEIGHT
    assert said["wide"] or said["wanted"] > PHONE  # tables scroll within themselves


def test_charts_are_drawn_when_they_are_seen(said):
    """One chart is drawn at first; those of a study when it is opened, also by a card's link."""
    assert said["closed"]["charts"] == 1
    assert said["linked"]
    assert len(said["charts"]) == said["figures"] > 10
    assert all(0 < width <= said["room"] for width in said["charts"])
    assert said["named"]


def test_points_tell_their_numbers_and_names_single_out(said):
    """A pointer shows the exact numbers of a point; a click on a name fades all other lines."""
    assert said["tip"] == "namesdpaN512TFLOP/s409.6kernelsdpams1.25fromrun 0002, 2026-11-21"
    assert {opacity or "1" for opacity in said["lines"]} == {"1"}
    faded = [opacity for opacity in said["picked"] if opacity == "0.08"]
    assert 0 < len(faded) < len(said["picked"])


def test_filters_show_what_was_measured(said):
    """One peer can be compared with; a choice that was not measured moves the other filters."""
    assert said["first"]["chosen"]["mask"] == "full"
    assert "1.25x" in said["first"]["texts"]  # over sdpa
    assert said["naive"]["chosen"] == said["first"]["chosen"] | {"peer": "naive"}
    assert "6.25x" in said["naive"]["texts"]
    assert "1.25x" not in said["naive"]["texts"]
    assert said["moved"]["chosen"] == said["naive"]["chosen"] | {
        "mask": "causal",
        "shape": "one head",
    }


def test_tables_sort_both_ways(said):
    """A click on a head sorts by number, the next reverses it; names sort by their numbers."""
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


def test_page_and_charts_follow_the_theme(said):
    """The background follows the system's theme, and chart labels have the text's colour."""
    assert said["ground"] == GROUNDS[said["dark"]]
    assert said["label"] == said["ink"]
