"""The top of the report: key numbers about our kernels, and a plot of their speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

from flashattn.report import plot
from flashattn.report.rows import (
    KERNELS,
    NAIVE,
    OWN,
    best,
    groups,
    known,
    label,
    place,
    speed,
    steady,
    timed,
    values,
)
from flashattn.report.runs import Row, Run
from flashattn.report.studies import accuracy, attention, flash, lm
from flashattn.report.units import TERA, ms, percent, times, word

ANSWER = "answer"  # name of the plot
OURS, EVERY = plot.BEST, "all peers"
FILTERS = {"pass": "Pass", "dtype": "dtype", "D": "D", "mask": "Mask", "shape": "Shape"}
MANY = 12  # most labels of the x axis
TOLD = ("kernel", "ms", "from")  # shown in the tooltip
NOTE = (
    f"Ours: the faster of {' and '.join(KERNELS)}. Numbers: its speed over that of the fastest "
    "peer shown; + if that peer was measured in another run."
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number about our kernels."""

    study: str  # the study with the details
    title: str  # what was measured
    value: str  # with its unit
    text: str  # what the value is compared with
    origin: str  # machine, run and date


def cards(run: Run) -> list[Card]:
    """Return the cards for which a run has rows, the most important first."""
    speeds = [card for name in ("forward", "backward") for card in _speed(run, name)]
    return [*speeds, *_step(run), *_right(run), *_held(run)]


def _origin(run: Run, rows: Iterable[Row]) -> str:
    """Return the machine, and the names and dates of the runs that measured these rows."""
    origins = [origin for origin, _ in run.origins(rows)]
    numbers = sorted({(each.name or "").rpartition("/")[2].partition("_")[0] for each in origins})
    dates = sorted({(each.made or "")[:10] for each in origins})
    named = f"run{'s' * (len(numbers) > 1)} {' and '.join(numbers)}" if all(numbers) else ""
    machine = run.machine.get("gpu") or run.accelerator
    return ", ".join(filter(None, (machine, named, " and ".join(dates))))


def _newest(run: Run, duels: list[flash.Duel]) -> list[flash.Duel]:
    """Return the duels of the newest run that measured both sides; older kernels do not count."""
    both = [duel for duel in duels if flash.same_run(*duel)]
    last = max(((run.origin(ours).made or "") for _, ours in both), default="")
    return [duel for duel in both if (run.origin(duel[1]).made or "") == last]


def _speed(run: Run, name: str) -> list[Card]:
    """Return our speed over the fastest peer's, for the setting with the most problems."""
    rows = [row for row in flash.usable(run) if row["pass"] == name]
    found = [_newest(run, flash.duels(own)) for own in groups(rows, "protocol", "dtype").values()]
    duels = max(found, key=len, default=[])
    if not duels:
        return []
    ours = [own for _, own in duels]
    ratios = [peer["seconds"] / own["seconds"] for peer, own in duels]
    peers = values([peer for peer, _ in duels], "impl")
    dims = values(ours, "head_dim")
    span = f"D = {dims[0]}" + (f" to {dims[-1]}" if len(dims) > 1 else "")
    won = sum(ratio > 1 for ratio in ratios)
    text = (
        f"the speed of the fastest peer ({', '.join(peers)}): "
        f"geometric mean of {len(duels)} problems, {times(min(ratios))} to {times(max(ratios))}; "
        f"faster in {won}. {word('dtype', ours[0]['dtype'])}, {flash.sizes(ours)}, {span}."
    )
    origin = _origin(run, [row for duel in duels for row in duel])
    title, value = f"{name.capitalize()} pass", times(geometric_mean(ratios))
    return [Card(study=flash.NAME, title=title, value=value, text=text, origin=origin)]


def _step(run: Run) -> list[Card]:
    """Return our fastest train step of the largest model, compared with the fastest peer's."""
    rows = [row for row in timed(lm.steps(run)) if row["step"] == "train"]
    for own in reversed(groups(rows, "size", "context", "batch").values()):
        ours, peer = best(own, ours=True), best(own, ours=False)
        if ours is None or peer is None:
            continue
        text = (
            f"{label(ours, *lm.SETTING)}; {times(peer['seconds'] / ours['seconds'])} the speed of "
            f"the fastest peer: {label(peer, *lm.SETTING)}, {ms(peer['seconds'])} ms "
            f"({label(ours, 'context', 'batch')})."
        )
        title, value = f"Train step, {ours['size']}", f"{ms(ours['seconds'])} ms"
        origin = _origin(run, [ours, peer])
        return [Card(study=lm.NAME, title=title, value=value, text=text, origin=origin)]
    return []


def _right(run: Run) -> list[Card]:
    """Return how many of our kernels' errors exceed their budget, and which clauses they keep."""
    rows = run.study(accuracy.NAME)
    judged = [row for row in accuracy.judged(rows) if row["impl"] in KERNELS]
    if not judged:
        return []
    above = sum(accuracy.share(row) > 1 for row in judged)
    kept = accuracy.kept(rows)
    peers = {impl: n for impl, (n, _) in kept.items() if impl not in (*OWN, "reference")}
    ours = [f"{impl} keeps {n} of {of}" for impl, (n, of) in kept.items() if impl in KERNELS]
    top = max(peers, key=peers.__getitem__, default=None)
    ours += [f"the best peer, {top}, {peers[top]}"] if ours and top else []
    contract = f" Clauses of the contract: {', '.join(ours)}." if ours else ""
    text = f"errors of {' and '.join(values(judged, 'impl'))} against fp64.{contract}"
    title, value = "Above the error budget", f"{above} of {len(judged)}"
    origin = _origin(run, judged)
    return [Card(study=accuracy.NAME, title=title, value=value, text=text, origin=origin)]


def _held(run: Run) -> list[Card]:
    """Return the memory held for backward at the longest length, relative to naive attention."""
    pairs = attention.against_naive(run).values()
    both = [pair for pair in pairs if len(known(pair, attention.HELD)) == len(pair)]
    if not both:
        return []
    naive, ours = both[-1]
    value = percent(ours[attention.HELD] / naive[attention.HELD])
    where = label(ours, "seq", *attention.SHAPE)
    text = f"of the bytes that {NAIVE} attention holds: {ours['impl']}, {where}."
    title, origin = "Memory for backward", _origin(run, [naive, ours])
    return [Card(study=attention.NAME, title=title, value=value, text=text, origin=origin)]


def explorer(run: Run) -> tuple[plot.Picture, dict[str, list[str]]] | None:
    """Return the plot of speed over length and the choices of its filters, or None without rows.

    The filters are parameters of the plot, which shows one choice at a time.
    """
    rows = timed(flash.usable(run))
    cases = [
        ({"shape": flash.sizes(shape), **_case(own[0])}, own)
        for shape in groups(rows, "protocol").values()
        for own in groups(shape, "pass", "dtype", "head_dim", "causal").values()
    ]
    records = [case | record for case, own in cases for record in _records(run, own)]
    if not any(record["name"] == OURS for record in records):
        return None
    alike = [own for case, own in cases if case["shape"] == cases[0][0]["shape"]]
    most = max(alike, key=lambda own: (len(values(own, "seq_q")), len(own), own[0]["head_dim"]))
    first = next(case for case, own in cases if own is most)
    chosen = {name: first[name] for name in FILTERS} | {"peer": EVERY}
    choices = {name: list(dict.fromkeys(case[name] for case, _ in cases)) for name in FILTERS}
    choices["D"].sort(key=int)
    choices["pass"].sort(key=lambda name: place("pass", name))
    peers = {record["name"] for record in records if not record.get("kind")} - {OURS}
    choices["peer"] = [EVERY, *sorted(peers, key=lambda name: place("impl", name))]
    x = plot.lengths(values(rows, "seq_q"), most=MANY)
    y = plot.quantity("y", "TFLOP/s", zero=True)
    title = "Speed of attention over the sequence length"
    made = plot.lines(title, records, x, y, tell=TOLD, height=320, note=NOTE)
    made["spec"]["layer"].append(_ratios(x, y))
    case = ", ".join(f"D = {value}" if name == "D" else value for name, value in first.items())
    made["title"]["text"] = f"{title}: {case}"  # for a file; the page shows the filters instead
    return made | _filtered(chosen), choices


def _filtered(chosen: dict[str, str]) -> plot.Picture:
    """Return the filters, and their parameters with initial values."""
    tests = [f"datum.{name} == {name}" for name in FILTERS]
    tests.append(f"datum.kind || datum.name == '{OURS}' || peer == '{EVERY}' || datum.name == peer")
    params = [{"name": name, "value": value} for name, value in chosen.items()]
    return {"params": params, "transform": [{"filter": test} for test in tests]}


def _case(row: Row) -> dict[str, str]:
    """Return the value of each filter for a row."""
    return {
        "pass": row["pass"],
        "dtype": word("dtype", row["dtype"]),
        "D": str(row["head_dim"]),
        "mask": word("causal", row.get("causal")),
    }


def _records(run: Run, rows: list[Row]) -> list[plot.Record]:
    """Return the points for one choice of filters: ours, the peers' and the roof."""
    made = list[plot.Record]()
    for problem in groups(rows, "seq_q", "problem").values():
        ours = best(problem, ours=True)
        peers = {row["impl"]: row for row in problem if row["impl"] not in OWN}
        for name, row in [*peers.items(), *([(OURS, ours)] if ours else [])]:
            point = {"panel": "", "name": name, "kernel": row["impl"], "x": row["seq_q"]}
            point |= {"y": plot.exact((speed(row) or 0) / TERA)}
            point |= {"ms": plot.exact(1e3 * row["seconds"])}
            point |= {"from": _origin(run, [row]).partition(", ")[2]}
            point |= {} if steady(row) else {"hollow": True}
            point |= {"apart": True} if ours and not flash.same_run(row, ours) else {}
            made.append(point)
    return [*made, *({"panel": ""} | end for end in flash.roof_line(run, rows))]


def _ratios(x: plot.Channel, y: plot.Channel) -> plot.Picture:
    """Return a layer of text: our speed over that of the fastest peer shown."""
    peer = f"datum.kind || datum.name == '{OURS}' ? null : "
    largest = [{"op": "max", "field": side, "as": side} for side in ("near", "far")]
    ratio = "format(datum.y / (datum.near || datum.far), '.2f') + (datum.near ? 'x' : 'x +')"
    steps = [
        {"calculate": f"{peer} datum.apart ? null : datum.y", "as": "near"},
        {"calculate": f"{peer} datum.apart ? datum.y : null", "as": "far"},
        {"joinaggregate": largest, "groupby": ["x"]},
        {"filter": f"datum.name == '{OURS}' && (datum.near || datum.far)"},
        {"calculate": ratio, "as": "ratio"},
    ]
    mark = plot.TEXT | {"dy": -13, "fontWeight": "bold", "fontSize": 12}
    return {"transform": steps} | plot.layer(mark, x=x, y=y, text={"field": "ratio"})
