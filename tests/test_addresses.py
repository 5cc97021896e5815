"""Addresses of products: what the analysis of SASS sees, and what it refuses."""

from __future__ import annotations

from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest

from flashattn.counts import compiled
from flashattn.counts.addresses import findings, read
from flashattn.counts.resources import Resources
from flashattn.counts.variants import variants
from flashattn.kernels.hopper.offline import variants as hopper_variants

BOTH = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"  # A at UR4 and UR5, B at UR6 and UR7
ONE = "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4].tnspB, R88, gsb0"  # A in registers
A = ["UMOV UR4, UR20", "UMOV UR5, 0x40000040"]
B = ["UMOV UR6, UR21", "UMOV UR7, 0x40000040"]


def code(*lines):
    """Return lines as nvdisasm prints them; those that end in a colon are labels."""
    at, printed = 0, []
    for line in lines:
        if not line.endswith(":"):
            line, at = f"        /*{at:04x}*/                   {line} ;", at + 16  # noqa: PLW2901
        printed.append(line)
    return "\n".join([".text.some_kernel:", *printed])


def found(*lines):
    """Return a kernel's findings: the register, and the operations of its sources."""
    return [
        (x.register, tuple(source and source.text for source in x.sources))
        for x in findings(code(*lines))
    ]


LOOP = ("IADD3 R2, R2, 0x1, RZ", "@P0 BRA `(.L_x_1)", "EXIT")
BEFORE = (*A, *B, ".L_x_1:", BOTH, *LOOP)
WITHIN = (*A, *B, ".L_x_1:", "UIADD3 UR4, UR20, 0x2, URZ", *B, BOTH, *LOOP)
ONLY_WITHIN = (".L_x_1:", *A, *B, BOTH, *LOOP)
GUARDED = (*A, *B, "@!P1 BRA `(.L_x_2)", ".L_x_1:", BOTH, *LOOP[:2], ".L_x_2:", "EXIT")
REPLACED = (*A, *B, BOTH, *A, BOTH, "EXIT")
APART = ("@P0 BRA `(.L_x_1)", *A, *B, BOTH, "EXIT", ".L_x_1:", *A, *B, BOTH, "EXIT")


KEPT = [line for line in WITHIN if "UIADD3" not in line]
LATE = [*KEPT[:-3], "UIADD3 UR4, UR4, 0x2, URZ", *KEPT[-3:]]
START, MAYBE, PAIR = (*A, *B), "@!UP0 UIADD3 UR6, UR21, 0x2, URZ", "UIADD3.64 UR6, UR20, 0x2, URZ"
SKIP, BACK, TWICE = "@P0 BRA `(.L_x_1)", ("R2UR UR6, R2", "R2UR UR7, R3"), "@P1 BRA `(.L_x_1)"
TABLE = 'BRX R4 -0x1b0 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
END = (".L_x_1:", BOTH, "EXIT")


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # What was computed once before a loop, or anew in each step, is one source.
        *((lines, []) for lines in (BEFORE, ONLY_WITHIN, GUARDED, REPLACED, APART)),
        # What each step computes hides what was there before the loop, of that register.
        (WITHIN, []),
        (KEPT, []),
        (LATE, [(4, ("UMOV UR4, UR20", "UIADD3 UR4, UR4, 0x2, URZ"))]),
        # Where a way from the start writes nothing, that is a source too.
        ((*A, SKIP, *B, *END), [(6, (None, B[0])), (7, (None, B[1]))]),
        ((*A, BOTH, "EXIT"), [(6, (None,)), (7, (None,))]),
        # What may not happen is a source, and so is what was there before.
        ((*START, MAYBE, BOTH, "EXIT"), [(6, (B[0], MAYBE))]),
        # A pair that is computed before a loop that may be left out counts for both registers.
        ((*START, SKIP, PAIR, *END), [(6, (B[0], PAIR)), (7, (B[1], PAIR))]),
        ((*START, PAIR, BOTH, "EXIT"), []),
        # What comes back from a vector register is no source, but hides what was there.
        ((*START, "@P0 R2UR UR6, R2", BOTH, "EXIT"), []),
        ((*START, SKIP, *BACK, *END), []),
        ((*A, *BACK, BOTH, "EXIT"), []),
        ((*START, SKIP, *B, TWICE, *END), [(6, (B[0], B[0])), (7, (B[1], B[1]))]),
        ((*START, SKIP, *B, TWICE, ".L_x_1:", *BACK, BOTH, "EXIT"), []),
        # An indirect branch goes to each label of its table, and nowhere else.
        ((*START, TABLE, *START, ".L_x_1:", "NOP", ".L_x_2:", BOTH, "EXIT"), []),
        (
            (*START, TABLE, ".L_x_1:", *B, ".L_x_2:", BOTH, "EXIT"),
            [(6, (B[0], B[0])), (7, (B[1], B[1]))],
        ),
    ],
)
def test_sources_of_a_product(lines, wanted):
    """A product's address is right if one operation alone may have computed it."""
    assert found(*lines) == wanted


STALE = (
    "UMOV UR5, 0x40000040",
    *B,
    "ULDC UR4, c[0x0][0x538]",  # something else
    "@P2 BRA `(.L_x_2)",
    "UIADD3 UR4, UR20, 0x2, URZ",  # before the first loop
    ".L_x_1:",
    BOTH,
    "@P0 BRA `(.L_x_1)",
    ".L_x_2:",
    BOTH,
    "@P1 BRA `(.L_x_2)",
    "EXIT",
)


def test_before_a_loop_that_is_left_out():
    """The bug: the second loop is reached without what was computed before the first."""
    (finding,) = findings(code(*STALE))
    assert str(finding) == (
        f"[0080 {BOTH}] reads in UR4 what is of "
        "[0030 ULDC UR4, c[0x0][0x538]] or [0050 UIADD3 UR4, UR20, 0x2, URZ]"
    )
    assert found(*(line for line in STALE if "P2" not in line)) == []


def test_nobody_wrote_before_a_loop():
    """The first step of a loop reads what nobody wrote."""
    assert found(".L_x_1:", BOTH, *START, "BRA `(.L_x_1)")[0] == (4, (None, A[0]))


def test_which_registers_a_product_reads():
    """Of numbers in registers the first two have no address; the other two do."""
    twice = [*A, *B, "@P0 BRA `(.L_x_1)", *A, *B, ".L_x_1:"]
    assert [register for register, _ in found(*twice, BOTH, "EXIT")] == [4, 5, 6, 7]
    assert [register for register, _ in found(*twice, ONE, "EXIT")] == [6, 7]
    first = BOTH.removesuffix("R24") + "RZ, !UPT"
    assert [register for register, _ in found(*twice, first, "EXIT")] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("UMOV UR4, UR20", [4]),
        ("UIADD3.64 UR4, UR20, 0x2, URZ", [4, 5]),
        ("UIADD3 UR4, UP0, UR20, 0x2, URZ", [4]),  # with a carry
        ("UIADD3.X UR5, UR21, URZ, URZ, UP0, !UPT", [5]),
        ("UIMAD.WIDE.U32 UR4, UR20, UR21, URZ", [4, 5]),
        ("ULDC.64 UR4, c[0x0][0x208]", [4, 5]),
        ("USHF.R.U64 UR4, UR20, 0x4, UR21", [4]),  # the lower half of a shifted pair
        ("@!UP3 USEL UR4, UR6, 0x1, !UP0", [4]),
        ("R2UR UR4, R2", [4]),
        ("R2UR.OR P0, UR4, R2", [4]),
        ("S2UR UR4, SR_CgaCtaId", [4]),
        ("VOTEU.ANY UR4, UPT, PT", [4]),
        ("REDUX.SUM UR4, R2", [4]),
        ("ELECT P1, UR4, PT", [4]),
        ("UISETP.GE.AND UP0, UPT, UR4, URZ, UPT", []),
        ("ISETP.GE.AND P0, PT, R2, UR4, PT", []),
        ("IMAD.U32 R3, RZ, RZ, UR4", []),
        ("UTMALDG.4D [UR4], [UR6], desc[UR8]", []),
        ("SYNCS.EXCH.64 URZ, [UR4+0x8], UR6", []),
        ("UR2UP PR, UR4, 0x7f", []),
        ("NOP", []),
    ],
)
def test_what_is_written(line, registers):
    """Results stand first, or behind a predicate; some are two registers wide."""
    (instruction, _), _ = read(code(line, "EXIT"))
    assert list(instruction.writes) == registers


@pytest.mark.parametrize(
    ("jump", "behind"),
    [
        ("EXIT", False),
        ("@P0 EXIT", True),
        ("BRA `(.L_x_1)", False),
        ("@!UP0 BRA `(.L_x_1)", True),
        ("BRA.U UP0, `(.L_x_1)", True),
        ("BRA.DIV UR8, `(.L_x_1)", True),
        ("BSSY B0, `(.L_x_1)", True),
        ("WARPSYNC.ALL", True),
    ],
)
def test_what_comes_next(jump, behind):
    """What goes on only elsewhere does not reach the next line; what may stay does."""
    _, before = read(code(jump, "NOP", ".L_x_1:", "EXIT"))
    assert before[1] == [0] * behind
    assert (0 in before[2]) == ("BRA" in jump)


@pytest.mark.parametrize(
    "line",
    [
        "CALL.REL.NOINC `(.L_x_1)",
        "RET.REL.NODEC R2 `(some_kernel)",
        "BRX R4 -0x1b0",  # nobody has said where to
        "JMP 0x80",
        "BSYNC B0",  # in front of no label
        "IADD UR4, R2, R3",  # does it write UR4, or is it of those that read it?
        "HGMMA.64x128x16.F32.BF16 R24, UR4, R24",  # no address is seen
        "?",
    ],
)
def test_what_nobody_knows_is_refused(line):
    """An instruction that might go or write anywhere is an error, never a pass."""
    with pytest.raises(ValueError, match="wanted"):
        findings(code(*A, *B, BOTH, line, "NOP", ".L_x_1:", "EXIT"))


def test_no_products_prove_nothing():
    """Code in which no product is found is an error."""
    for nothing in ("", code(*A, "EXIT")):
        with pytest.raises(ValueError, match="wanted products, got none"):
            findings(nothing)


# Of flashattn_hopper_fwd at D = 64, 128 x 128, four slots, as ptxas of Triton 3.6 made it of a
# source that computed a tile's address once a tile: all that writes UR16 to UR19, one product, and
# where its warpgroup goes but for waits. The GPU's numbers were wrong.
REAL = """
.L_x_0:
        /*a330*/              @!P0 BRA `(.L_x_0) ;
        /*a4f0*/             @!UP0 UIADD3 UR16, -UR4, 0x100000, URZ ;
        /*a500*/             @!UP0 USHF.L.U32 UR17, UR16, 0xb, URZ ;
        /*a510*/             @!UP0 USHF.L.U32 UR16, UR16, 0x1, URZ ;
        /*a520*/             @!UP0 UIADD3 UR18, -UR4, 0x100000, URZ ;
        /*a530*/             @!UP0 USHF.L.U32 UR19, UR18, 0xb, URZ ;
        /*a540*/             @!UP0 USHF.L.U32 UR18, UR18, 0x1, URZ ;
        /*af30*/                   UIADD3.64 UR16, UR4, 0x2, URZ ;
        /*af50*/                   UMOV UR18, UR8 ;
        /*af60*/                   UMOV UR19, UR9 ;
        /*b010*/               @P0 BRA `(.L_x_34) ;
.L_x_47:
        /*dee0*/               @P2 BRA `(.L_x_35) ;
        /*def0*/                   UIADD3 UR16, UP0, UR36, 0x2, URZ ;
        /*df40*/                   UIADD3.X UR17, UR6, 0x40000040, URZ, UP0, !UPT ;
.L_x_38:
        /*e230*/                   UIADD3 UR18, UP0, UR34, 0x2, URZ ;
        /*e250*/                   UIADD3.X UR19, UR6, 0x40000040, URZ, UP0, !UPT ;
        /*e2b0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*e650*/                   UIADD3.64 UR18, UR10, 0x80, URZ ;
        /*e680*/                   UIADD3.64 UR18, UR10, 0x100, URZ ;
        /*e6a0*/                   UIADD3.64 UR18, UR10, 0x180, URZ ;
        /*e6c0*/                   UIADD3.64 UR18, UR10, 0x200, URZ ;
        /*e6e0*/                   UIADD3.64 UR18, UR10, 0x280, URZ ;
        /*10410*/              @P2 BRA `(.L_x_38) ;
.L_x_35:
        /*10610*/              @P2 BRA `(.L_x_39) ;
        /*106a0*/                  BRA `(.L_x_40) ;
.L_x_39:
.L_x_43:
        /*10880*/                  UIADD3 UR18, UP0, UR38, 0x2, URZ ;
        /*108a0*/                  UIADD3.X UR19, UR7, 0x40000040, URZ, UP0, !UPT ;
        /*10900*/                  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*10910*/                  USHF.R.U32.HI UR19, URZ, 0x2, UR7 ;
        /*10920*/                  USHF.R.S32.HI UR18, URZ, 0x2, UR7 ;
        /*12400*/              @P2 BRA `(.L_x_43) ;
.L_x_40:
        /*125d0*/                  UMOV UR18, UR8 ;
        /*12790*/                  UMOV UR19, UR9 ;
        /*13760*/             @!P2 BRA `(.L_x_47) ;
.L_x_34:
        /*13850*/                  EXIT ;
"""


def test_what_an_assembler_did():
    """A real kernel: its second loop reads what is computed before the first, or something else."""
    low, high = map(str, findings(REAL))
    product = "[10900 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24]"
    pair = "[af30 UIADD3.64 UR16, UR4, 0x2, URZ]"
    assert low == (
        f"{product} reads in UR16 what is of {pair} or [def0 UIADD3 UR16, UP0, UR36, 0x2, URZ]"
    )
    assert high.startswith(f"{product} reads in UR17 what is of {pair} or [df40 UIADD3.X UR17, ")
    skips = "        /*dee0*/               @P2 BRA `(.L_x_35) ;\n"
    assert REAL.count(skips) == 1
    assert findings(REAL.replace(skips, "")) == []


@pytest.fixture
def complaint(monkeypatch):
    """Return a function: of what the counts complain where nvdisasm prints this, or fails."""

    def of(sass, variant=hopper_variants()[0], product="wgmma m64n128k16 bf16"):  # noqa: B008
        def printed(_):
            if isinstance(sass, Exception):
                raise sass
            return sass

        resources = Resources(168, 0, 1024, 1024, {product: 1})
        kernel = SimpleNamespace(asm={"ttgir": ""})
        monkeypatch.setattr(compiled, "compiled_kernel", lambda _: kernel)
        monkeypatch.setattr(compiled, "resources_of", lambda _: resources)
        monkeypatch.setattr(compiled, "sass_of", printed)
        row, said = compiled._compile(variant)
        assert row["registers"] == 168  # counted in any case
        return said

    return of


def test_the_counts_complain(complaint):
    """A variant that breaks the law fails the counts, whatever is expected; others do not."""
    said = complaint(REAL)
    assert said.startswith("addresses of products may be stale, 2: [10900 HGMMA.64x128x16")
    assert complaint(code(*BEFORE)) is None
    assert complaint(REAL, variants()[0]) is None  # the portable ones are not asked
    assert complaint("", product="none") is None  # nor is what multiplies nothing


@pytest.mark.parametrize(
    "failure", ["", FileNotFoundError("no nvdisasm"), CalledProcessError(1, "nvdisasm")], ids=repr
)
def test_what_cannot_be_read_fails(complaint, failure):
    """Without code to look at, nothing is proven of a variant, and that is said."""
    assert complaint(failure).startswith("addresses of products are UNPROVEN: ")
