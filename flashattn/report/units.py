"""Format numbers (three digits, in ms, GiB, TFLOP/s) and facts (bf16, causal)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flashattn.report.runs import Row

Unit = Callable[[Any], str]  # formats a fact, which may be None
KIBI, MEBI, GIBI, TERA = 2.0**10, 2.0**20, 2.0**30, 1e12
MARKS = {"unsupported": "-", "oom": "OOM", "failed": "FAILED"}  # instead of a number
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
MASKS = {False: "full", "top_left": "causal", "bottom_right": "causal, bottom-right"}
ROOFS = {short: kind for kind, short in SHORT.items()}  # the kind of roof for each precision
UNSTEADY = 0.25  # largest interquartile range of a steady row, relative to the median
# Why a share of a roof exceeds 100%: reasons for our fp32 kernels, and for all others.
NOT_BOUND = "our kernels compute fp32 as bf16 products, which the fp32 roof does not bound"
TOO_LOW = "the roof was measured too low"
# Meaning of the marks behind numbers.
NOTES = {
    "%*": f"* more than the roof: {NOT_BOUND}; elsewhere {TOO_LOW}",
    " ~": f"~ the quartiles are further apart than {UNSTEADY:.0%} of the median",
    " +": "+ the peer was measured in another run",
}


def word(fact: str, value: Any) -> str:
    """Return the value of a fact in a word, such as bf16, causal or compiled; "" for None."""
    if value is None:
        return ""
    if fact == "problem":
        return re.sub(r"-docs[^-]*\+[^-]*", _documents, value)
    if fact == "compiled":
        return "compiled" if value else "eager"
    if fact == "packed":
        return "packed documents" if value else "one document"
    if fact == "causal":
        return MASKS.get(value, str(value))
    return SHORT.get(value, str(value)) if isinstance(value, str) else str(value)


def _documents(found: re.Match[str]) -> str:
    """Shorten the documents in a problem's name to their number if there are over four lengths."""
    said = found[0].removeprefix("-docs").split("+")
    if len(said) <= 4:  # noqa: PLR2004 - as many as are read at a glance
        return found[0]
    counts = [int(x.partition("of")[0]) if "of" in x else 1 for x in said]
    return f"-{sum(counts)}docs"


def digits(value: float | None) -> str:
    """Return three significant digits, or all digits of a larger integer part; "" for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _in(unit: float) -> Unit:
    return lambda value: digits(None if value is None else value / unit)


ms, microseconds, mib, gib, tera = map(_in, (1e-3, 1e-6, MEBI, GIBI, TERA))


def binary(count: float) -> str:
    """Return bytes in the largest binary unit not above them."""
    units = {GIBI: "GiB", MEBI: "MiB", KIBI: "KiB", 1.0: "B"}
    unit = next((unit for unit in units if count >= unit), 1.0)
    return f"{digits(count / unit)} {units[unit]}"


def percent(share: float | None) -> str:
    """Return a share in percent, with one decimal below 10%."""
    if share is None:
        return ""
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"  # noqa: PLR2004 - two digits


def of_roof(share: float | None) -> str:
    """Return a share of a roof in percent, marked if above 100% (see ``NOTES``)."""
    return percent(share) + "*" * (share is not None and share > 1)


def times(ratio: float | None) -> str:
    """Return a ratio with three digits and an x."""
    if ratio is None:
        return ""
    decimals = 2 if ratio < 10 else 1 if ratio < 100 else 0  # noqa: PLR2004 - three digits
    return f"{ratio:.{decimals}f}x"


def spread(row: Row) -> str:
    """Return mean ± standard deviation in ms, or ""."""
    known = row.get("mean") is not None and row.get("std") is not None
    return f"{ms(row['mean'])} ± {ms(row['std'])}" if known else ""


def or_mark(row: Row | None, unit: Unit, fact: str = "seconds") -> str:
    """Return a fact of a row, or the mark of its status; "" for no row."""
    return "" if row is None else MARKS.get(row["status"], unit(row.get(fact)))
