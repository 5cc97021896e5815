"""The import rules: imports point down, siblings do not import each other, and import is fast."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import flashattn

PACKAGE = Path(flashattn.__file__).parent
# What each room, a top-level part of the package, may import. A room that is not listed fails.
MEANING = {"bounds", "mask", "problem", "resolve", "score"}  # what is asked for
CALL = MEANING | {"checks", "dispatch", "registry"}
ALLOWED = {
    "mask": set(),
    "bounds": {"kernels", "mask"},
    "masks": {"bounds", "checks", "dispatch"},
    "resolve": {"bounds", "dispatch", "mask", "masks", "problem"},
    "score": {"checks"},
    "checks": set(),
    "problem": {"checks", "mask", "score"},
    "dispatch": set(),
    "reference": {"bounds", "mask", "score"},
    "tiled": {"bounds", "checks", "dispatch", "mask", "problem", "score"},
    "plan": {"checks", "plan", "problem", "score"},
    "gpus": {"plan", "problem"},
    "kernels": {"gpus", "kernels", "plan", "score"},
    "batching": {"plan"},
    "ops": {"batching", "bounds", "dispatch", "kernels", "plan", "problem"},
    "prepare": {"bounds", "checks", "dispatch", "gpus", "mask", "ops", "plan", "problem", "score"},
    "weighted_sum": {"kernels"},
    "claims": {"checks", "mask", "problem"},
    "registry": MEANING | {"claims", "dispatch"},
    "impls": CALL | {"claims", "gpus", "impls", "prepare", "reference", "tiled"},
    "arguments": {"problem", "score"},
    "explanation": {
        "arguments",
        "checks",
        "gpus",
        "mask",
        "masks",
        "plan",
        "problem",
        "resolve",
        "score",
    },
    "api": CALL | {"arguments", "impls", "masks", "plan"},
    "parallel": CALL
    | {"api", "arguments", "gpus", "kernels", "masks", "ops", "parallel", "plan", "tiled"},
    "integrations": MEANING
    | {"api", "arguments", "checks", "gpus", "integrations", "masks", "ops", "plan"},
    "lm": set(),
    "costs": {"checks", "lm", "mask"},
    "training": {"checks", "lm", "parallel"},
    "testing": MEANING
    | {"checks", "impls", "parallel", "reference", "registry", "testing"}
    | {"costs", "lm", "measure", "report", "training"},
    "measure": {"measure"},
    "report": {"report"},
    "gate": {"gate", "lm", "report", "training"},
    "counts": {"checks", "counts", "gpus", "kernels", "plan", "problem", "testing"},
    "emulate": {"emulate", "kernels", "plan"},
    "sanitize": {"impls", "problem", "registry", "sanitize", "testing"},
    "__init__": {
        "api",
        "explanation",
        "masks",
        "prepare",
        "problem",
        "registry",
        "score",
        "tiled",
        "weighted_sum",
    },
}
ONLY_IN = {
    "triton": {"kernels", "measure", "counts", "emulate", "sanitize", "testing"},
    "hypothesis": {"testing"},
    "vl_convert": {"report"},
    "transformers": {"integrations"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path):
    """Return the first part of a module's name below the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path):
    """Yield every module name that a file imports, at any level."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "flashattn":
                yield from (f"flashattn.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    """A module imports only rooms below its own, and outside packages only where allowed."""
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "flashattn" and rest:
            assert rest.split(".")[0] in ALLOWED[room(path)], f"{name} in {path.name}"
        assert room(path) in ONLY_IN.get(top, {room(path)}), f"{name} in {path.name}"


def test_version_and_types():
    """The version is defined in the package's source, and the package is marked as typed."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", flashattn.__version__)
    settings = (PACKAGE.parent / "pyproject.toml").read_text()
    assert 'path = "flashattn/__init__.py"' in settings
    assert (PACKAGE / "py.typed").exists()


def test_attention_is_one_thing():
    """``flashattn.attention`` is a function, and no module has the same name."""
    assert callable(flashattn.attention)
    assert find_spec("flashattn.attention") is None


def test_report_draws_without_torch():
    """The report imports neither torch nor triton, so a laptop can plot a cluster's run."""
    for path in (PACKAGE / "report").rglob("*.py"):
        assert not {name.partition(".")[0] for name in imports(path)} & {"torch", "triton"}


def test_cold_import(tmp_path, monkeypatch):
    """Importing flashattn loads torch, but neither triton nor the plotting library.

    The tested package is found from any folder, installed or not. Without TRITON_INTERPRET=1 its
    kernels refuse CPU tensors, with a message that names the variable.
    """
    names = ("torch", "triton", "vl_convert")
    code = f"""
import sys, flashattn, torch
print([m for m in {names} if m in sys.modules], sys.path[1], flashattn.__file__, sep="\\n")
q = torch.randn(1, 1, 4, 4)
for ask in (lambda: flashattn.attention(q, q, q, impl="triton"),
            lambda: flashattn.weighted_sum(q[0, 0], q[0, 0, 0])):
    try:
        ask()
    except ValueError as error:
        print(error)
"""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    found, refused = output.splitlines()[:3], output.splitlines()[3:]
    assert found == ["['torch']", str(PACKAGE.parent), flashattn.__file__]
    assert ["TRITON_INTERPRET=1" in line for line in refused] == [True, True]


def test_every_module_has_a_caption():
    """Every module has a docstring."""
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
