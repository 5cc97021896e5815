"""Bring your own kernel: pytest --impl FILE.py, and the line that repeats a failure."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from flashattn import registry
from flashattn.testing import repro
from flashattn.testing.plugin_file import asked, choose

ROOT = Path(registry.__file__).parents[1]
KERNELS = """
import time
import torch
from flashattn import register

def scores(q, k, causal, scale):
    s = q @ k.mT * scale
    last = 0 if causal == "top_left" else s.shape[3] - s.shape[2]
    future = s.new_ones(s.shape[2:], dtype=bool).triu(last + 1)
    return s.masked_fill(future, -torch.inf) if causal else s

FLAGS = {"grouped": False, "empty": False, "fully_masked_rows": False}

@register("right", **FLAGS)
def right(q, k, v, *, causal, scale):
    return scores(q, k, causal, scale).softmax(-1) @ v

@register("wrong", **FLAGS)
def wrong(q, k, v, *, causal, scale):
    p = scores(q, k, causal, scale).exp()  # the maximum is not subtracted
    return p @ v / p.sum(-1, keepdim=True)

@register("forward_only", grad=False, head_dims=(64, 128), **FLAGS)
def forward_only(q, k, v, *, causal, scale):
    return right(q, k, v, causal=causal, scale=scale).detach()

@register("hangs", **FLAGS)
def hangs(q, k, v, *, causal, scale):
    if q.shape[2] == 129:
        time.sleep(1000)
    return right(q, k, v, causal=causal, scale=scale)

@register("unlawful", strict=False, head_dims=(64,), **FLAGS)
def unlawful(q, k, v, *, causal, scale):
    raise AssertionError
"""
LAWS = """
def test_law(impl):
    assert impl.name != "unlawful"

def test_of_something_else():
    raise AssertionError
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Leave no implementation behind."""
    monkeypatch.setattr(registry, "_impls", dict(registry._impls))


def test_tests_run_on_own_kernels(pytester, monkeypatch, capsys):
    """A right kernel passes; a wrong one fails, with a small case and a line that repeats it.

    A kernel that hangs fails that test, and the other tests are run.
    """
    for name in ("conftest.py", "pyproject.toml", "tests/test_impls.py"):
        shutil.copy(ROOT / name, pytester.path)
    info = pytester.mkdir("acme-1.2.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\nacme = nowhere\n")
    pytester.makepyfile(kernels=KERNELS, test_laws_of_mine=LAWS)
    cases = "test_cases and (q33 or (q129 and not unlawful))"
    chosen = f"test_law or ({cases}) or (test_values and extreme and float32)"
    seconds = 20 if torch.cuda.is_available() else 5  # a GPU's first test waits for its context
    how = ("--hypothesis-seed=5", "-o", f"timeout={seconds}", "-k", chosen)
    result = pytester.runpytest_subprocess(
        *("--impl", "kernels.py", *how, "test_impls.py", "test_laws_of_mine.py"), timeout=200
    )
    result.assert_outcomes(passed=13, failed=3)
    result.stdout.no_fnmatch_line("*something_else*")
    result.stdout.fnmatch_lines(
        [
            "implementations: right (kernels.py), wrong (kernels.py), *",
            "acme of package acme 1.2 cannot be loaded: ModuleNotFoundError: *",
            "right conforms: 3 clauses, 4 examples, seed 5",
            "hangs does not conform: test_cases; of 3 clauses, 4 examples, seed 5",
            "*wrong: what fails, made small*",
            "fp32-b1h1-q*-d1-full: o: *",
            "python -m flashattn.testing.repro --impl kernels.py:wrong --problem fp32-* --values=*",
            "*hangs: what fails, made small*",
            "*unlawful: what fails, made small*",
            "test_laws_of_mine.py::test_law[[]unlawful[]]",
            "pytest 'test_laws_of_mine.py::test_law[[]unlawful[]]' --impl kernels.py:unlawful *=*",
            "FAILED test_impls.py::test_cases*hangs*q129*: T*",
        ]
    )
    place = next(i for i, text in enumerate(result.outlines) if text.startswith("python -m"))
    said, (_, _, module, *arguments) = (
        result.outlines[place - 1],
        shlex.split(result.outlines[place]),
    )
    monkeypatch.setattr(sys, "argv", ["repro", *arguments])
    monkeypatch.delitem(sys.modules, module)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out == f"wrong: {said}\n"


def test_the_example_in_the_readme_conforms(pytester):
    """The kernel that README shows passes as it stands."""
    for name in ("conftest.py", "pyproject.toml", "tests/test_impls.py"):
        shutil.copy(ROOT / name, pytester.path)
    blocks = re.findall("```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (kernel,) = (block for block in blocks if "@register" in block)
    pytester.makepyfile(my_kernel=kernel)
    chosen = "test_cases and q33", "--hypothesis-seed=5"
    result = pytester.runpytest_subprocess("--impl", "my_kernel.py", "test_impls.py", "-k", *chosen)
    result.stdout.fnmatch_lines(["my_kernel conforms: 1 clauses, 1 examples, seed 5"])
    assert result.ret == 0


def test_repro_says_how_they_do(pytester, capsys):
    """Repro exits with 1 for a wrong answer, and not for a problem that is not claimed."""
    path = pytester.makepyfile(kernels=KERNELS)
    hard = ["--problem", "fp16-b1h1-q4-d16-causal", "--values", "extreme", "--scale=-0.3"]
    answers = {}
    for name in ("right", "wrong", "unlawful"):
        code = repro.main(["--impl", f"{path}:{name}", *hard])
        answers[name] = code, capsys.readouterr().out
    assert answers["right"] == (0, "right: fp16-b1h1-q4-d16-causal: within its budgets\n")
    assert answers["wrong"][0] == 1
    assert re.match("wrong: fp16-b1h1-q4-d16-causal: o: .*", answers["wrong"][1])
    assert answers["unlawful"] == (0, "unlawful: unlawful takes head dimensions 64\n")
    with pytest.raises(SystemExit):
        repro.main(["--impl", "reference", "--problem", "fp16"])
    assert "problem: wanted a name like" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        repro.main(["--impl", "reference", "--problem", "fp32-b1h1-q4-d8-full", "--scale=nan"])
    assert "scale: wanted a finite number" in capsys.readouterr().err


FUNCTIONS = """
def attention(q, k, v, *, causal, scale):
    return q

def other(q, k, v, *, causal, scale):
    return k
"""


def test_a_file_of_one_function(pytester):
    """A file that registers nothing goes by its own name; another function in it by its own."""
    path = pytester.makepyfile(torch=FUNCTIONS)
    with pytest.raises(ValueError, match="wanted a function anyone"):
        choose(f"{path}:anyone")
    assert choose(str(path)) == choose(str(path)) == ["torch"]
    assert choose(f"{path}:other") == choose(f"{path}:other") == ["other"]
    assert [asked(registry.get(name)) for name in ("torch", "other", "tiled")] == [
        str(path),
        f"{path}:other",
        "tiled",
    ]
    assert registry.get("torch")(1, 2, 3, causal=False, scale=1.0) == (1, None)
    assert registry.get("other")(1, 2, 3, causal=False, scale=1.0) == (2, None)


@pytest.mark.parametrize(
    ("source", "option", "words"),
    [
        (None, "{path}", "wanted a file, got .*, which is none"),
        ("", "{path}", r"wanted a function attention\(q, k, v.* got neither"),
        ("attention = 3", "{path}", r"wanted a function attention\(q, k, v.* got neither"),
        (KERNELS, "{path}:nobody", "wanted a function nobody.* got right, wrong, forward_only"),
        (
            "import json\njson.loads('')",
            "{path}",
            "mine.py cannot be loaded: line 2: JSONDecodeError: ",
        ),
        ("def (", "{path}", r"cannot be loaded: .*SyntaxError: .*\(mine.py, line 1\)"),
        (FUNCTIONS, "{path}:print", "wanted a function print"),
        ("def tiled(): pass", "{path}:tiled", "name: wanted one that is not taken, got 'tiled'"),
        (KERNELS.replace('"wrong"', '"triton"'), "{path}", "name: wanted one that is not taken"),
        ("", "nobody", "impl: wanted one of triton, hopper, tiled, reference, .*, got 'nobody'"),
    ],
)
def test_files_that_hold_none(tmp_path, source, option, words):
    """An --impl that cannot be found or loaded is refused by name, and registers nothing."""
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    before = registry.names()
    with pytest.raises(ValueError, match=words):
        choose(option.format(path=path))
    assert registry.names() == before


def test_usage_error(pytester):
    """On the command line a bad --impl is a usage error."""
    shutil.copy(ROOT / "conftest.py", pytester.path)
    result = pytester.runpytest_inprocess("--impl", "absent.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --impl absent.py: wanted a file, *"])
