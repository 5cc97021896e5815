"""Left operands in vector registers: what the analysis of SASS sees."""

from __future__ import annotations

import pytest

from flashattn.counts.operands import findings

KEPT = [f"LDS R{i}, [R2]" for i in range(120, 124)]
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR4], RZ, !UPT, gsb0"
LOOP = (".L_x_1:", PRODUCT, "@P0 BRA `(.L_x_1)", "EXIT")
OTHER = "F2FP.BF16.F32.PACK_AB R121, R37, R36"


def code(*lines):
    """Return lines as nvdisasm prints them, numbered; those that end in a colon are labels."""
    return "\n".join(x if x.endswith(":") else f"/*{i:04}*/ {x} ;" for i, x in enumerate(lines))


def in_loop(line):
    """Return a loop whose product reads what was loaded before it, and that ends with a line."""
    return (*KEPT, *LOOP[:2], line, *LOOP[2:])


@pytest.mark.parametrize(
    "lines",
    [
        (*KEPT, *LOOP),
        (".L_x_1:", *KEPT, *LOOP[1:]),
        (*KEPT, PRODUCT, *KEPT, PRODUCT, "EXIT"),
        ("LDSM.16.M88.4 R120, [R36+UR24]", *LOOP),
        ("LDS.128 R120, [R17+UR16]", *LOOP),
        in_loop("STS.128 [R17], R120"),
        in_loop("LDS.128 R116, [R17]"),
        in_loop("ISETP.GT.AND P6, PT, R121, R14, PT"),
        in_loop("HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56, gsb0"),
    ],
)
def test_what_was_put_there(lines):
    """An operand that is kept, or loaded anew in each step, has one source."""
    assert findings(code(*lines)) == []


def test_overwritten_in_a_loop():
    """The bug: from the second step on a product reads what the first has put elsewhere."""
    (said,) = findings(code(*in_loop(OTHER)))
    assert said == (f"[0005 {PRODUCT}] reads in R121 what is of [0001 {KEPT[1]}] or [0006 {OTHER}]")


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("LDS.128 R120, [R17]", [120, 121, 122, 123]),
        ("LDS.64 R122, [R17]", [122, 123]),
        ("LDSM.16.M88.2 R120, [R36]", [120, 121]),
        ("IMAD.WIDE R120, R2, R3, R4", [120, 121]),
        ("@P1 MOV R123, R2", [123]),
        ("HGMMA.64x64x16.F32.BF16 R92, gdesc[UR8], R92, gsb0", [120, 121, 122, 123]),
        ("HGMMA.64x56x16.F32.BF16 R94, gdesc[UR8], R94, gsb0", [120, 121]),
    ],
)
def test_how_much_is_overwritten(line, registers):
    """An instruction writes as many registers as its kind says."""
    said = findings(code(*in_loop(line)))
    assert [x.partition("reads in ")[2].split()[0] for x in said] == [f"R{i}" for i in registers]


def test_nobody_wrote():
    """What nobody wrote is a source, too."""
    (said,) = findings(code("@P0 BRA `(.L_x_1)", *KEPT[:1], ".L_x_1:", *LOOP[1:2], "EXIT"))[:1]
    assert " nothing or [0001 " in said
