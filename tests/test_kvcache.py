"""flash_attn_with_kvcache: flash-attn 2.8's signature, what is written, and right results."""

import inspect
from unittest.mock import Mock

import pytest
import torch

from flashattn.integrations import kvcache
from flashattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

SIGNATURE = {
    "q": inspect.Parameter.empty,
    "k_cache": inspect.Parameter.empty,
    "v_cache": inspect.Parameter.empty,
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
LENGTHS, KEYS, CACHED = (3, 0, 17), 24, 4
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, -1)},
    "two-sided": {"window_size": (5, 2)},
    "softcap": {"causal": True, "softcap": 0.7, "softmax_scale": 0.3},
}


def drawn(device, *sizes):
    """Return random tensors [..., heads, 16]: the first, q, with 4 heads, others with 2."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((*size, 2 if i else 4, 16) for i, size in enumerate(sizes))
    return [torch.randn(x, generator=generator, device=device, dtype=dtype) for x in shapes]


def test_signature():
    """Arguments, their order and their defaults are flash-attn's."""
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    assert {x.name: x.default for x in parameters} == SIGNATURE
    assert {x.kind for x in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("more", ["", "leftpad", "batch_idx", "leftpad batch_idx"])
def test_numbers(mask, new, queries, more, device):
    """Each sequence attends to its cached and new keys; the rest of the cache may be NaN."""
    q, k_cache, v_cache, k, v = drawn(device, (3, queries), *[(CACHED, KEYS)] * 2, *[(3, new)] * 2)
    places = [2, 0, 3] if "batch_idx" in more else [0, 1, 2]
    starts = [1, 0, 9] if "leftpad" in more else [0, 0, 0]
    given = dict(MASKS[mask])
    if "batch_idx" in more:
        given["cache_batch_idx"] = torch.tensor(places, dtype=torch.int32, device=device)
    if "leftpad" in more:
        given["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32, device=device)
    if new:
        given |= {"k": k, "v": v}
    wanted = [k_cache.clone(), v_cache.clone()]
    for i, (place, start, length) in enumerate(zip(places, starts, LENGTHS, strict=True)):
        for cache, x, after in zip((k_cache, v_cache), (k, v), wanted, strict=True):
            for one in (cache, after):
                one[place, :start] = torch.nan
                one[place, length:] = torch.nan
            after[place, length : length + new] = x[i]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True, **given
    )
    assert o.is_contiguous()
    for cache, after in zip((k_cache, v_cache), wanted, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), after.nan_to_num(7.0))
    for i, (place, start, length) in enumerate(zip(places, starts, LENGTHS, strict=True)):
        own = [x[place, start : length + new][None] for x in wanted]
        one, one_lse = flash_attn_func(q[i : i + 1], *own, return_lse=True, **MASKS[mask])
        tolerance = {"rtol": 0.0, "atol": 8 * torch.finfo(q.dtype).eps}
        torch.testing.assert_close(o[i], one[0], **tolerance)
        torch.testing.assert_close(lse[i], one_lse[0], **tolerance)


@pytest.mark.parametrize("length", [None, 5, KEYS])
def test_lengths_of_all(length, device):
    """An int is the length of every sequence, None that of the cache; later rows do not count."""
    q, *caches = drawn(device, (3, 2), (CACHED, KEYS), (CACHED, KEYS))
    lengths = torch.full((3,), length or KEYS, dtype=torch.int64, device=device)
    given = {"causal": True, "cache_seqlens": length}
    got = flash_attn_with_kvcache(q, *caches, **given)
    assert torch.equal(got, flash_attn_with_kvcache(q, *caches, **given, num_splits=3))
    given["cache_seqlens"] = lengths
    assert torch.equal(got, flash_attn_with_kvcache(q, *caches, **given))
    own = (x[:3, : length or KEYS] for x in caches)
    eps = torch.finfo(q.dtype).eps
    torch.testing.assert_close(got, flash_attn_func(q, *own, causal=True), rtol=0, atol=8 * eps)


def test_layers_share_masks(device, monkeypatch):
    """The mask is made once for all layers, and again when the lengths change in place."""
    made = Mock(wraps=kvcache._rows)
    monkeypatch.setattr(kvcache, "_rows", made)
    q, *caches = drawn(device, (3, 1), (3, KEYS), (3, KEYS))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    for step in range(2):
        results = [
            flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True)
            for layer in range(3)
        ]
        assert made.call_count == step + 1
        own = (x[:1, : int(lengths[0])] for x in caches)
        eps = torch.finfo(q.dtype).eps
        wanted = flash_attn_func(q[:1], *own, causal=True)
        torch.testing.assert_close(results[-1][:1], wanted, rtol=0, atol=8 * eps)
        lengths += 1


@pytest.mark.parametrize("name", ["block_table", "alibi_slopes", "rotary_cos", "rotary_sin"])
def test_what_we_lack_is_refused(name, device):
    """An unsupported argument is refused by name."""
    q, *caches = drawn(device, (3, 1), (3, KEYS), (3, KEYS))
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        flash_attn_with_kvcache(q, *caches, **{name: torch.ones(3, 1, device=device)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": None}, "v: wanted new values where there are new keys"),
        ({"cache_seqlens": None}, "cache_seqlens: wanted where the new keys go"),
        ({"v": torch.ones(3, 2, 2, 16)}, r"v: wanted shape \[3, 1, 2, 16\], got \[3, 2, 2, 16\]"),
        ({"k": torch.ones(2, 1, 2, 16)}, r"k: wanted shape \[3, 1, 2, 16\], got \[2, 1, 2, 16\]"),
        ({"k": [1]}, r"k: wanted a tensor \[batch, seqlen,"),
        (
            {"v": torch.ones(3, 1, 2, 16).half()},
            "v: wanted torch.float32 on cpu, got torch.float16",
        ),
        ({"q": None}, r"q: wanted a tensor \[batch, seqlen,"),
        ({"q": torch.ones(3, 1, 4, 16).half()}, "k_cache: wanted q's dtype, torch.float16"),
        ({"q": torch.ones(3, 1, 3, 16)}, "k_cache: wanted a divisor of 3 heads, got 2"),
        ({"v_cache": torch.ones(3, KEYS, 16)}, r"v_cache: wanted a tensor \[batch, seqlen,"),
        ({"v_cache": torch.ones(2, KEYS, 2, 16)}, r"v_cache: wanted shape \[3, 24, 2, 16\]"),
        (
            {"q": torch.ones(4, 1, 4, 16), "k": None, "v": None},
            "k_cache: wanted 4 sequences, got 3",
        ),
        ({"k_cache": torch.ones(3, KEYS, 2, 8)}, r"k_cache: wanted shape \[3, 24, 2, 16\]"),
        ({"window_size": 3}, "window_size: wanted"),
        ({"softcap": -1.0}, "softcap: wanted"),
        ({"softmax_scale": "x"}, "softmax_scale: wanted a finite number"),
        ({"cache_seqlens": KEYS}, "cache_seqlens: wanted 0 ... 23, got 24"),
        (
            {"cache_seqlens": torch.tensor([3, -1, 3])},
            r"cache_seqlens: wanted 0 ... 23, got \[3, -1",
        ),
        (
            {"cache_seqlens": torch.tensor([3, KEYS, 3])},
            r"cache_seqlens: wanted 0 ... 23, got \[3, 24",
        ),
        ({"cache_seqlens": torch.tensor([3])}, r"cache_seqlens: wanted integers \[3\] on cpu, got"),
        ({"cache_seqlens": 2.7}, "cache_seqlens: wanted a tensor, got float"),
        ({"cache_seqlens": True}, "cache_seqlens: wanted a tensor, got bool"),
        ({"cache_batch_idx": [0, 1, 2]}, "cache_batch_idx: wanted a tensor, got list"),
        ({"cache_batch_idx": torch.tensor([0, -1, 2])}, "cache_batch_idx: wanted 0 ... 2, got"),
        (
            {"cache_batch_idx": torch.ones(3).bool()},
            "cache_batch_idx: wanted a 1-dimensional int32",
        ),
        ({"cache_leftpad": torch.ones(3)}, "cache_leftpad: wanted a 1-dimensional int32 or int64"),
        ({"cache_leftpad": torch.tensor([0, -1, 2])}, "cache_leftpad: wanted 0 ... 24, got"),
    ],
)
def test_bad_arguments(change, words):
    """Bad arguments are refused by name before anything is written."""
    names = ("q", "k_cache", "v_cache", "k", "v")
    tensors = drawn(torch.device("cpu"), (3, 1), (3, KEYS), (3, KEYS), (3, 1), (3, 1))
    given = dict(zip(names, tensors, strict=True)) | {"cache_seqlens": 3} | change
    caches = [given[name] for name in ("k_cache", "v_cache")]
    before = [x.clone() for x in caches]
    with pytest.raises(ValueError, match=words):
        flash_attn_with_kvcache(**given)
    assert all(map(torch.equal, caches, before))


def test_no_sequences():
    """A batch without sequences has no output."""
    q, k, v = drawn(torch.device("cpu"), (0, 1), (3, KEYS), (3, KEYS))
    lengths = torch.zeros(0, dtype=torch.int32)
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths).shape == q.shape
