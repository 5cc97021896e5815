"""FlashAttention compared with the alternatives."""

from __future__ import annotations

from functools import partial
from itertools import product

from flashattn.report import plot
from flashattn.report.rows import (
    KERNELS,
    NAIVE,
    OURS,
    best,
    by,
    exponent,
    gain,
    groups,
    in_words,
    known,
    ordered,
    reached,
    share,
    speed,
    steady,
    timed,
    values,
)
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cells, Table, filled
from flashattn.report.units import TERA, ms, of_roof, or_mark, tera, word

NAME = "flash"
TITLE = "FlashAttention"
QUESTION = "How fast are forward and backward, compared with the alternatives and with the roof?"
ONE_HEAD = "one_head"
FACTS = ("impl", "problem", "pass", "dtype", "head_dim", "seq_q", "flops")
SHAPE = ("dtype", "head_dim", "causal", "seq_q", "seq_kv", "problem")
Duel = tuple[Row, Row]  # a peer's row and ours, of one problem
WIDEST = 5  # most columns of panels that stay readable


def usable(run: Run) -> list[Row]:
    """Return the rows that have the facts of a case."""
    return known(run.study(NAME), *FACTS)


def tables(run: Run) -> list[Table]:
    """Return a table for each protocol and pass: a line per problem, a column per implementation.

    The protocol with one head has many lengths, so it has a table for each head dimension.
    """
    made = []
    for (protocol, name), rows in groups(usable(run), "protocol", "pass").items():
        parts = groups(rows, "head_dim").values() if protocol == ONE_HEAD else [rows]
        made += [_table(run, protocol, name, part) for part in parts if timed(part)]
    return filled(*made)


def _table(run: Run, protocol: str | None, name: str, rows: list[Row]) -> Table:
    where, unit = f"{name}, {sizes(rows)}", "TFLOP/s (share of the dtype's roof), no masked work"
    if protocol == ONE_HEAD:
        where, unit = f"{where}, D = {rows[0]['head_dim']}", "ms"

    def cell(impl: str, cases: list[Row]) -> str:
        row = by(cases, "impl").get(impl)
        if row is None or row["status"] != "ok":
            return or_mark(row, ms)
        unsteady = "" if steady(row) else " ~"
        if protocol == ONE_HEAD:
            return ms(row["seconds"]) + unsteady
        part = of_roof(share(run, row, row["dtype"]))
        return tera(speed(row)) + (f" ({part})" if part else "") + unsteady

    columns: dict[str, Cells] = {"problem": lambda cases: str(cases[0]["problem"])}
    columns |= {impl: partial(cell, impl) for impl in values(timed(rows), "impl")}
    columns["ours / best peer"] = _ratio
    return Table.of(f"{where}: {unit}", rows, columns, groups(rows, *SHAPE).values())


def sizes(rows: list[Row]) -> str:
    """Return what all problems share: one head, or the number of tokens and the hidden size."""
    rows = known(rows, "batch", "heads")
    batches = {row["batch"] for row in rows}
    if len(batches) == 1 and all(row["heads"] == 1 for row in rows):
        return "one head" if batches == {1} else f"one head, batch {batches.pop()}"
    tokens = {row["batch"] * row["seq_q"] for row in rows}
    hidden = {row["heads"] * row["head_dim"] for row in rows}
    if len(tokens) == 1:
        return f"{tokens.pop()} tokens" + (f", hidden {hidden.pop()}" if len(hidden) == 1 else "")
    return "many heads"


def duels(rows: list[Row]) -> list[Duel]:
    """Return the fastest peer and ours for each problem in which both have a time.

    Peers measured in the same run as ours take precedence over others.
    """
    found = []
    for cases in groups(rows, *SHAPE).values():
        ours = best(cases, ours=True)
        beside = [row for row in cases if ours and same_run(row, ours)]
        peer = best(beside, ours=False) or best(cases, ours=False)
        found += [(peer, ours)] if peer and ours else []
    return found


def same_run(a: Row, b: Row) -> bool:
    """Return whether two rows were measured in one run."""
    return a.get("run") is b.get("run")


def _ratio(cases: list[Row]) -> str:
    return "".join(
        f"{gain(peer, ours):.2f} x {peer['impl']}" + " +" * (not same_run(peer, ours))
        for peer, ours in duels(cases)
    )


def findings(run: Run) -> list[str]:
    """Return, for each protocol and pass, how often ours wins, its best speed and its growth."""
    said = []
    for (protocol, name), rows in groups(usable(run), "protocol", "pass").items():
        found = [*_wins(rows), *_best(run, rows)]
        if protocol == ONE_HEAD:
            found += [*_slower(rows), *_growth(rows)]
        said += [f"{name}, {sizes(rows)}: {sentence}." for sentence in found]
    return said


def _wins(rows: list[Row]) -> list[str]:
    found = duels(rows)
    quiet = [duel for duel in found if all(map(steady, duel))]
    said = [_wins_of(found)] if found else []
    if quiet and len(quiet) < len(found):
        said.append(f"where both medians are steady, {_wins_of(quiet)}")
    apart = sum(not same_run(*duel) for duel in found)
    if apart:
        said.append(f"in {apart} of {len(found)} problems the peer was measured in another run")
    return said


def _wins_of(found: list[Duel]) -> str:
    """Return how often, and by how much, ours is faster than the best peer."""
    ratios = {ours["problem"]: gain(peer, ours) or 0 for peer, ours in found}
    won = sum(ratio > 1 for ratio in ratios.values())
    first = f"ours is the fastest in {won} of {len(ratios)} problems"
    return f"{first}; its speed over the best peer's is {in_words(ratios)}"


def _slower(rows: list[Row]) -> list[str]:
    """Return how often, and up to which length, ours is slower than naive attention."""
    sides = [
        (by(timed(cases), "impl").get(NAIVE), best(cases, ours=True))
        for cases in groups(rows, *SHAPE).values()
    ]
    both = [(naive, ours) for naive, ours in sides if naive and ours]
    slower = [ours for naive, ours in both if ours["seconds"] > naive["seconds"]]
    if not both:
        return []
    if not slower:
        return [f"ours is never slower than {NAIVE}, in {len(both)} problems"]
    longest = f", at most {max(slower, key=lambda row: row['seq_q'])['problem']}"
    return [f"ours is slower than {NAIVE} in {len(slower)} of {len(both)} problems{longest}"]


def _best(run: Run, rows: list[Row]) -> list[str]:
    ours = [row for row in timed(rows) if row["impl"] in KERNELS]
    if not ours:
        return []
    top = max(ours, key=lambda row: speed(row) or 0)
    roof = reached(run, top, top["dtype"])
    return [f"ours reaches {tera(speed(top))} TFLOP/s ({top['problem']}){roof}"]


def _growth(rows: list[Row]) -> list[str]:
    """Return the growth of our time over the longer half of the lengths, beyond launch overhead."""
    said = []
    ours = (row for row in timed(rows) if row["impl"] == OURS)
    for (dtype, head_dim), cases in groups(ours, "dtype", "head_dim").items():
        counts = values(cases, "seq_q")
        half = counts[len(counts) // 2]
        long = [row for row in cases if row["seq_q"] >= half and steady(row)]
        e = exponent((row["seq_q"], row["seconds"]) for row in long)
        if e is not None:
            case = f"{word('dtype', dtype)} D = {head_dim}, from N = {values(long, 'seq_q')[0]}"
            said.append(f"N^{e:.2f} ({case})")
    return [f"{OURS}'s time grows as {', '.join(said)}"] if said else []


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot speed over length for a fixed number of tokens, and time over length for one head."""
    drawn, facts = {}, ("protocol", "dtype", "causal")
    for (protocol, dtype, causal), rows in groups(timed(usable(run)), *facts).items():
        if len(values(rows, "seq_q")) > 1:
            mask, slow = word("causal", causal), protocol == ONE_HEAD
            what = "time" if slow else "speed"
            title = f"{word('dtype', dtype)}, {mask}, {sizes(rows)}: {what}"
            stem = f"{NAME}-{protocol}-{dtype}-{mask}".replace("_", "-").replace(", ", "-")
            drawn[stem] = _picture(run, title, rows, slow=slow)
    return drawn


def _picture(run: Run, title: str, rows: list[Row], *, slow: bool) -> plot.Picture:
    """Plot a row of panels for each pass, with a column for each of the largest head dimensions."""
    passes, dims = values(rows, "pass"), values(rows, "head_dim")[-WIDEST:]
    records = []
    for name, head_dim in product(passes, dims):
        cases = [row for row in rows if (row["pass"], row["head_dim"]) == (name, head_dim)]
        panel = f"{'both' if '+' in name else name}, D = {head_dim}"
        if cases:
            records += _records(run, panel, cases, slow=slow)
        else:
            records.append({"panel": f"{panel}: not measured", "name": OURS, "kind": "gap"})
    x = plot.lengths(values(rows, "seq_q"))
    y = plot.quantity("y", "ms" if slow else "TFLOP/s", log=slow, zero=not slow)
    return plot.lines(title, records, x, y, columns=len(dims), least=130, tell=("problem",))


def _records(run: Run, panel: str, cases: list[Row], *, slow: bool) -> list[plot.Record]:
    """Return the points of a panel, and the ends of the line of its roof."""
    made: list[plot.Record] = [
        {"panel": panel, "name": row["impl"], "problem": row["problem"], "x": row["seq_q"]}
        | {"y": plot.exact(row["seconds"] * 1e3 if slow else (speed(row) or 0) / TERA)}
        | ({} if steady(row) else {"hollow": True})
        for row in ordered(cases, "seq_q")
    ]
    return made + ([] if slow else [{"panel": panel} | end for end in roof_line(run, cases)])


def roof_line(run: Run, cases: list[Row]) -> list[plot.Record]:
    """Return the ends of a line at the speed of a plain product, if it was measured."""
    dtype, counts = cases[0]["dtype"], values(cases, "seq_q")
    roof = run.roof(cases[0], dtype)
    line = {"name": "roof", "kind": "reference", "y": plot.exact((roof or 0) / TERA)}
    ends = ((counts[0], ""), (counts[-1], f"{word('dtype', dtype)} product, measured"))
    return [line | {"x": n, "label": said} for n, said in ends] if roof else []
