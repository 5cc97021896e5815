"""Counts: what is counted, how differences are reported, and that promised losses are caught."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import flashattn
from flashattn.counts import __main__ as command
from flashattn.counts import compiled, interpreter
from flashattn.counts.compiled import may_spill, unsteady
from flashattn.counts.expect import SOURCE, differences, read, write
from flashattn.counts.interpreter import CASES, CAUSAL, KERNELS, LAYOUTS, PLAIN, Counts, counting
from flashattn.counts.offline import FIXED
from flashattn.counts.variants import variants
from flashattn.gpus import INTERPRETER_FAILS
from flashattn.kernels.portable.steps import KERNELS as GRADIENTS

FOLDER = Path(__file__).parent / "counts"
COMPILED = sorted(FOLDER.glob("compiled-*.json"))
needs_the_interpreter = pytest.mark.skipif(
    INTERPRETER_FAILS is not None, reason=str(INTERPRETER_FAILS)
)


@pytest.fixture(scope="module")
def rows():
    """Return the expected counts of the interpreter."""
    return read(FOLDER / "interpreter.json")


def count(folder, edits, *runs):
    """Copy the package into a folder, change it, and count with the copy, in one process.

    Each run is the arguments of a command line. Returns the output and exit status of each.
    """
    root, package = folder / "copy", Path(flashattn.__file__).parent
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(package, root / "flashattn")  # with its bytecode
    for name, old, new in edits:
        path = root / "flashattn" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has changed: {old}"
        path.write_text(text.replace(old, new))
    asked = [[str(word) for word in arguments] for arguments in runs]
    command = [sys.executable, "-c", RUNS, json.dumps(asked)]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    assert done.stderr == "" or "compiled" in runs[0]
    said = re.split(r"^ended with (\d+)\n", done.stdout, flags=re.MULTILINE)
    return [(text, int(status)) for text, status in zip(said[:-1:2], said[1::2], strict=True)]


RUNS = """
import json, runpy, sys
for sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        runpy.run_module("flashattn.counts", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""
MASK = "kernels/portable/mask.py"
NO_LAST_KEY = (MASK, "end = tl.minimum(end, tl.maximum(hi, 0))", "end = seq_kv")
NO_FIRST_QUERY = (MASK, "first = first // BLOCK_Q * BLOCK_Q", "first = 0")
FORWARD = "sm_90 hopper_fwd bf16 d64 full 128x128 s4"
BARRIERS = "values = new_pipeline(v, t.stages, {}, high=v_high)"
IDLE = ("kernels/hopper/forward.py", BARRIERS.format(0), BARRIERS.format("t.groups"))
END_OF_PASS = "    store_state(o, lse, partial, layout"
ONE_MORE = """\
        at = batch, head // group, again
        load_tile({x}, layout.{x}, at, seq_kv, layout.head_dim, CONFIG.BLOCK_KV, False, CONFIG)
"""
SECOND_PASS = "    for again in tl.range(0, end, CONFIG.BLOCK_KV):\n" + "".join(
    ONE_MORE.format(x=x) for x in "kv"
)
AGAIN = ("kernels/portable/forward.py", END_OF_PASS, SECOND_PASS + END_OF_PASS)
SKIPPED = f"{CAUSAL} descriptors"
INTERPRETED = f"^fwd {PLAIN}|{SKIPPED}"
NO_BF16X6 = ("plan/precision.py", '== "tf32" else "bf16x6"', '== "tf32" else "ieee"')
ROW = '("bwd_dq", 2, 256): '
LARGER = ("plan/tables/sm80.py", f"{ROW}(32, 32, 8", f"{ROW}(128, 32, 4")
FP32 = "sm_90 bwd_dq fp32 d16 causal pointers"
WIDE = "sm_80 bwd_dq bf16 d256 causal pointers"
SHIFTED = (
    "kernels/portable/combine.py",
    "    rows = batches * heads * size\n",
    "    # A comment.\n    all_rows = batches * heads * size\n    rows = all_rows\n",
)
OTHER_CONSTANT = ("kernels/portable/preprocess.py", '"inf"), 0.0, delta_', '"inf"), 1.0, delta_')
TWO = "^sm_80 (bwd_reduce|bwd_preprocess) bf16 d64$"


def change(output, case, name):
    """Return the expected and the counted value of one number of one case."""
    pattern = rf"^FAILED {re.escape(case)}: .*?\b{name}: expected (.+?), got (.+?)(?:;|$)"
    found = re.search(pattern, output, re.MULTILINE)
    assert found, output
    return tuple(map(ast.literal_eval, found.groups()))


def test_interpreter_counts(tmp_path):
    """Every kernel multiplies, loads and stores what is expected, case by case."""
    ((said, status),) = count(tmp_path, (), ("interpreter", "--folder", FOLDER))
    assert said == f"UNPROVEN: {INTERPRETER_FAILS}\n" or not INTERPRETER_FAILS
    assert status == (11 if INTERPRETER_FAILS else 0), said


@needs_the_interpreter
def test_needless_work(tmp_path):
    """Visiting masked tiles adds products; reading K and V once more adds bytes."""
    edits = NO_LAST_KEY, NO_FIRST_QUERY, AGAIN
    arguments = ("interpreter", "--folder", FOLDER, "--only", INTERPRETED)
    ((said, status),) = count(tmp_path, edits, arguments)
    kernels = "fwd", "fwd_split", *GRADIENTS
    for kernel in kernels:
        expected, got = change(said, f"{kernel} {SKIPPED}", "dots")
        assert got > expected
    for loading in LAYOUTS:
        expected, got = change(said, f"fwd {PLAIN} {loading}", "loaded")
        # Four tiles of queries; K and V, 128 rows of 64 elements.
        assert got - expected == 4 * 2 * 128 * 64 * 2
    assert not re.search(rf"^FAILED fwd {PLAIN}.*dots", said, re.MULTILINE)
    assert status == 1
    assert f"{len(kernels) + 2} cases differ" in said
    assert "python -m flashattn.counts --rewrite" in said


def test_compiled_counts(tmp_path):
    """Changed kernels are counted, and losses are reported; unchanged kernels are not compiled.

    An fp32 product off the tensor cores has no matrix instructions. A tile that is too large is
    named, and its spill fails. A barrier that no role uses is reported, though the kernel uses no
    more resources for it. Lines, comments and names do not change a kernel; a constant does. Equal
    counts of another source are reported, and are no failure.
    """
    expected = FOLDER if (FOLDER / compiled.FILE).exists() else tmp_path / "expected"
    only = "|".join(f"^{re.escape(case)}$" for case in (FP32, WIDE, FORWARD))
    lost = ("compiled", "--folder", expected, "--only", only)
    two = ("compiled", "--folder", tmp_path, "--only", TWO)
    rewritten = [(*lost, "--rewrite")] * (expected != FOLDER)
    first, *_ = count(tmp_path, (), (*two, "--rewrite"), *rewritten)
    before = read(tmp_path / compiled.FILE)
    edits = NO_BF16X6, LARGER, IDLE, SHIFTED, OTHER_CONSTANT
    (said, status), *rest = count(tmp_path, edits, lost, two, (*two, "--all", "--rewrite"))
    after = read(tmp_path / compiled.FILE)

    wanted, got = change(said, FP32, "matrix")
    assert wanted
    assert all("bf16" in kind for kind in wanted)
    assert got == {}
    wanted, got = change(said, WIDE, "stack")
    assert wanted == 0
    assert got > 0
    assert f"{WIDE}: tile: expected 32x32 w8 s1, got 128x32 w4 s1;" in said
    assert f"FAILED {WIDE}: spills: {got} bytes of stack" in said
    assert f"FAILED {FORWARD}: barriers that no role uses: %" in said
    assert status == 1

    told = "1 unchanged; --rewrite would spare the next check 1"
    for (said, status), spared in zip(
        (first, *rest),
        ("2 counted, 0 unchanged", f"1 counted, {told}", "2 counted, 0 unchanged"),
        strict=True,
    ):
        assert said.endswith(f": {spared}\n"), said
        assert status == 0
    for case in before:
        same_source = before[case].pop(SOURCE) == after[case].pop(SOURCE)
        assert same_source == (" bwd_reduce " in case)
    assert after == before


def test_plain_counts_are_right(rows):
    """Without masks and padding each product is computed once, however tiles are loaded."""
    o = kv = 128 * 64 * 2
    lse = 128 * 4
    products = PLAIN.flops() // 2
    for kernel, dots, loaded, stored in (
        ("fwd", 2, o + 4 * 2 * kv, o + lse),
        ("bwd_dkdv", 4, 2 * kv + 2 * (2 * o + 2 * lse), 2 * kv),
        ("bwd_dq", 3, 2 * o + 2 * lse + 4 * 2 * kv, o),
    ):
        assert rows[f"{kernel} {PLAIN} descriptors"] == {
            "dots": dots * 4 * 2,  # tiles of 32 queries and 64 keys
            "flops": dots * products,
            "loaded": loaded,
            "stored": stored,
        }
    for problem in (problem for problem, loading in CASES if loading == "pointers"):
        for of in (f"{kernel} {problem}" for kernel in KERNELS):
            assert rows[f"{of} pointers"] == rows[f"{of} descriptors"]


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_compiled_expectations(path):
    """Every variant has expected counts, uses tensor cores, and spills only where it may.

    On GPUs other than Hopper, fp32 may be decomposed in advance, which spills less than fp32 that
    the kernel decomposes, and nothing up to D = 128.
    """
    expected, minor = read(path), path.stem.removeprefix("compiled-triton-")
    asked = variants(tuple(map(int, minor.split("."))))
    assert expected.keys() == {"ptxas", *map(str, asked)}
    for variant in asked:
        row = expected[str(variant)]
        assert SOURCE in row, f"{variant}: python -m flashattn.counts compiled --rewrite"
        multiplies = (
            variant.kernel not in {*FIXED, "hopper_bwd_postprocess"} and variant.head_dim > 1
        )
        assert bool(row["matrix"]) == multiplies
        if unsteady(variant, minor):
            assert row.keys().isdisjoint(compiled.VARYING)
        else:
            assert row["stack"] == 0 or may_spill(variant, row["stack"])
    terms = {
        name: row for name, row in expected.items() if "sm_90" not in name and " decomposed" in name
    }
    wide = {name: row for name, row in terms.items() if row["tile"].endswith("by pointers")}
    assert wide
    for name, row in wide.items():
        loaded = expected[name.replace(" decomposed", " pointers")]
        assert row["stack"] == 0 or (" d256 " in name and row["stack"] < loaded["stack"])


def test_names_are_unique(rows):
    """No two cases share a name, or one would go uncounted; every case can be asked for."""
    assert sorted(interpreter.names()) == sorted(rows)
    assert set(compiled.names()) == {"ptxas", *map(str, variants())}
    assert len(set(map(str, variants()))) == len(variants())
    assert len(rows) == len(CASES) * len(KERNELS)
    assert {loading for _, loading in CASES} == set(LAYOUTS)
    # The oldest and the newest supported Triton.
    assert {"compiled-triton-3.6", "compiled-triton-3.9"} <= {path.stem for path in COMPILED}


@triton.jit
def move(x, y, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):  # noqa: N803 - as in kernels
    """Copy n elements, and one more."""
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)
    tl.store(y + n, tl.load(x + n))
    if ATOMIC:
        tl.atomic_cas(y, 1.0, 2.0)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masked_elements_do_not_count(dtype):
    """Bytes count the elements that a mask lets through, and accesses without a mask."""
    x, y = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    with counting() as counts:
        move[(3,)](x, y, 5, BLOCK=8, ATOMIC=False)
    moved = 3 * 6 * x.element_size()
    assert counts == Counts(dots=0, flops=0, loaded=moved, stored=moved)
    assert y.sum() == 6
    move[(3,)](x, y, 5, BLOCK=8, ATOMIC=False)
    assert counts.loaded == moved  # it no longer counts


@pytest.mark.interpreter
def test_what_is_not_counted_is_refused():
    """A kernel whose work would go uncounted is an error, and the interpreter is left as it was."""
    x, y = torch.ones(16), torch.zeros(16)
    with (
        pytest.raises(triton.runtime.errors.InterpreterError, match="atomic_cas is not counted"),
        counting(),
    ):
        move[(1,)](x, y, 5, BLOCK=8, ATOMIC=True)
    move[(1,)](x, y, 5, BLOCK=8, ATOMIC=True)
    assert y[0] == 2


BEFORE = {"same": {"dots": 1}, "changed": {"dots": 1, "loaded": 2, "old": 3}, "gone": {"dots": 4}}
AFTER = {"same": {"dots": 1}, "changed": {"dots": 5, "loaded": 2, "new": 6}, "extra": {"dots": 7}}


def test_differences(tmp_path):
    """Counts are written one case a line and read back; every kind of difference is reported."""
    path = tmp_path / "new" / "expected.json"
    write(path, BEFORE)
    lines = [line.partition(":")[0] for line in path.read_text().splitlines()[1:-1]]
    assert lines == ['"changed"', '"gone"', '"same"']
    assert differences(read(path), BEFORE) == []
    assert differences(BEFORE, AFTER) == [
        "changed: dots: expected 1, got 5; new: expected None, got 6; old: expected 3, got None",
        "extra: not expected; got {'dots': 7}",
        "gone: missing; expected {'dots': 4}",
    ]
    assert "changed: dots: expected 5, got 1" in differences(AFTER, BEFORE)[0]


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """Return a function that runs the command on made-up counts, and its folder."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(command, "INTERPRETER_FAILS", None)  # nothing is interpreted
    counted = SimpleNamespace(FILE="some.json", got=BEFORE, complaints=[])
    counted.names = lambda: list(counted.got)

    def collect(wanted, _known):
        return {case: counted.got[case] for case in wanted}, counted.complaints

    counted.collect = collect
    monkeypatch.setattr(command, "import_module", lambda _: counted)

    def run(*arguments):
        status = command.main(["interpreter", "--folder", str(tmp_path), *arguments])
        return status, capsys.readouterr().out

    run.counted, run.path = counted, tmp_path / "some.json"
    return run


def test_rewriting(check):
    """Rewritten counts become the expected ones; cases that were not chosen stay.

    A spill fails without expected counts, with them, and when they are rewritten.
    """
    check.counted.complaints.append("gone: spills")
    for arguments in ([], ["--rewrite"], []):
        status, said = check(*arguments)
        assert status == 1
        assert said.startswith("FAILED gone: spills\n")
    check.counted.complaints.clear()
    assert check() == (0, f"3 cases are as {check.path} expects: 3 counted, 0 unchanged\n")
    check.counted.got = AFTER
    status, said = check()
    assert status == 1
    assert said.count("FAILED ") == 3
    assert "python -m flashattn.counts --rewrite" in said
    assert check("--only", "changed")[1].count("FAILED ") == 1
    assert check("--only", "^g|c.*g", "--rewrite")[0] == 0
    assert read(check.path) == {"same": BEFORE["same"], "changed": AFTER["changed"]}
    assert check("--rewrite")[0] == 0
    assert read(check.path) == AFTER


def test_what_cannot_be_counted_is_no_pass(check, capsys, monkeypatch):
    """Without expected counts or an interpreter the result is UNPROVEN; a bad choice fails."""
    status, said = check()
    assert (status, command.UNPROVEN) == (11, 11)
    assert said.startswith(f"UNPROVEN: there is no {check.path}")
    assert "python -m flashattn.counts --rewrite" in said
    monkeypatch.setattr(command, "INTERPRETER_FAILS", "it needs an older numpy")
    for arguments in ([], ["--rewrite"], ["--only", "same"]):
        assert check(*arguments) == (command.UNPROVEN, "UNPROVEN: it needs an older numpy\n")
    assert not check.path.exists()
    assert check("--only", "no such case")[0] == 2
    for pattern, reason in {"same": "wanted a kind", "(": "'(' is no regular expression"}.items():
        with pytest.raises(SystemExit) as stopped:
            command.main(["--only", pattern])
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "status"), [((0, 0), 0), ((0, 11), 11), ((11, 1), 1), ((1, 0), 1)]
)
def test_both_kinds(monkeypatch, statuses, status):
    """Without a kind both are counted, one process each; a failure outweighs UNPROVEN."""
    seen = []

    def run(words, *, check):
        assert not check
        seen.append(words[-2:])
        return SimpleNamespace(returncode=statuses[len(seen) - 1])

    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main(["--rewrite"]) == status
    assert seen == [["interpreter", "--rewrite"], ["compiled", "--rewrite"]]
