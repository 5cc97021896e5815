"""The registry: implementations by name, plugins, and reasons for what they cannot do."""

import sys
from functools import partial

import pytest
import torch

from flashattn import registry
from flashattn.problem import Problem


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Leave no implementation behind."""
    monkeypatch.setattr(registry, "_impls", dict(registry._impls))


def test_everyone_is_registered():
    """Our implementations come first, then the peers."""
    names = registry.names()
    assert names[:4] == ("triton", "hopper", "tiled", "reference")
    assert {"naive", "compiled"} < set(names)
    assert {"sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex"} < set(names)
    assert {"flash_attn_2", "flash_attn_3", "flash_attn_4"} < set(names)


@pytest.mark.parametrize("name", ["triton", "auto"])
def test_a_name_is_taken_once(name):
    """A second implementation of one name is refused, and so is any implementation named auto."""
    with pytest.raises(ValueError, match="name: wanted one that is not taken"):
        registry.register(name)(lambda q, k, v, *, causal, scale: q)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            lambda: registry.register(print),
            r'name: wanted a string, as in @register\("mine"\), got',
        ),
        (lambda: registry.register("fresh")(3), "fresh: wanted a callable, got 3"),
        (lambda: registry.register("fresh", gradient=False), "gradient: wanted one of lse, grad, "),
        (lambda: registry.register("fresh", limits=None), "limits: wanted one of lse, grad, "),
    ],
)
def test_misuse(use, words):
    """A decorator without parentheses, a non-callable and an unknown claim are refused by name."""
    with pytest.raises(TypeError, match=words):
        use()
    assert "fresh" not in registry.names()


def test_options():
    """Options besides q, k, v, causal and scale are read from a callable's signature."""
    for call, options in (
        (lambda q, k, v, *, causal, scale: q, set()),
        (lambda q, k, v, causal, scale, window=0, band=1: q, {"band"}),
        (partial(lambda q, k, v, *, scale, band=1, wide=2: q, wide=3), {"band"}),  # chosen: wide
        (lambda q, k, v, **options: q, None),
        (lambda *inputs: inputs[0], None),
        (iter, None),  # it shows no signature
    ):
        assert registry.Impl(name="fresh", call=call, limits=print).options == options


def test_sentences():
    """Limits are checked in order: gradients, logsumexp, then the implementation's own."""
    registry.register("poor", grad=False, why_not=lambda problem, device: f"poor has no {device}")(
        print
    )
    poor = registry.get("poor")
    assert poor.why_not(Problem(), "cpu", grad=True) == "poor is not differentiable"
    assert poor.why_not(Problem(), "cpu", lse=True) == "poor does not return the logsumexp"
    assert poor.why_not(Problem(), "cpu") == "poor has no cpu"


def test_what_is_not_differentiated():
    """An implementation can give a reason why a problem that it solves has no gradient."""
    said = {"why_no_grad": lambda problem, device: f"half has no gradient on {device}"}
    registry.register("half", **said)(print)
    half = registry.get("half")
    assert half.why_not(Problem(), "cpu") is None
    assert half.why_not(Problem(), "cpu", grad=True) == "half has no gradient on cpu"


def test_peers_say_why_not():
    """Every peer gives a reason, with its name in it, for a problem that only ours take."""
    dead = Problem(seq_q=9, seq_kv=0, head_dim=7, dtype="float64")
    for name in registry.names():
        reason = registry.get(name).why_not(dead, "cpu")
        assert reason is None if name in ("tiled", "reference") else reason.startswith(name)


@pytest.mark.parametrize(
    ("name", "device", "sizes", "words"),
    [
        ("sdpa_flash", "cuda", {"causal": True}, "takes no causal mask when T != S"),
        ("sdpa_flash", "cuda", {"causal": True, "seq_kv": 1}, "takes no causal mask when T != S"),
        ("sdpa_flash", "cuda", {"causal": True, "seq_kv": 24}, None),
        ("sdpa_flash", "cuda", {}, None),
        ("sdpa_flash", "cpu", {"causal": True}, None),
        ("sdpa_cudnn", "cuda", {"causal": True}, None),
        ("sdpa_cudnn", "cuda", {"causal": True, "seq_kv": 1}, "takes no single key"),
    ],
)
def test_lengths_that_torch_takes(name, device, sizes, words):
    """FlashAttention's causal mask is bottom-right, and cuDNN refuses a single key."""
    problem = Problem(**{"seq_q": 24, "seq_kv": 40, "head_dim": 16, "dtype": "float16"} | sizes)
    reason = registry.get(name).why_not(problem, torch.device(device))
    assert reason == (words and f"{name} {words}")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package of one module, with entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_broken", {})

    def installed(package, source, **announced):
        (tmp_path / f"{package}.py").write_text(source)
        monkeypatch.delitem(sys.modules, package, raising=False)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = "".join(f"{name} = {value}\n" for name, value in announced.items())
        (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{lines}")
        registry._load_plugins.cache_clear()

    yield installed
    registry._load_plugins.cache_clear()


REGISTERS = """
from flashattn import register

@register("decorated", grad=False)
def kernel(q, k, v, *, causal, scale):
    return q
"""


@pytest.mark.parametrize(
    ("source", "announced", "name"),
    [
        (REGISTERS, {"anything": "acme"}, "decorated"),
        ("def kernel(q, k, v, **_): return q", {"acme": "acme:kernel"}, "acme"),
        (REGISTERS, {"acme": "acme:kernel"}, "decorated"),
    ],
)
def test_an_installed_package_announces_itself(install, source, announced, name):
    """A module registers what it decorates; a plain function gets the entry point's name."""
    before = registry.names()
    install("acme", source, **announced)
    assert registry.names() == (*before, name)
    impl = registry.get(name)
    assert (impl.origin, impl.grad) == ("package acme 1.2", name == "acme")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (REGISTERS + "1 / 0", "ZeroDivisionError: division by zero"),
        (REGISTERS.replace("decorated", "triton"), "name: wanted one that is not taken"),
    ],
)
def test_a_broken_package_breaks_only_itself(install, source, words):
    """A package that cannot be loaded is an error only when it is asked for by name."""
    before = registry.names()
    install("acme", source, acme="acme")
    assert registry.names() == before
    assert registry.get("triton").origin == ""
    sentence = f"acme of package acme 1.2 cannot be loaded: .*{words}"
    with pytest.raises(ValueError, match=sentence):
        registry.get("acme")
    assert len(registry.broken()) == 1
