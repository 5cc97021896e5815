"""The registry: implementations by name, plugins, and sentences for what they cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashattn import registry
from flashattn.problem import Problem
from flashattn.reference import reference_attention

CONFTEST = Path(registry.__file__).parents[1] / "conftest.py"
PLUGIN = """
import torch
from flashattn import register

def only_causal(problem, device):
    return None if problem.causal else "mine is causal only"

@register("mine", why_not=only_causal)
def mine(q, k, v, *, causal, scale):
    future = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
    return (q @ k.mT * scale).masked_fill(future, -torch.inf).softmax(-1) @ v {extra}
"""
TEST = """
from flashattn.problem import Problem
from flashattn.testing.accuracy import Question, assert_accurate

def test_it(impl):
    problem = Problem(seq_q=20, head_dim=8, causal=True)
    question = Question(problem=problem, lse=impl.lse)
    assert_accurate(lambda q, k, v: impl(q, k, v, causal=problem.causal, scale=8**-0.5), question)
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Leave no implementation behind."""
    monkeypatch.setattr(registry, "_impls", dict(registry._impls))


def test_everyone_is_registered():
    """Ours come first, then the peers."""
    names = registry.names()
    assert names[:3] == ("triton", "tiled", "reference")
    assert {"naive", "compiled"} < set(names)
    assert {"sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex"} < set(names)
    assert {"flash_attn_2", "flash_attn_3", "flash_attn_4"} < set(names)


def test_register_and_get():
    """A decorated callable is found by its name, and returns o alone or (o, lse)."""

    @registry.register("mine", lse=True)
    def mine(q, k, v, *, causal, scale):
        return reference_attention(q, k, v, diagonal=0 if causal else None, scale=scale)

    impl = registry.get("mine")
    q = torch.randn(1, 1, 3, 2)
    assert impl.call is mine
    assert impl(q, q, q, causal=False, scale=1.0)[1].shape == (1, 1, 3)
    assert registry.names()[-1] == "mine"


@pytest.mark.parametrize("name", ["triton", "auto"])
def test_a_name_is_taken_once(name):
    """A second implementation of one name is refused; auto is no one's."""
    with pytest.raises(ValueError, match="name: wanted one that is not taken"):
        registry.register(name)(lambda q, k, v, *, causal, scale: q)


def test_sentences():
    """Limits are asked in order: gradients, logsumexp, then the implementation's own."""
    registry.register("poor", grad=False, why_not=lambda problem, device: f"poor has no {device}")(
        print
    )
    poor = registry.get("poor")
    assert poor.why_not(Problem(), "cpu", grad=True) == "poor is not differentiable"
    assert poor.why_not(Problem(), "cpu", lse=True) == "poor does not return the logsumexp"
    assert poor.why_not(Problem(), "cpu") == "poor has no cpu"


def test_peers_say_why_not():
    """Every peer has a sentence, with its name in it, for a problem that nobody but ours takes."""
    dead = Problem(seq_q=9, seq_kv=0, head_dim=7, dtype="float64")
    for name in registry.names():
        reason = registry.get(name).why_not(dead, "cpu")
        assert reason is None if name in ("tiled", "reference") else reason.startswith(name)


@pytest.mark.parametrize(("extra", "passed"), [("", 1), ("* 1.001", 0)])
def test_plugin_file(pytester, extra, passed):
    """--impl FILE.py runs the tests on what the file registers; a wrong kernel fails."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(mine=PLUGIN.format(extra=extra), test_it=TEST)
    result = pytester.runpytest_subprocess("--impl", "mine.py", "test_it.py")
    result.assert_outcomes(passed=passed, failed=1 - passed)


@pytest.mark.parametrize("option", ["nobody", "empty.py"])
def test_unknown_impl(pytester, option):
    """--impl with an unknown name, or a file that registers nothing, is a usage error."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(empty="", test_it=TEST)
    result = pytester.runpytest_subprocess("--impl", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --impl*"])
