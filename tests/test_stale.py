"""Operands of products on Hopper: what the analysis of SASS finds, and what it refuses."""

import re
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest

from flashattn.counts import compiled
from flashattn.counts.resources import Resources
from flashattn.counts.stale import read, stale_addresses, stale_operands
from flashattn.counts.variants import variants
from flashattn.kernels.hopper.offline import variants as hopper_variants

BOTH = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"  # A at UR4 and UR5, B at UR6 and UR7
ONE = "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4].tnspB, R88, gsb0"  # A in registers
A = ["UMOV UR4, UR20", "UMOV UR5, 0x40000040"]
B = ["UMOV UR6, UR21", "UMOV UR7, 0x40000040"]


def code(*lines):
    """Return lines as nvdisasm prints them, numbered; those that end in a colon are labels."""
    return "\n".join(
        x if x.endswith(":") else f"        /*{i:04}*/                   {x} ;"
        for i, x in enumerate([".text.some_kernel:", *lines])
    )


def found(*lines):
    """Return the registers of stale addresses, each with its sources."""
    said = [x.partition(" reads in UR")[2] for x in stale_addresses(code(*lines))]
    pairs = (x.split(" what is of ") for x in said)
    told = re.compile(r"\[\d+ (.*)\]")
    return [(int(n), [told.sub(r"\1", x) for x in of.split(" or ")]) for n, of in pairs]


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
END, NOBODY = (".L_x_1:", BOTH, "EXIT"), "nothing"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # An address computed once before a loop, or anew in each step, has one source.
        *((lines, []) for lines in (BEFORE, ONLY_WITHIN, GUARDED, REPLACED, APART)),
        # A value computed in each step hides the one in that register before the loop.
        (WITHIN, []),
        (KEPT, []),
        (LATE, [(4, ["UMOV UR4, UR20", "UIADD3 UR4, UR4, 0x2, URZ"])]),
        # A path from the start that writes nothing is a source, too.
        ((*A, SKIP, *B, *END), [(6, [NOBODY, B[0]]), (7, [NOBODY, B[1]])]),
        ((*A, BOTH, "EXIT"), [(6, [NOBODY]), (7, [NOBODY])]),
        ((END[0], BOTH, *START, SKIP), [(n, [NOBODY, x]) for n, x in enumerate(START, 4)]),
        # A predicated write is a source, and so is the value before it.
        ((*START, MAYBE, BOTH, "EXIT"), [(6, [B[0], MAYBE])]),
        # A pair that is computed before a loop that may be skipped counts for both registers.
        ((*START, SKIP, PAIR, *END), [(6, [B[0], PAIR]), (7, [B[1], PAIR])]),
        ((*START, PAIR, BOTH, "EXIT"), []),
        # A value from a vector register is no source, but hides the value before it.
        ((*START, "@P0 R2UR UR6, R2", BOTH, "EXIT"), []),
        ((*START, SKIP, *BACK, *END), []),
        ((*A, *BACK, BOTH, "EXIT"), []),
        ((*START, SKIP, *B, TWICE, *END), [(6, [B[0], B[0]]), (7, [B[1], B[1]])]),
        ((*START, SKIP, *B, TWICE, ".L_x_1:", *BACK, BOTH, "EXIT"), []),
        # An indirect branch goes to each label of its table, and nowhere else.
        ((*START, TABLE, *START, ".L_x_1:", "NOP", ".L_x_2:", BOTH, "EXIT"), []),
        (
            (*START, TABLE.replace("BRX R4", "BRXU UR6"), ".L_x_1:", *B, ".L_x_2:", BOTH, "EXIT"),
            [(6, [B[0], B[0]]), (7, [B[1], B[1]])],
        ),
        # With one operand in registers, the first two uniform registers hold no address.
        ((*START, SKIP, *START, ".L_x_1:", ONE, "EXIT"), [(6, [B[0]] * 2), (7, [B[1]] * 2)]),
        (
            (*START, SKIP, *START, ".L_x_1:", BOTH.removesuffix("R24") + "RZ, !UPT", "EXIT"),
            [(n, [x] * 2) for n, x in enumerate(START, 4)],
        ),
    ],
)
def test_sources_of_an_address(lines, wanted):
    """A product's address is right if only one instruction can have computed it."""
    assert found(*lines) == wanted


# What ptxas of Triton 3.6 made of flashattn_hopper_fwd, with wrong results on the GPU.
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
    ".L_x_3:",
    BOTH,
    "@P1 BRA `(.L_x_3)",
    "EXIT",
)


PUT = [f"LDS R{i}, [R2]" for i in range(120, 124)]
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR4], RZ, !UPT, gsb0"
STEPS = (".L_x_1:", PRODUCT, "@P0 BRA `(.L_x_1)", "EXIT")
OTHER = "F2FP.BF16.F32.PACK_AB R121, R37, R36"


@pytest.mark.parametrize(
    "lines",
    [
        (*PUT, *STEPS),
        (".L_x_1:", *PUT, *STEPS[1:]),
        (*PUT, PRODUCT, *PUT, PRODUCT, "EXIT"),
        ("LDSM.16.M88.4 R120, [R36+UR24]", *STEPS),
        ("LDS.128 R120, [R17+UR16]", *STEPS),
    ],
)
def test_operands_that_were_put_there(lines):
    """A left operand that is kept, or loaded anew in each step, has one source."""
    assert stale_operands(code(*lines)) == []


def test_operands_that_are_overwritten():
    """From the second step on, a product that reads an overwritten operand is found."""
    assert stale_operands(code(*PUT, *STEPS[:2], OTHER, *STEPS[2:])) == [
        f"[0006 {PRODUCT}] reads in R121 what is of [0002 {PUT[1]}] or [0007 {OTHER}]"
    ]
    said = stale_operands(code(SKIP, *PUT[:1], ".L_x_1:", PRODUCT, "EXIT"))
    assert " nothing or [0002 " in said[0]
    assert len(said) == 4


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
        ("ISETP.GE.AND P0, PT, R121, UR4, PT", []),
        ("UTMALDG.4D [UR4], [UR6], desc[UR8]", []),
        ("SYNCS.EXCH.64 URZ, [UR4+0x8], UR6", []),
        ("UR2UP PR, UR4, 0x7f", []),
        ("NOP", []),
        ("STS.128 [R17], R120", []),
        ("R2UR P0, R120", []),
        ("IMAD.U32 R3, RZ, RZ, UR4", [3]),
        ("LDS.128 R116, [R17]", [116, 117, 118, 119]),
        ("LDS.64 R122, [R17]", [122, 123]),
        ("LDSM.16.M88.2 R120, [R36]", [120, 121]),
        ("IMAD.WIDE R120, R2, R3, R4", [120, 121]),
        ("@P1 MOV R123, R2", [123]),
        ("HGMMA.64x16x16.F32.BF16 R56, gdesc[UR8], R56, gsb0", list(range(56, 64))),
        ("HGMMA.64x8x16.F32.BF16 R94, gdesc[UR8], R94, gsb0", [94, 95, 96, 97]),
    ],
)
def test_what_is_written(line, registers):
    """Result registers come first, or after a predicate, and may be several registers wide."""
    (instruction, _), _ = read(code(line, "EXIT"))
    assert [*instruction.uniform, *instruction.vector] == registers
    assert not instruction.uniform or " UR" in line


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
    """An unconditional jump does not reach the next line; a jump that may not be taken does."""
    _, before = read(code(jump, "NOP", ".L_x_1:", "EXIT"))
    assert before[1] == [0] * behind
    assert (0 in before[2]) == ("BRA" in jump)


@pytest.mark.parametrize(
    "line",
    [
        "CALL.REL.NOINC `(.L_x_1)",
        "RET.REL.NODEC R2 `(some_kernel)",
        "BRX R4 -0x1b0",  # no targets are named
        "BRXU UR6 -0x83a0",
        "JMP 0x80",
        "BSYNC B0",  # not directly before a label
        "IADD UR4, R2, R3",  # does it write UR4, or only read it?
        "HGMMA.64x128x16.F32.BF16 R24, UR4, R24",  # no address is seen
        "?",
    ],
)
def test_what_nobody_knows_is_refused(line):
    """An instruction that might go or write anywhere is an error, never a pass."""
    with pytest.raises(ValueError, match="wanted"):
        stale_addresses(code(*A, *B, BOTH, line, "NOP", ".L_x_1:", "EXIT"))


@pytest.mark.parametrize("stale", [stale_addresses, stale_operands])
def test_no_products_prove_nothing(stale):
    """Code in which no product is found is an error."""
    for nothing in ("", code(*A, "EXIT")):
        with pytest.raises(ValueError, match="wanted products, got none"):
            stale(nothing)


@pytest.fixture
def complaint(monkeypatch):
    """Return a function that gives the counts' complaint when nvdisasm prints this, or fails."""

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
    """A variant with stale operands fails the counts, whatever is expected; others do not."""
    said = complaint(code(*STALE))
    assert said.startswith("addresses of products may be stale, 1: [0012 HGMMA.64x128x16")
    assert complaint(code(*BEFORE)) is None
    assert complaint(code(*STALE), variants()[0]) is None  # portable kernels are not checked
    assert complaint("", product="none") is None  # nor are kernels without products
    by_rows = next(x for x in variants() if getattr(x, "rows", False) and "bwd" in x.kernel)
    said = complaint(code(*PUT, *STEPS[:2], OTHER, *STEPS[2:]), by_rows)
    assert said.startswith("operands of products may be stale, 1: [0006 HGMMA.64x64x16")


@pytest.mark.parametrize(
    "failure", ["", FileNotFoundError("no nvdisasm"), CalledProcessError(1, "nvdisasm")], ids=repr
)
def test_what_cannot_be_read_fails(complaint, failure):
    """A variant whose code cannot be read is UNPROVEN, and the complaint says so."""
    assert complaint(failure).startswith("addresses of products are UNPROVEN: ")
