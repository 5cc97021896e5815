"""Sanitizers: their output is read right, silence is not taken for clean, and the command runs."""

import os
from dataclasses import replace

import pytest
import torch

from flashattn.sanitize import __main__ as command
from flashattn.sanitize import cases
from flashattn.sanitize.__main__ import FOUND, ask, judge

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
    "/a/forward.py:60: flashattn_fwd: block: [1,0,0], thread: [{},0,0] Assertion `Buffer has "
    "outstanding writes.` failed.\n"
)
CLEAN = BANNER + RAN + NONE
INVALIDS = INVALID.format(at="1f0", thread=3) + INVALID.format(at="2f0", thread=4)
THEIRS = "Uninitialized __global__ memory read of size 4 bytes in at::native::vectorized_"
RACING = "Error: Race reported between Write access at flashattn_fwd in forward.py:60"


AT, BUFFER = "/a/forward.py:60: flashattn_fwd: ", "Buffer has outstanding writes."
A, B, BETWEEN = ("a, printed 2 times", "b, printed 2 times", "between cases, printed 1 times")
READ = "Invalid __global__ read of size 2 bytes in flashattn_bwd_dq"
UNPRINTED = "========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option\n"


@pytest.mark.parametrize(
    ("tool", "output", "status", "verdict", "said"),
    [
        ("memcheck", CLEAN, 0, "clean", []),
        ("racecheck", RAN + NO_RACE, 0, "clean", []),
        ("memcheck", BANNER + INVALIDS + RAN + ONE, FOUND, "findings", [f"{READ}, between"]),
        ("initcheck", RAN + UNINITIALIZED + ONE, FOUND, "others'", [THEIRS]),
        ("initcheck", RAN + UNINITIALIZED + "flashattn_fwd\n" + ONE, FOUND, "others'", [THEIRS]),
        ("initcheck", RAN + UNINITIALIZED + RACE + ONE, FOUND, "findings", [THEIRS, RACING]),
        ("memcheck", RAN + "========= Invalid __shared__ write\n" + ONE, FOUND, "findings",
         ["Invalid __shared__ write in an unnamed kernel"]),
        ("memcheck", BANNER + RAN + ONE, FOUND, "findings", ["1 findings, which were not"]),
        ("memcheck", RAN + ONE + UNPRINTED, FOUND, "findings", ["1 findings, which were not"]),
        ("memcheck", BANNER + RAN, 0, "failed", ["exit status 0: done bf16-b2h1"]),  # no summary
        ("memcheck", RAN + UNPRINTED, 0, "failed", ["exit status 0: done bf16-b2h1"]),
        ("memcheck", BANNER + NONE, 0, "failed", ["exit status 0: COMPUTE-SANITIZER"]),  # no case
        ("memcheck", CLEAN, 1, "failed", ["exit status 1: done bf16-b2h1"]),
        ("memcheck", "========= Error: Device not supported\n", 255, "failed",
         ["exit status 255: Error: Device not supported"]),
        ("memcheck", "", -9, "failed", ["exit status -9: without a word"]),
        ("memcheck", f"case a\n{INVALIDS}done a\n{RACE}case b\n{INVALIDS}done b\n{UNINITIALIZED}",
         0, "findings", [f"{READ}, {A}", f"{RACING} in flashattn_fwd, {BETWEEN}", f"{READ}, {B}",
                         f"{THEIRS}elementwise_kernel, {BETWEEN}"]),
        ("consan", RAN, 0, "clean", []),  # it has no summary
        ("consan", "case a\n" + ASSERTED.format(0) + ASSERTED.format(1) + "RuntimeError\n", 1,
         "findings", [f"{AT}Assertion `{BUFFER}` failed. in flashattn_fwd, {A}"]),
        ("consan", "case a\nDeadlock detected in flashattn_fwd\n", 1, "findings",
         ["Deadlock detected in flashattn_fwd in flashattn_fwd, a, printed 1 times"]),
        ("consan", "case a\nRuntimeError: no allocator was set", 1, "failed",
         ["exit status 1: RuntimeError: no allocator was set"]),
    ],
)  # fmt: skip
def test_what_is_printed_is_judged(tool, output, status, verdict, said):
    """A tool is clean after all cases and a summary; equal findings merge, with kernel and case.

    A tool that ends early or prints nothing has failed; a finding counts whatever else happened. A
    summary of errors that were not printed is no summary.
    """
    answer, told = judge(tool, NAMES, output, status)
    assert answer == verdict
    assert len(told) == len(said)
    assert all(line.startswith(begins) for line, begins in zip(told, said, strict=True)), told


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that installs a fake compute-sanitizer, on a pretended GPU."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)

    def say(text, status):
        program = tmp_path / "compute-sanitizer"
        (tmp_path / "says").write_text(text)
        asked = 'echo "$* | $PYTORCH_NO_CUDA_MEMORY_CACHING" >> asked'
        program.write_text(f"#!/bin/sh\n{asked}\ncat says\nexit {status}\n")
        program.chmod(0o755)
        return tmp_path / "asked"

    return say


@pytest.mark.parametrize(
    ("text", "exits", "status", "told"),
    [
        (CLEAN, 0, 0, "memcheck  clean    out-of-bounds accesses to memory"),
        (INVALIDS + ONE, FOUND, 1, "  Invalid __global__ read of size 2 bytes in flashattn_bwd_dq"),
        (RAN + UNINITIALIZED + ONE, FOUND, 0, f"  {THEIRS}"),
        ("========= Error: Device not supported\n", 255, 11, "  exit status 255: Error: Device"),
    ],
)
def test_exit_statuses(fake, capsys, text, exits, status, told):
    """A finding of ours exits with 1, others' alone with 0, no answer is UNPROVEN; all print."""
    asked = fake(text, exits)
    assert command.main(["--tool", "memcheck", "--tool", "initcheck"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{len(NAMES)} cases of triton"
    assert any(line.startswith(told) for line in lines)
    asked = asked.read_text().splitlines()
    assert all(line.endswith("-m flashattn.sanitize.cases  triton | 1") for line in asked)
    assert [line.split()[:2] for line in asked] == [["--tool", "memcheck"], ["--tool", "initcheck"]]


def test_a_finding_counts_more_than_a_failure(fake, monkeypatch):
    """One finding of ours makes the exit status 1, whatever else failed; all tools are run."""
    fake("", 0)
    verdicts = iter(["failed", "clean", "findings", "missing"])
    monkeypatch.setattr(command, "ask", lambda *_: (next(verdicts), []))
    assert command.main([]) == 1
    assert next(verdicts, None) is None


@pytest.mark.parametrize(("tools", "ran"), [([], 3), (["--tool", "initcheck"], 0)])
def test_a_tool_that_is_blind_is_left_out(fake, monkeypatch, capsys, tools, ran):
    """Initcheck, which does not see Hopper's TMA stores, is left out; alone it proves nothing."""
    fake("", 0)
    asked = []
    monkeypatch.setattr(command, "cases", lambda *_: ["a case"])
    monkeypatch.setattr(command, "ask", lambda tool, *_: asked.append(tool) or ("clean", []))
    assert command.main(["--impl", "hopper", *tools]) == (0 if ran else 11)
    assert len(asked) == ran
    assert "initcheck" not in asked
    assert "initcheck left out: it calls uninitialized what TMA stores" in capsys.readouterr().out


def test_tools_are_missing_or_bounded(monkeypatch):
    """A tool that is not on the PATH, or takes too long, is reported with the reason."""
    assert ask("consan", "", 0.01, "triton") == ("failed", ["it took longer than 0 s"])
    monkeypatch.setenv("PATH", "")
    verdict, (said,) = ask("memcheck", "", 1, "triton")
    assert (verdict, said[:35]) == ("missing", "compute-sanitizer is not on the PAT")


@pytest.mark.parametrize(
    ("arguments", "gpu", "words"),
    [
        ([], False, "wanted a CUDA GPU, got none"),
        (["--tool", "valgrind"], True, "invalid choice"),
        (["--only", "d65"], True, "--only: no case of triton has 'd65' in its name"),
    ],
)
def test_mistakes_are_status_2(arguments, gpu, words, monkeypatch, capsys):
    """Without a GPU, or with an unknown tool or case, nothing runs and a line says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_cases_are_those_an_implementation_can_run(monkeypatch):
    """The cases of an implementation are those that it can run."""
    assert len(cases.cases(impl="tiled")) == len(cases.PROBLEMS)
    short = replace(
        cases.get("triton"), limits=lambda problem, _: problem.dtype == "float32" or None
    )
    monkeypatch.setattr(cases, "get", lambda _: short)
    problems = [problem for problem, _ in cases.cases().values()]
    assert {problem.dtype for problem in problems} == {"bfloat16", "float16"}


def test_cases_say_when_they_run(capsys):
    """Each selected case is named before and after it runs, and no other case is run."""
    cases.main("d32")
    (name,) = cases.cases("d32")
    assert capsys.readouterr().out == f"case {name}\ndone {name}\n"


def test_instrumented_kernels_get_scratch_memory(monkeypatch):
    """Under Triton's own sanitizer kernels get scratch memory, and backward stays on one thread."""
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
    """The cases have every dtype, mask and way of loading, padded and whole widths, masked rows."""
    problems = list(cases.PROBLEMS)
    assert {problem.dtype for problem in problems} == {"bfloat16", "float16", "float32"}
    assert {problem.causal for problem in problems} == {False, "top_left", "bottom_right"}
    assert {"contiguous", cases.POINTERS} < set(cases.PROBLEMS.values())
    assert {problem.head_dim for problem in problems} > {16, 64, 128, 256, 40, 7}
    assert any(problem.fully_masked_rows for problem in problems)
    assert all(problem.seq_q % 16 or problem.seq_kv % 16 for problem in problems)
