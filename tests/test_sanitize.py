"""Sanitizers: what they print is read right, silence is not taken for clean, and it can be run."""

from __future__ import annotations

import json
import os
import sys
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
    "/somewhere/flashattn/kernels/forward.py:60: flashattn_fwd: block: [1,0,0], thread: [{},0,0] "
    "Assertion `Buffer being accessed has outstanding writes.` failed.\n"
)
CLEAN = BANNER + RAN + NONE
INVALIDS = INVALID.format(at="1f0", thread=3) + INVALID.format(at="2f0", thread=4)
THEIRS = "Uninitialized __global__ memory read of size 4 bytes in at::native::vectorized_"
RACING = "Error: Race reported between Write access at flashattn_fwd in forward.py:60"


@pytest.mark.parametrize(
    ("tool", "output", "status", "verdict", "said"),
    [
        ("memcheck", CLEAN, 0, "clean", None),
        ("racecheck", RAN + NO_RACE, 0, "clean", None),
        ("memcheck", BANNER + INVALIDS + RAN + ONE, FOUND, "findings", None),
        ("initcheck", RAN + UNINITIALIZED + ONE, FOUND, "others'", None),
        ("initcheck", RAN + UNINITIALIZED + "flashattn_fwd[grid]\n" + ONE, FOUND, "others'", None),
        ("initcheck", RAN + UNINITIALIZED + RACE + ONE, FOUND, "findings", None),
        ("memcheck", RAN + "========= Invalid __shared__ write\n" + ONE, FOUND, "findings", None),
        ("memcheck", BANNER + RAN + ONE, FOUND, "findings", None),  # none of which was printed
        ("memcheck", BANNER + RAN, 0, "failed", "exit status 0: done bf16-b2h1"),  # no summary
        ("memcheck", BANNER + NONE, 0, "failed", "exit status 0: COMPUTE-SANITIZER"),  # no case
        ("memcheck", CLEAN, 1, "failed", "exit status 1: done bf16-b2h1"),
        ("memcheck", "========= Error: Device not supported\n", 255, "failed", "255: Error: Dev"),
        ("memcheck", "", -9, "failed", "exit status -9: without a word"),
        ("consan", RAN, 0, "clean", None),  # it has no summary
        ("consan", "case a\n" + ASSERTED.format(0) + "RuntimeError: CUDA\n", 1, "findings", None),
        ("consan", "case a\nRuntimeError: no allocator was set", 1, "failed", "no allocator"),
    ],
)
def test_only_all_cases_and_a_summary_are_clean(tool, output, status, verdict, said):
    """A tool that ends early, or is silent, failed; a finding is one whatever else happened."""
    answer = judge(tool, NAMES, output, status)
    assert answer["verdict"] == verdict
    assert (said in answer["said"]) if said else answer["said"] is None


@pytest.mark.parametrize(
    ("output", "findings"),
    [
        (f"case a\n{INVALIDS}done a\n{RACE}case b\n{INVALIDS}done b\n{UNINITIALIZED}", [
            "Invalid __global__ read of size 2 bytes in flashattn_bwd_dq, a, printed 2 times",
            f"{RACING} in flashattn_fwd, between cases, printed 1 times",
            "Invalid __global__ read of size 2 bytes in flashattn_bwd_dq, b, printed 2 times",
            f"{THEIRS}elementwise_kernel, between cases, printed 1 times",
        ]),
        ("case a\n" + ASSERTED.format(0) + ASSERTED.format(1), [
            "Buffer being accessed has outstanding writes. in flashattn_fwd, a, printed 2 times"
        ]),
        ("case a\nDeadlock detected in flashattn_fwd\n", [
            "Deadlock detected in flashattn_fwd in flashattn_fwd, a, printed 1 times"
        ]),
    ],
)  # fmt: skip
def test_findings_of_a_kind_are_one(output, findings):
    """What differs only by thread and address is one finding with a count, its kernel and case."""
    assert judge("memcheck", [], output, 0)["findings"] == findings


def test_a_summary_counts_what_was_not_printed():
    """A summary's count is the total; what was left unprinted is no second summary."""
    both = "========= ERROR SUMMARY: 257 errors\n"
    both += "========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option\n"
    assert judge("memcheck", [], both, FOUND)["total"] == 257
    assert judge("memcheck", [], NO_RACE, FOUND)["total"] == 0
    assert judge("memcheck", [], RAN, FOUND)["total"] is None


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return what makes a compute-sanitizer that says something, on a GPU that is none."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
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
    folder = fake(CLEAN, 0)
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


@pytest.mark.parametrize(
    ("text", "exits", "status", "told"),
    [
        (INVALIDS + ONE, FOUND, 1, "memcheck: Invalid __global__ read of size 2 bytes in flashatt"),
        (RAN + UNINITIALIZED + ONE, FOUND, 0, f"memcheck: {THEIRS}"),
        ("========= Error: Device not supported\n", 255, 11, "memcheck: exit status 255: Error: D"),
    ],
)
def test_exit_statuses(fake, capsys, text, exits, status, told):
    """A finding of ours is 1, others' alone are 0, and no answer is UNPROVEN; all are told."""
    folder = fake(text, exits)
    assert command.main(["--tool", "memcheck", "--output", "found.json"]) == status
    assert told in capsys.readouterr().out
    assert len(json.loads((folder / "found.json").read_text())["tools"]) == 1


def test_a_finding_counts_more_than_a_failure(fake, monkeypatch):
    """Whatever else failed, one finding of ours is exit status 1."""
    fake("", 0)
    answers = iter([judge("memcheck", [], text, 1) for text in ("", INVALIDS, "")])
    common = {"tool": "", "checks": "", "seconds": 0.0}
    monkeypatch.setattr(command, "ask", lambda *_: next(answers) | common)
    assert command.main(["--tool", "memcheck", "--tool", "consan", "--tool", "plain"]) == 1


def test_tools_are_missing_or_bounded(monkeypatch):
    """A program that is not on the PATH is a sentence, and so is one that takes too long."""
    slow = ask("plain", "", 0.01, "triton")
    assert (slow["verdict"], slow["said"]) == ("failed", "it took longer than 0 s")
    monkeypatch.setenv("PATH", "")
    absent = ask("memcheck", "", 1, "triton")
    assert absent["verdict"] == "missing"
    assert "compute-sanitizer is not on the PATH" in absent["said"]


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
    """What an implementation cannot do is none of its cases."""
    assert len(cases.cases(impl="tiled")) == len(cases.PROBLEMS)
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
    """Every dtype, mask, way of loading, padded and whole widths, and masked rows are there."""
    problems = list(cases.PROBLEMS)
    assert {problem.dtype for problem in problems} == {"bfloat16", "float16", "float32"}
    assert {problem.causal for problem in problems} == {False, "top_left", "bottom_right"}
    assert {"contiguous", cases.POINTERS} < set(cases.PROBLEMS.values())
    assert {problem.head_dim for problem in problems} > {16, 64, 128, 256, 40, 7}
    assert any(problem.fully_masked_rows for problem in problems)
    assert all(problem.seq_q % 16 or problem.seq_kv % 16 for problem in problems)
