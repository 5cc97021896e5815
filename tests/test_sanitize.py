"""Sanitizers: what they print is read right, silence is not taken for clean, and it can be run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from flashattn.sanitize import __main__ as command
from flashattn.sanitize import cases, tools
from flashattn.sanitize.parse import Finding, parse
from flashattn.sanitize.tools import FOUND, TOOLS, Answer, Tool, ask, judge

NAMES = list(cases.cases())
RAN = "\n".join(f"case {name}\ndone {name}" for name in NAMES) + "\n"
BANNER = "========= COMPUTE-SANITIZER\n"
NONE = "========= ERROR SUMMARY: 0 errors\n"
ONE = "========= ERROR SUMMARY: 1 error\n"
NO_RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
INVALID = """\
========= Invalid __global__ read of size 2 bytes
=========     at flashattn_bwd_dq+0x{at} in backward.py:301
=========     by thread ({thread},0,0) in block (2,0,0)
=========     Address 0x7f00{at} is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.c:12 [0x5bd0]
"""
UNINITIALIZED = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int, T2, T3)+0x70
=========     by thread (31,0,0) in block (1,0,0)
"""
RACE = """\
========= Error: Race reported between Write access at flashattn_fwd+0x580 in forward.py:60
=========     and Read access at flashattn_fwd+0x890 in forward.py:61 [4080 hazards]
=========
"""
ASSERTED = (
    "/somewhere/flashattn/kernels/forward.py:60: flashattn_fwd: block: [1,0,0], thread: [{},0,0] "
    "Assertion `Buffer being accessed has outstanding writes.` failed.\n"
)
MEMCHECK, CONSAN = (tool for tool in TOOLS if tool.name in ("memcheck", "consan"))


def test_clean_is_a_summary_of_nothing():
    """A summary of 0 is no finding, and each case that ended is known by its name."""
    said = parse(BANNER + RAN + NONE)
    assert (said.findings, said.total, said.done) == ([], 0, NAMES)
    assert parse(BANNER + RAN + NO_RACE).total == 0


def test_silence_is_no_summary():
    """Without a summary the total is unknown; what was left unprinted is no second summary."""
    assert parse(RAN).total is None
    both = "========= ERROR SUMMARY: 257 errors\n"
    both += "========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option\n"
    assert parse(both).total == 257
    assert (
        parse("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n").total == 1
    )


def test_findings_of_a_kind_are_one():
    """What differs only by thread and address is one finding with a count, of its case."""
    text = "case a\n" + INVALID.format(at="1f0", thread=3) + INVALID.format(at="2f0", thread=4)
    text += "done a\ncase b\n" + INVALID.format(at="1f0", thread=3) + "done b\n"
    what = "Invalid __global__ read of size 2 bytes"
    assert parse(text).findings == [
        Finding(what, "flashattn_bwd_dq", "a", 2),
        Finding(what, "flashattn_bwd_dq", "b", 1),
    ]


def test_kernels_are_ours_or_not():
    """A finding in a kernel of another library is not ours; in a kernel without a name it is."""
    theirs, ours = parse(UNINITIALIZED + RACE).findings
    assert (theirs.kernel, theirs.ours) == ("at::native::vectorized_elementwise_kernel", False)
    assert (ours.kernel, ours.ours) == ("flashattn_fwd", True)
    assert ours.what.startswith("Error: Race reported between Write access at flashattn_fwd in")
    (unnamed,) = parse("========= Invalid __shared__ write of size 16 bytes\n").findings
    assert (unnamed.kernel, unnamed.ours) == (None, True)


def test_assertions_of_triton_are_findings():
    """What instrumentation asserts, once for each thread, is one finding of its kernel."""
    text = "case a\n" + ASSERTED.format(0) + ASSERTED.format(1)
    what = "Buffer being accessed has outstanding writes."
    assert parse(text).findings == [Finding(what, "flashattn_fwd", "a", 2)]


@pytest.mark.parametrize(
    ("output", "status", "verdict", "said"),
    [
        (BANNER + RAN + NONE, 0, "clean", None),
        (BANNER + RAN + INVALID.format(at="1", thread=0) + NONE, FOUND, "findings", None),
        (
            BANNER + RAN + UNINITIALIZED + "========= ERROR SUMMARY: 1 error\n",
            FOUND,
            "others'",
            None,
        ),
        (BANNER + RAN + "========= ERROR SUMMARY: 3 errors\n", FOUND, "findings", None),
        (BANNER + RAN, 0, "failed", "exit status 0: done bf16-b2h1"),  # without a summary
        (BANNER + NONE, 0, "failed", "exit status 0: COMPUTE-SANITIZER"),  # without a case
        (BANNER + RAN + NONE, 1, "failed", "exit status 1: done bf16-b2h1"),
        ("========= Error: Device not supported\n", 255, "failed", "255: Error: Device not supp"),
        ("", -9, "failed", "exit status -9: without a word"),
    ],
)
def test_only_all_cases_and_a_summary_are_clean(output, status, verdict, said):
    """A tool that ends early, or is silent, failed; a finding is one whatever else happened."""
    answer = judge(MEMCHECK, NAMES, output, status, 1.0)
    assert answer.verdict == verdict
    assert (said in answer.said) if said else answer.said is None


def test_triton_s_own_has_no_summary():
    """Consan is clean if all cases ran, and found something if it asserted, though it then died."""
    assert judge(CONSAN, NAMES, RAN, 0, 1.0).verdict == "clean"
    died = (
        "case a\n" + ASSERTED.format(0) + "RuntimeError: CUDA error: device-side assert triggered"
    )
    assert judge(CONSAN, NAMES, died, 1, 1.0).verdict == "findings"
    assert (
        judge(CONSAN, NAMES, "case a\nRuntimeError: no allocator was set", 1, 1.0).verdict
        == "failed"
    )


def test_missing_tools_say_so(monkeypatch):
    """A program that is not on the PATH, and a mode that Triton lacks, are sentences."""
    monkeypatch.setenv("PATH", "")
    answer = ask(MEMCHECK, "", 1)
    assert answer.verdict == "missing"
    assert "compute-sanitizer is not on the PATH" in answer.said
    assert tools.instrumentation_modes() == ["consan"]
    monkeypatch.setattr(tools, "instrumentation_modes", list)
    assert "no instrumentation mode consan" in ask(CONSAN, "", 1).said


def test_tools_are_bounded():
    """A tool that takes too long has failed, and says after how long."""
    sleep = Tool("sleep", "nothing", (sys.executable, "-c", "import time; time.sleep(60)"))
    answer = ask(sleep, "", 0.2)
    assert (answer.verdict, answer.said) == ("failed", "it took longer than 0 s")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return what makes a compute-sanitizer that says something, on a GPU that is none."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = cases.here()
    monkeypatch.setattr(cases, "here", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "machine_info", lambda _: {"accelerator": "nvidia-made-up"})
    monkeypatch.setattr(command, "accelerator", lambda _: "nvidia-made-up")
    monkeypatch.chdir(tmp_path)

    def say(text, status):
        program = tmp_path / "compute-sanitizer"
        (tmp_path / "says").write_text(text)
        program.write_text(
            f"#!{sys.executable}\nimport os, sys\n"
            f"open('asked', 'a').write(' '.join([*sys.argv[1:], '|', "
            f"os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING']]) + '\\n')\n"
            f"print(open('says').read())\nsys.exit({status})\n"
        )
        program.chmod(0o755)
        return tmp_path

    return say


def test_a_clean_tool_is_status_0(fake, capsys):
    """A clean answer is a line, a row of the JSON beside the GPU's runs, and exit status 0."""
    folder = fake(BANNER + RAN + NONE, 0)
    assert command.main(["--tool", "memcheck", "--tool", "initcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines if " clean " in line] == [
        [name, "clean", str(len(NAMES)), "0"] for name in ("memcheck", "initcheck")
    ]
    saved = json.loads((folder / ".benchmarks/nvidia-made-up/sanitizers-triton.json").read_text())
    assert saved["machine"] == {"accelerator": "nvidia-made-up"}
    assert saved["cases"] == NAMES
    assert [row["verdict"] for row in saved["tools"]] == ["clean", "clean"]
    asked = (folder / "asked").read_text().splitlines()
    assert all(line.endswith("-m flashattn.sanitize.cases  triton | 1") for line in asked)
    assert [line.split()[:2] for line in asked] == [["--tool", "memcheck"], ["--tool", "initcheck"]]


def test_a_finding_is_status_1(fake, capsys):
    """A finding is told with its kernel and its case, and kept; the exit status is 1."""
    first = NAMES[0]
    text = BANNER + f"case {first}\n" + INVALID.format(at="1", thread=0)
    folder = fake(text + ONE, FOUND)
    assert command.main(["--tool", "memcheck", "--output", "found.json"]) == 1
    told = (
        f"memcheck: Invalid __global__ read of size 2 bytes in flashattn_bwd_dq, {first}, printed"
    )
    assert told in capsys.readouterr().out
    (row,) = json.loads((folder / "found.json").read_text())["tools"]
    assert row["findings"][0]["kernel"] == "flashattn_bwd_dq"
    assert (row["total"], row["cases"]) == (1, 0)


def test_no_answer_is_unproven(fake, capsys):
    """A tool that refuses the device proves nothing: exit status 11, with what it said."""
    fake("========= Error: Device not supported\n", 255)
    assert command.main(["--tool", "racecheck"]) == 11
    assert (
        "racecheck failed: exit status 255: Error: Device not supported" in capsys.readouterr().out
    )


def test_a_finding_counts_more_than_a_failure():
    """Whatever else failed, one finding of ours is exit status 1; others' alone are 0."""
    answers = [Answer(tool="x", checks="", verdict=word) for word in ("failed", "findings")]
    assert command.status(answers) == 1
    assert command.status([Answer(tool="x", checks="", verdict="others'")]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "wanted a CUDA GPU, got none"), (["--tool", "valgrind"], "invalid choice")],
)
def test_mistakes_are_status_2(arguments, words, monkeypatch, capsys):
    """Without a GPU, or with an unknown tool, nothing runs and a line says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_no_case_of_that_name_is_a_mistake(fake, capsys):
    """``--only`` with what is in no name is a mistake."""
    fake("", 0)
    with pytest.raises(SystemExit):
        command.main(["--only", "d65"])
    assert "--only: no case of triton has 'd65' in its name" in capsys.readouterr().err


def test_cases_are_those_an_implementation_can_run(monkeypatch):
    """What an implementation cannot do is none of its cases."""
    assert len(cases.cases()) == len(cases.PROBLEMS)
    short = replace(
        cases.get("triton"), limits=lambda problem, _: problem.dtype == "float32" or None
    )
    monkeypatch.setattr(cases, "get", lambda _: short)
    problems = [problem for problem, _ in cases.cases().values()]
    assert {problem.dtype for problem in problems} == {"bfloat16", "float16"}


def test_cases_say_when_they_run(capsys):
    """Each case that was asked for is named before it and after it, and no other is run."""
    cases.main("d32")
    (name,) = cases.cases("d32")
    assert capsys.readouterr().out == f"case {name}\ndone {name}\n"


def test_instrumented_kernels_get_scratch_memory(monkeypatch):
    """Under Triton's own sanitizer kernels get memory of a size, and backward keeps to a thread."""
    given = []
    monkeypatch.setattr("triton.set_allocator", given.append)
    monkeypatch.setenv("TRITON_INSTRUMENTATION_MODE", "consan")
    try:
        cases.main("of no case")
        assert not torch.autograd.is_multithreading_enabled()
    finally:
        torch.autograd.set_multithreading_enabled(True)
    (allocate,) = given
    assert allocate(96, 16, None).nbytes == 96


def test_cases_are_ragged_and_load_both_ways():
    """Every dtype, mask, way of loading, padded and whole widths, and dead rows are among them."""
    problems = list(cases.PROBLEMS)
    assert {problem.dtype for problem in problems} == {"bfloat16", "float16", "float32"}
    assert {problem.causal for problem in problems} == {False, "top_left", "bottom_right"}
    assert {"contiguous", cases.POINTERS} < set(cases.PROBLEMS.values())
    assert {problem.head_dim for problem in problems} > {16, 64, 128, 256, 40, 7}
    assert any(problem.dead_rows for problem in problems)
    assert all(problem.seq_q % 16 or problem.seq_kv % 16 for problem in problems)
