"""Numbers as people read them: three digits, milliseconds, GiB, TFLOP/s."""

from __future__ import annotations

from typing import Any

from flashattn.report.runs import Row

KIBI, MEBI, GIBI = 2.0**10, 2.0**20, 2.0**30
TERA = 1e12
MARKS = {"unsupported": "-", "oom": "OOM", "failed": "FAILED"}  # in place of a number
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
MASKS = {False: "full", "top_left": "causal", "bottom_right": "causal, bottom-right"}
# The kind of product whose roof a precision meets.
ROOFS = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


def word(fact: str, value: Any) -> str:
    """Return a fact's value in a word: bf16, causal, compiled; nothing for None."""
    if value is None:
        return ""
    if fact == "compiled":
        return "compiled" if value else "eager"
    if fact == "causal":
        return MASKS.get(value, str(value))
    return SHORT.get(value, str(value)) if isinstance(value, str) else str(value)


def digits(value: float | None) -> str:
    """Return three digits, more if they stand before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def ms(seconds: float | None) -> str:
    """Return milliseconds."""
    return digits(None if seconds is None else seconds * 1e3)


def microseconds(seconds: float | None) -> str:
    """Return microseconds."""
    return digits(None if seconds is None else seconds * 1e6)


def gib(count: float | None) -> str:
    """Return bytes as GiB."""
    return digits(None if count is None else count / GIBI)


def mib(count: float | None) -> str:
    """Return bytes as MiB."""
    return digits(None if count is None else count / MEBI)


def binary(count: float) -> str:
    """Return bytes in the largest unit that leaves a digit before the point, and the unit."""
    unit, name = next(
        (
            (unit, name)
            for unit, name in ((GIBI, "GiB"), (MEBI, "MiB"), (KIBI, "KiB"))
            if count >= unit
        ),
        (1.0, "B"),
    )
    return f"{digits(count / unit)} {name}"


def tera(per_second: float | None) -> str:
    """Return flops per second as TFLOP/s, bytes per second as TB/s."""
    return digits(None if per_second is None else per_second / TERA)


def percent(share: float | None) -> str:
    """Return a share as whole percents, with a digit more below ten."""
    if share is None:
        return ""
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"  # noqa: PLR2004 - two digits


def times(ratio: float | None) -> str:
    """Return a ratio with its sign behind it."""
    if ratio is None:
        return ""
    decimals = 2 if ratio < 10 else 1 if ratio < 100 else 0  # noqa: PLR2004 - three digits
    return f"{ratio:.{decimals}f}x"


def spread(row: Row) -> str:
    """Return mean ± standard deviation in ms, if the row has them."""
    if row.get("mean") is None or row.get("std") is None:
        return ""
    return f"{ms(row['mean'])} ± {ms(row['std'])}"


def seconds_or_mark(row: Row | None) -> str:
    """Return the median in ms, or the mark that says why there is none; nothing for no row."""
    if row is None:
        return ""
    return MARKS[row["status"]] if row["status"] != "ok" else ms(row.get("seconds"))
