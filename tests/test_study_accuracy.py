"""The accuracy study: errors in ulps beside their budgets, and clauses in a word."""

from __future__ import annotations

import math

from flashattn.report.plot import colour
from flashattn.report.runs import Run
from flashattn.report.studies import accuracy


def error(largest=1.0, mean=0.1, bias=0.01, budgets=(2.0, 0.2)):
    """Return the error of one output."""
    found = {"max": largest, "mean": mean, "bias": bias}
    return found | dict(zip(("max_budget", "mean_budget"), budgets, strict=True))


def row(impl, dtype="bfloat16", head_dim=64, values="normal", **outputs):
    """Return the errors of an implementation."""
    name = f"{impl}-{dtype}-{head_dim}"
    facts = {"study": "accuracy", "name": name, "status": "ok", "part": "errors", "impl": impl}
    return facts | {"dtype": dtype, "head_dim": head_dim, "errors": {values: outputs}}


def contract(impl, **verdicts):
    """Return which clauses an implementation keeps."""
    facts = {"study": "accuracy", "name": impl, "status": "ok", "part": "contract", "impl": impl}
    said = {"keeps": None, "refuses": "No kernel", "breaks": "o: NaN", "crashes": "status -11"}
    clauses = {name: {"verdict": word, "said": said[word]} for name, word in verdicts.items()}
    return facts | {"clauses": clauses}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_errors_stand_in_a_table_for_each_dtype_and_head_dim():
    """Each output's cell has max, mean and bias; what was not returned is empty."""
    rows = [row("naive", o=error()), row("triton", o=error(0.5), lse=error())]
    first, second = accuracy.tables(run(*rows, row("triton", head_dim=128, o=error())))
    assert first.caption.startswith("bf16, D = 64: max / mean / bias in ulps")
    assert second.caption.startswith("bf16, D = 128")
    ours, naive = first.lines  # ours first
    assert ours == ["normal", "triton", "0.5 / 0.1 / 0.01", "1 / 0.1 / 0.01", "", "", ""]
    assert naive[1:4] == ["naive", "1 / 0.1 / 0.01", ""]


def test_what_is_above_its_budget_is_marked():
    """A mark stands behind an error above its own budget, and behind no other."""
    rows = [row("a", o=error(2.1, 0.2), dq=error(2.0, 0.21), dk=error(9.0, budgets=(None, None)))]
    (table,) = accuracy.tables(run(*rows, row("b", o=error(math.inf, math.inf, None))))
    assert table.lines[0][2:6] == ["2.1! / 0.2 / 0.01", "", "2 / 0.21! / 0.01", "9 / 0.1 / 0.01"]
    assert table.lines[1][2] == "inf! / inf! / "


def test_clauses_are_words():
    """A clause is kept, broken, refused or a crash; what was said of those not kept is told."""
    rows = [contract("triton", a="keeps", b="keeps"), contract("sdpa", a="breaks", b="refuses")]
    words, reasons = accuracy.tables(run(*rows, contract("flex", a="crashes", c="keeps")))
    assert words.header == ["clause", "triton", "flex", "sdpa"]
    assert words.lines == [
        ["a", "yes", "CRASH", "NO"],
        ["b", "yes", "", "-"],
        ["c", "", "yes", ""],
    ]
    assert [line[:3] for line in reasons.lines] == [
        ["flex", "a", "crashes"],
        ["sdpa", "a", "breaks"],
        ["sdpa", "b", "refuses"],
    ]
    assert reasons.lines[1][3] == "o: NaN"
    assert accuracy.findings(run(*rows)) == [
        "triton keeps 2 of 2 clauses of the contract and breaks none.",
        "sdpa keeps 0 of 2 clauses of the contract and breaks a.",
    ]


def test_findings_name_the_worst():
    """Of each implementation the errors above a budget are counted and the worst is named."""
    rows = [row("triton", o=error(1.0, 0.3), dq=error(1.5)), row("triton", "float32", dq=error(3))]
    (said,) = accuracy.findings(run(*rows))
    assert said == (
        "triton is above its budget in 2 of 6 errors; "
        "its max errors reach 1.5 of the budget (dq, fp32, D = 64, normal) and "
        "its mean errors reach 1.5 of the budget (o, bf16, D = 64, normal)."
    )


def test_a_budget_of_nothing_allows_nothing():
    """Where the exact result is without error, any error is above the budget and none is not."""
    rows = [row("a", o=error(0.0, 0.1, budgets=(0.0, 0.0)))]
    (said,) = accuracy.findings(run(*rows))
    assert said.startswith("a is above its budget in 1 of 2 errors; its max errors reach 0 of")


def test_picture_has_budgets_across_and_a_colour_each():
    """A panel has a dot and a ring for each error, and two lines across each output."""
    rows = [row("triton", o=error(0.5), dv=error(4.0)), row("naive", o=error())]
    drawn = accuracy.pictures(run(*rows, row("naive", "float32", o=error(), values="huge_v")))
    assert set(drawn) == {"accuracy-normal", "accuracy-huge-v"}
    (axis,) = drawn["accuracy-normal"].axes
    assert axis.get_yscale() == "log"
    lines = {(line.get_label(), line.get_ydata()[0]) for line in axis.get_lines()}
    assert lines == {("budget of the max", 2.0), ("budget of the mean", 0.2)}
    dots = {(dot.get_label(), tuple(dot.get_offsets()[:, 1])) for dot in axis.collections[::2]}
    assert dots == {("triton", (0.5, 4.0)), ("naive", (1.0,))}
    assert [tuple(dot.get_edgecolor()[0]) for dot in axis.collections[::2]] == [
        (*(int(colour(name)[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
        for name in ("triton", "naive")
    ]


def test_what_a_logarithm_cannot_show_is_left_out():
    """An error of nothing or without end has no dot; the picture is drawn nevertheless."""
    rows = [row("triton", o=error(0.0, math.inf), dq=error())]
    (figure,) = accuracy.pictures(run(*rows)).values()
    heights = [tuple(dot.get_offsets()[:, 1]) for dot in figure.axes[0].collections]
    assert heights == [(1.0,), (0.1,)]


def test_the_contract_is_drawn_as_it_is_told():
    """Each verdict has a field with the word of the table, in its row and its column."""
    rows = [contract("triton", a="keeps", b="keeps"), contract("sdpa", a="breaks", b="refuses")]
    (name, figure), *others = accuracy.pictures(run(*rows)).items()
    assert (name, others) == ("accuracy-contract", [])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["triton", "sdpa"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    told = {text.get_position(): text.get_text() for text in axis.texts}
    assert told == {(0, 0): "yes", (1, 0): "NO", (0, 1): "yes", (1, 1): "-"}
