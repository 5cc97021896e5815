"""Row masks: packed documents, padding, prefixes, chunks, any predicate; with laws for each."""

from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn import attention, masks
from flashattn.bounds import Bounds, Intervals, of_documents, of_rows
from flashattn.mask import Mask
from flashattn.masks import Sizes
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.resolve import bounds_of, cumulative
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.law import law
from flashattn.testing.results import ask, assert_agree, assert_same_bits
from flashattn.testing.sample import Sample, hidden_rows, run_guarded
from flashattn.testing.strategies import documents, lengths

PACKED = {"packed": (True,), "softcaps": (None,)}
BLOCK_Q, BLOCK_KV = 8, 4
AHEAD = st.tuples(*[st.sampled_from((0, 1, BLOCK_Q, 21))] * 2)  # rows before the first document


@st.composite
def packed_bounds(draw):
    """Draw packed documents: T, S, their lengths, and the mask within each."""
    seq_q, seq_kv = (draw(lengths(1, 40)) for _ in range(2))
    bound = st.none() | st.integers(0, 12)
    causal = draw(st.sampled_from((False, "top_left", "bottom_right")))
    mask = Mask.of(causal, (draw(bound), draw(bound)))
    return seq_q, seq_kv, draw(documents(seq_q, seq_kv, 20)), mask


@st.composite
def rows(draw):
    """Draw T, S, and each query's first and end key, which never decrease, for 1 or 2 batches."""
    seq_q, seq_kv, batch = draw(lengths(1, 40)), draw(lengths(1, 40)), draw(st.integers(1, 2))
    ends = st.lists(st.integers(0, seq_kv), min_size=seq_q, max_size=seq_q).map(sorted)
    low, high = (torch.tensor([draw(ends) for _ in range(batch)]) for _ in range(2))
    return seq_q, seq_kv, low, torch.maximum(low, high)


def by_hand(seq_q, seq_kv, packed, mask):
    """Return which keys a query sees, document by document [T, S]."""
    seen = torch.zeros(seq_q, seq_kv, dtype=torch.bool)
    at_q = at_k = 0
    for n, m in packed:
        t, s = torch.arange(n)[:, None], torch.arange(m)
        inside = mask.over(n, m).sees(t, s).expand(n, m)
        seen[at_q : at_q + n, at_k : at_k + m] = inside
        at_q, at_k = at_q + n, at_k + m
    return seen


def assert_consistent(bounds, seen):
    """Check that bounds of queries and of keys agree, never decrease and show exactly ``seen``."""
    assert torch.equal(bounds.seen, seen)
    for x in bounds:
        assert x.dtype == torch.int32
        assert x.is_contiguous()
        assert (x.diff(dim=1) >= 0).all()
    t = torch.arange(seen.shape[1])[:, None]
    first, end = (x[:, None] for x in bounds.queries.unbind(-1))
    live = ~bounds.fully_masked[..., None]
    assert torch.equal((t >= first) & (t < end) & live, seen)
    assert torch.equal(bounds.fully_masked, ~seen.any(-1))
    unseen = bounds.unseen_keys | ((t >= first) & (t < end) & live).logical_not().all(1)
    assert torch.equal(unseen, ~seen.any(1))


def assert_one_after_the_other(keys, queries, seq_q):
    """Check that the key tiles that visit a query tile are consecutive, from the first it expects.

    The semaphore of the Hopper backward relies on this: without it, a program waits forever.
    """
    for i in range(-(-seq_q // BLOCK_Q)):
        start = i * BLOCK_Q
        visitors = [
            j
            for j in range(-(-len(queries) // BLOCK_KV))
            if queries[j * BLOCK_KV][0] // BLOCK_Q <= i
            and start < queries[min((j + 1) * BLOCK_KV, len(queries)) - 1][1]
            and j * BLOCK_KV < keys[-1][1]
        ]
        if visitors:
            first = keys[start][0] // BLOCK_KV
            assert visitors == list(range(first, first + len(visitors)))


@hypothesis.given(drawn=packed_bounds(), ahead=AHEAD)
@hypothesis.example(drawn=(9, 12, ((4, 5), (5, 7)), Mask(1, 0, "bottom_right")), ahead=(0, 0))
def test_bounds_of_documents(drawn, ahead):
    """Each document has a mask of its own; rows before the first and after the last see nothing."""
    *_, packed, mask = drawn
    seen = torch.nn.functional.pad(by_hand(*drawn), (ahead[1], 0, ahead[0], 0))
    cu_q, cu_k = (x + n for x, n in zip(cumulative(packed, "cpu"), ahead, strict=True))
    bounds = of_documents(cu_q, cu_k, *seen.shape, mask)
    assert_consistent(bounds, seen[None])
    assert_one_after_the_other(bounds.keys[0].tolist(), bounds.queries[0].tolist(), len(seen))


@hypothesis.settings(max_examples=15)
@hypothesis.given(drawn=packed_bounds(), ahead=AHEAD, falls=st.booleans())
def test_the_kernel_of_documents(drawn, ahead, falls, device):
    """One launch computes the same bounds, also for cumulative lengths that decrease."""
    from flashattn.kernels.portable.document_bounds import launch  # noqa: PLC0415

    seq_q, seq_kv, packed, mask = drawn
    cu_q, cu_k = (x + n for x, n in zip(cumulative(packed, device), ahead, strict=True))
    if falls:
        cu_k = cu_k.flip(0)
    wanted = of_documents(cu_q.cpu(), cu_k.cpu(), seq_q, seq_kv, mask)
    corner = mask.corner == "bottom_right"
    got = launch(cu_q, cu_k, seq_q, seq_kv, mask.left, mask.right, bottom_right=corner)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("bound", [2**31 - 1, 2**40])
def test_the_kernel_of_documents_takes_any_window(bound, device):
    """A window that is wider than the sequence hides nothing."""
    from flashattn.kernels.portable.document_bounds import launch  # noqa: PLC0415

    cu = torch.tensor([0, 5, 12], device=device)
    wanted = launch(cu, cu, 12, 12, None, None, bottom_right=False)
    got = launch(cu, cu, 12, 12, bound, bound, bottom_right=False)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@hypothesis.given(drawn=rows())
def test_bounds_of_rows(drawn):
    """Bounds of rows are exactly the visible pairs, for queries and for keys."""
    seq_q, seq_kv, low, high = drawn
    s = torch.arange(seq_kv)
    bounds = of_rows(low, high, seq_kv)
    assert_consistent(bounds, (s >= low[..., None]) & (s < high[..., None]))
    for keys, queries in zip(bounds.keys.tolist(), bounds.queries.tolist(), strict=True):
        assert_one_after_the_other(keys, queries, seq_q)


@hypothesis.given(drawn=rows())
def test_tiles_of_intervals(drawn):
    """Visited tiles hold every visible pair, and full tiles hold no hidden one."""
    seq_q, seq_kv, low, high = drawn
    bounds = of_rows(low, high, seq_kv)
    intervals, seen = Intervals(bounds, dims=0), bounds.seen
    for start in range(0, seq_q, BLOCK_Q):
        stop = min(start + BLOCK_Q, seq_q)
        first, full, full_end, end = intervals.key_tiles(start, stop, BLOCK_KV)
        outside = torch.ones(seq_kv, dtype=torch.bool)
        outside[first * BLOCK_KV : end * BLOCK_KV] = False
        assert not seen[:, start:stop, outside].any()
        assert seen[:, start:stop, full * BLOCK_KV : full_end * BLOCK_KV].all()
    for start in range(0, seq_kv, BLOCK_KV):
        stop = min(start + BLOCK_KV, seq_kv)
        first, full, full_end, end = intervals.query_tiles(start, stop, BLOCK_Q)
        outside = torch.ones(seq_q, dtype=torch.bool)
        outside[first * BLOCK_Q : end * BLOCK_Q] = False
        assert not seen[:, outside, start:stop].any()
        assert seen[:, full * BLOCK_Q : full_end * BLOCK_Q, start:stop].all()


def sizes(seq_q=12, seq_kv=12, batch=2):
    """Return the sizes of a call on a CPU."""
    return Sizes(batch, seq_q, seq_kv, torch.device("cpu"))


def seen_of(mask, *, seq_q=12, seq_kv=12, band=Mask(), batch=2):  # noqa: B008 - frozen
    """Return which keys a query sees under a mask of rows, [B or 1, T, S]."""
    q, k = torch.zeros(batch, 1, seq_q, 4), torch.zeros(batch, 1, seq_kv, 4)
    return bounds_of(q, k, band, None, mask).seen


T, S = torch.arange(12)[:, None], torch.arange(12)[None, :]
LENGTHS = torch.tensor([5, 12])
SHORT = LENGTHS[:, None, None] > S
MASKS = {  # a mask for a device, and the pairs that it shows
    "padding": (lambda on: masks.padding(on(LENGTHS)), SHORT),
    "left padding": (lambda on: masks.padding(on(LENGTHS), side="left"), SHORT.flip(-1)),
    "prefix": (lambda on: masks.prefix(on(LENGTHS)), (S <= T) | SHORT),
    "chunked": (lambda on: masks.chunked(5), T // 5 == S // 5),
    "rows": (
        lambda on: masks.rows(on(T[:, 0] // 2), on(T[:, 0] + 1)),
        (S >= T // 2) & (S <= T),
    ),
    "predicate": (
        lambda on: masks.of(lambda b, h, t, s: (s <= t) & (s > t - 3)),
        (S <= T) & (S > T - 3),
    ),
    "batches": (lambda on: masks.of(lambda b, h, t, s: s < on(LENGTHS)[b]), SHORT),
    "bool tensor": (lambda on: masks.of(on((S <= T) & (T < 9))), (S <= T) & (T < 9)),
    "both": (
        lambda on: masks.padding(on(LENGTHS)) & masks.chunked(4),
        SHORT & (T // 4 == S // 4),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Each mask shows exactly its own pairs, also within a window."""
    make, wanted = MASKS[name]
    mask, wanted = make(lambda x: x), wanted.expand(2, 12, 12)
    assert torch.equal(seen_of(mask).expand(2, -1, -1), wanted)
    window = (T - 4 <= S) & (S <= T + 1)
    assert torch.equal(seen_of(mask, band=Mask(4, 1)).expand(2, -1, -1), wanted & window)


def test_block_masks():
    """A FlexAttention BlockMask acts as its predicate."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    block = create_block_mask(lambda b, h, t, s: t >= s, None, None, 12, 12, device="cpu")
    assert torch.equal(seen_of(masks.of(block), batch=1), (S <= T)[None])
    small = create_block_mask(lambda b, h, t, s: t >= s, None, None, 12, 9, device="cpu")
    with pytest.raises(ValueError, match=r"BlockMask's \(1, 12, 9\), got \(1, 12, 12\)"):
        seen_of(masks.of(small), batch=1)
    with pytest.raises(ValueError, match=r"mask: the predicate cannot be evaluated.*sliced"):
        seen_of(masks.of(block[:, :, :1]))


@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_without_a_predicate(batch):
    """Of a BlockMask made of blocks, a query sees the blocks; mask_mod counts in partial ones."""
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415

    one, order = torch.ones(batch, 2, 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    blocks = torch.stack([order.roll(-i) for i in range(3)]).expand(batch, 2, 3, 3).contiguous()
    if batch > 1:
        blocks[1, :, 0, :2] = torch.tensor([1, 0])  # another block for the second sequence
    shown = torch.stack([T // 4 == S // 4, (T.clamp(min=4) // 4) == S // 4])[:batch]

    def made(*full, **how):
        return masks.of(BlockMask.from_kv_blocks(one, blocks, *full, BLOCK_SIZE=4, **how))

    def before(b, h, t, s):
        del b, h
        return s <= t

    assert torch.equal(seen_of(made(), batch=batch), shown)
    if batch > 1:
        with pytest.raises(ValueError, match=r"BlockMask's \(2, 12, 12\), got \(3, 12, 12\)"):
            seen_of(made(), batch=3)
    partial = made(mask_mod=before)
    if batch == 1:  # in the other, queries see nothing at first
        assert torch.equal(seen_of(partial, batch=1), shown & (S <= T))
    assert torch.equal(seen_of(made(one, blocks, mask_mod=before), batch=batch), shown)
    blocks[:, 1, 0, :2] = torch.tensor([2, 0])
    with pytest.raises(ValueError, match="visits others in each head"):
        made()


def test_only_masks_meet():
    """A mask meets no tensor and no number."""
    for other in (torch.ones(12, 12).bool(), 3):
        with pytest.raises(TypeError, match="unsupported operand"):
            masks.chunked(3) & other


def dilated(b, h, t, s):
    """Let a query see every second key."""
    del b, h
    return (s <= t) & ((t - s) % 2 == 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: seen_of(masks.of(dilated)), "query 2 sees keys that are not next to one another"),
        (lambda: seen_of(masks.of(S <= 11 - T)), "query 1 sees begin or end before"),
        (lambda: seen_of(masks.of(S >= 11 - T)), "query 1 sees begin or end before"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: s < h + t)), "which head it is"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: s < h / 2)), "which head it is"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: s == h)), "which head it is"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: s < LENGTHS[h])), "which head it is"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: s < (b if h else t))), "which head it is"),
        (lambda: seen_of(masks.of(S[:, :5] <= T)), "wanted a bool tensor for"),
        (lambda: seen_of(masks.of(lambda b, h, t, s: t - s)), "returns one bool, got torch.int64"),
        (
            lambda: seen_of(masks.of(lambda b, h, t, s: (t >= s).expand(3))),
            r"bool, got torch.bool \[3",
        ),
        (lambda: seen_of(masks.of(lambda b, h, t, s: True)), "cannot be evaluated by torch.vmap"),
        (
            lambda: seen_of(masks.of(lambda t, s: t >= s)),
            "cannot be evaluated by torch.vmap: .*4 were",
        ),
        (lambda: masks.of(torch.ones(5, 12)), r"wanted bool \[T, S\]"),
        (lambda: masks.of("causal"), "a predicate of"),
        (lambda: masks.padding([3, 4]), "lengths: wanted a tensor, got list"),
        (lambda: masks.padding(LENGTHS.float()), "lengths: wanted a 1-dimensional int32 or int64"),
        (lambda: masks.padding(LENGTHS, side="top"), "side: wanted right or left"),
        (lambda: seen_of(masks.padding(LENGTHS), batch=3), "rows for 3 batches or one, got 2"),
        (lambda: masks.chunked(0), "length: wanted a positive int"),
        (lambda: masks.rows(LENGTHS, LENGTHS.flip(0)), "high: wanted numbers that never fall"),
        (lambda: masks.rows(LENGTHS, LENGTHS[:1]), "high: wanted low's shape"),
        (lambda: seen_of(masks.rows(LENGTHS, LENGTHS)), "wanted 12 rows, one a query, got 2"),
        (lambda: seen_of(masks.prefix(LENGTHS), band=Mask(right=0)), "leave causal out"),
        (lambda: seen_of(S <= T), "wanted an object of flashattn.masks, got Tensor"),
    ],
)
def test_bad_masks(make, words):
    """An invalid row mask is refused, with the reason."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("cu", "words"),
    [
        ([0, 5, 12], "wanted a tensor, got list"),
        (torch.tensor([0.0, 12.0]), "wanted a 1-dimensional int32 or int64 tensor"),
        (torch.tensor([[0, 12]]), "wanted a 1-dimensional"),
        (torch.tensor([0]), r"wanted \[N \+ 1\] of queries and of keys"),
        (torch.tensor([1, 12]), "wanted numbers from 0 to 12 at the most that never fall"),
        (torch.tensor([0, 9, 5]), "never fall"),
        (torch.tensor([0, 13]), "from 0 to 12 at the most"),
        ((torch.tensor([0, 5]), torch.tensor([0, 5, 6])), r"wanted \[N \+ 1\]"),
        ((torch.tensor([0, 5]),) * 3, r"wanted cu or \(cu_q, cu_k\), got 3"),
        (torch.tensor([0, 5], device="meta"), "wanted q's device, cpu, got meta"),
    ],
)
def test_bad_documents(cu, words):
    """Cumulative lengths that do not fit are refused before any launch."""
    q = torch.zeros(1, 1, 12, 4)
    with pytest.raises(ValueError, match=words):
        attention(q, q, q, documents=cu)


def test_bounds_are_kept():
    """Layers share cached bounds; changed lengths, other sizes and other masks get their own."""
    q, cu = torch.zeros(1, 1, 12, 4), torch.tensor([0, 5, 12])
    one = bounds_of(q, q, Mask(), cu, None)
    assert bounds_of(q, q, Mask(), cu, None) is one
    assert bounds_of(q, q, Mask(right=0), cu, None) is not one
    assert bounds_of(q, q[:, :, :8], Mask(), (cu, cu.clamp(max=8)), None) is not one
    cu[1] = 7
    assert torch.equal(bounds_of(q, q, Mask(), cu, None).seen, seen_of_documents(cu))
    padding = masks.padding(torch.tensor([3]))
    assert bounds_of(q, q, Mask(), None, padding) is bounds_of(q, q, Mask(), None, padding)
    assert bounds_of(q, q, Mask(), cu, padding) is not bounds_of(q, q, Mask(), None, padding)


def seen_of_documents(cu):
    """Return which keys a query sees under packed documents, [1, T, S]."""
    document = torch.searchsorted(cu[1:], torch.arange(12), right=True)
    return (document[:, None] == document)[None]


def test_bounds_that_are_made_already():
    """Precomputed bounds are used as they are; a window, documents and other masks hide more."""
    q, k, cu = torch.zeros(2, 1, 12, 4), torch.zeros(2, 1, 12, 4), torch.tensor([0, 5, 12])
    made = of_rows((T[:, 0] - 6)[None], (T[:, 0] + 2)[None], 12)
    mask = masks.of_bounds(made)
    assert bounds_of(q, k, Mask(), None, mask) is made
    window = (S >= T - 3) & (S <= T + 1)
    assert torch.equal(bounds_of(q, k, Mask(3), None, mask).seen[0], window)
    padded = bounds_of(q, k, Mask(), None, mask & masks.padding(LENGTHS))
    assert torch.equal(padded.seen, made.seen & SHORT)
    packed = bounds_of(q, k, Mask(), cu, mask)
    assert torch.equal(packed.seen, made.seen & seen_of_documents(cu))
    assert bounds_of(q, k, Mask(), cu, masks.of_bounds(made)) is packed
    for x, y in ((q[:, :, :5], k), (q, k[:, :, :5])):
        with pytest.raises(ValueError, match="mask: wanted one for B, T, S = "):
            bounds_of(x, y, Mask(), None, mask)
    three = of_rows(*(x.expand(3, -1) for x in made.keys.unbind(-1)), 12)
    with pytest.raises(ValueError, match=r"\[2, 12, 12\], got one for \[3, 12, 12\]"):
        bounds_of(q, k, Mask(), None, masks.of_bounds(three))


def test_nothing_is_kept_alive():
    """Cached bounds are freed with the lengths that they were made from."""
    from flashattn.resolve import _KEPT  # noqa: PLC0415

    q, cu = torch.zeros(1, 1, 12, 4), torch.tensor([0, 5, 12])
    before = len(_KEPT)
    bounds_of(q, q, Mask(), cu, None)
    assert len(_KEPT) == before + 1
    del cu
    assert len(_KEPT) == before


@law(asked=PACKED, needs="intervals")
def test_one_document(impl, sample):
    """One document of all rows hides nothing: the result is that without documents."""
    p = sample.problem
    whole = replace(sample, problem=replace(p, documents=((p.seq_q, p.seq_kv),)))
    assert_agree(ask(impl, replace(sample, problem=replace(p, documents=None))), ask(impl, whole))


@law(asked={"prefixed": (True,), "softcaps": (None,)}, needs="intervals")
def test_ends_of_a_prefix(impl, sample):
    """A prefix of no key is causal, and one of all keys hides nothing."""
    for prefix, causal in ((0, True), (sample.problem.seq_kv, False)):
        band = replace(sample.problem, prefix=None, causal=causal)
        rows = replace(sample.problem, prefix=prefix)
        one, other = (ask(impl, replace(sample, problem=p)) for p in (band, rows))
        assert_agree(one, other)


@law(asked=PACKED, needs="intervals")
def test_documents_are_calls(impl, sample):
    """A document's results are those of a separate call."""
    p = sample.problem
    packed = ask(impl, sample)
    at_q = at_k = 0
    for n, m in p.documents:
        rows, keys = slice(at_q, at_q + n), slice(at_k, at_k + m)
        at_q, at_k = at_q + n, at_k + m
        if 0 in (n, m, p.batch):
            continue
        alone = replace(p, seq_q=n, seq_kv=m, documents=None)
        cut = {name: keys if name in ("dk", "dv") else rows for name in packed.got}

        def change(case, rows=rows, keys=keys, alone=alone):
            q, k, v = case.inputs
            return replace(
                case,
                problem=alone,
                inputs=(q[:, :, rows], k[:, :, keys], v[:, :, keys]),
                grad_o=None if case.grad_o is None else case.grad_o[:, :, rows],
                grad_lse=None if case.grad_lse is None else case.grad_lse[:, :, rows],
            )

        one = ask(impl, sample, change)
        got = {name: x[:, :, cut[name]] for name, x in packed.got.items()}
        assert_agree(one, replace(packed, case=one.case, change=change, got=got))


@law(asked={"batches": (2, 3), "windowed": (False,), "softcaps": (None,)}, needs="intervals")
def test_batches_have_their_own_keys(impl, sample):
    """Each padded batch has the results of a call on its own rows, then zeros (lse: -inf)."""
    p, draw = sample.problem, torch.Generator().manual_seed(sample.seed)
    sizes = [
        [int(torch.randint(1, n + 1, (), generator=draw)) for n in (p.seq_q, p.seq_kv)]
        for _ in range(p.batch)
    ]
    case = sample.draw()
    padded = replace(p, causal=False, documents=((p.seq_q, p.seq_kv),))
    reason = impl.why_not(padded, sample.device, grad=case.grad_o is not None)
    hypothesis.assume(reason is None)
    each = [
        of_documents(*cumulative((tuple(own),), sample.device), p.seq_q, p.seq_kv, p.mask)
        for own in sizes
    ]
    bounds = Bounds(*map(torch.cat, zip(*each, strict=True)))
    call = partial(impl, causal=False, bounds=bounds, scale=case.scale)
    padded = run_guarded(call, case)
    for i, (n, m) in enumerate(sizes):

        def change(case, i=i, n=n, m=m):
            case = case.batches(i, p.batch)
            q, k, v = case.inputs
            grads = case.grad_o, case.grad_lse
            grad_o, grad_lse = (None if x is None else x[:, :, :n] for x in grads)
            return replace(
                case,
                problem=replace(case.problem, seq_q=n, seq_kv=m),
                inputs=(q[:, :, :n], k[:, :, :m], v[:, :, :m]),
                grad_o=grad_o,
                grad_lse=grad_lse,
            )

        alone, got = ask(impl, sample, change), {}
        for name, x in padded.items():
            end = m if name in ("dk", "dv") else n
            assert (x[i, :, end:] == (-torch.inf if name == "lse" else 0)).all()
            got[name] = x[i : i + 1, :, :end]
        assert_agree(alone, replace(alone, got=got))


@law(asked=PACKED, needs="intervals")
def test_rows_in_no_document(impl, sample):
    """Keys that no query sees and queries that see none, even NaN, have no effect or gradient."""
    dead, unseen = hidden_rows(sample.problem, sample.device)
    hypothesis.assume(dead.any() or unseen.any())
    plain, changed = (
        ask(impl, sample, lambda case, value=value: case.with_hidden(value))
        for value in (0.0, torch.nan)
    )
    for name, x in changed.got.items():
        assert_same_bits(name, plain.got[name], x)
        rows = x[:, :, unseen if name in ("dk", "dv") else dead]
        assert (rows == (-torch.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("ours", ["tiled", "triton", "auto"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(ours, device, name):
    """Under each mask results and gradients are those of the reference, in fp32."""
    mask = MASKS[name][0](lambda x: x.to(device))
    problem = Problem(batch=2, heads=2, kv_heads=1, seq_q=12, head_dim=16)
    q, k, v = (x.to(device) for x in make_inputs(problem))
    grad_o = make_grads(problem)[0].to(device)
    results = []
    for impl, dtype in ((ours, torch.float32), ("reference", torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = attention(*inputs, mask=mask, window=(6, None), impl=impl)
        results.append((o, *torch.autograd.grad(o, inputs, grad_o.to(dtype))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=32 * torch.finfo(q.dtype).eps)


@pytest.mark.parametrize("name", ["triton", "tiled", "reference"])
def test_band_given_as_rows(name, device):
    """A causal mask given as rows is causal."""
    problem = Problem(heads=2, kv_heads=1, seq_q=90, head_dim=32, dtype="bfloat16")
    q, k, v = make_inputs(problem, device=device)
    t = torch.arange(90, device=device)
    one = attention(q, k, v, causal=True, return_lse=True, impl=name)
    other = attention(q, k, v, mask=masks.rows(0 * t, t + 1), return_lse=True, impl=name)
    for output, x, y in zip(("o", "lse"), one, other, strict=True):
        assert_same_bits(output, x, y)


def test_one_graph_for_all_documents(device):
    """With lengths as an input, one compiled graph serves all lengths."""
    compiled = torch.compile(
        lambda q, cu: attention(q, q, q, documents=cu, causal=True, impl="triton"),
        backend="aot_eager",
        fullgraph=True,
    )
    q = make_inputs(Problem(seq_q=60, head_dim=16), device=device)[0].requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cu in ([0, 20, 60], [0, 33, 50]):
            lengths_ = torch.tensor(cu, device=device, dtype=torch.int32)
            got = compiled(q, lengths_)
            wanted = attention(q, q, q, documents=lengths_, causal=True, impl="triton")
            assert_same_bits("o", got, wanted)
            (one,), (other,) = (torch.autograd.grad(x.sum(), q) for x in (got, wanted))
            assert_same_bits("dq", one, other)


# Queries without keys, and keys without queries: before, between and after the others.
WITH_GAPS = (10, 0), (0, 20), (40, 70), (0, 60), (20, 0), (50, 140)


@pytest.mark.parametrize("scores", [{}, {"softcap": 2.0}, {"sink": True}], ids=str)
@pytest.mark.parametrize("ours", ["tiled", "triton", "auto"])
def test_what_lies_in_no_document_is_hidden(ours, scores, device):
    """Keys that no query sees and queries that see none, even NaN, have no effect or gradient."""
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "seq_q": 130, "seq_kv": 330, "head_dim": 16}
    problem = Problem(**sizes, causal=True, documents=WITH_GAPS)
    dead, unseen = hidden_rows(problem, device)
    if "sink" in scores:
        scores = {"sink": torch.tensor([0.5, -1.0], device=device, requires_grad=True)}
    given = {"documents": cumulative(WITH_GAPS, device), "causal": True, "return_lse": True}
    drawn, found = Sample(problem=problem, device=device).draw(), []
    for value in (0.0, torch.nan):
        case = drawn.with_hidden(value)
        leaves = [x.requires_grad_() for x in case.inputs]
        o, lse = attention(*leaves, impl=ours, **given, **scores)
        leaves += filter(torch.is_tensor, scores.values())
        found.append([o, lse, *torch.autograd.grad(o, leaves, case.grad_o)])
    for name, one, other in zip(("o", "lse", "dq", "dk", "dv", "dsink"), *found, strict=False):
        assert_same_bits(name, one, other)
    o, _, *grads = found[1]
    for x, rows in zip((o, *grads[:3]), (dead, dead, unseen, unseen), strict=True):
        assert x.any()
        assert not x[:, :, rows].any()


@pytest.mark.parametrize(
    "hidden",
    [
        lambda call, cu: partial(call, documents=cu),
        lambda call, cu: partial(call, mask=masks.padding(cu[1:] + 1)),
        lambda *_: partial(get("triton"), documents=((3, 3), (5, 5))),
    ],
    ids=["documents", "padding", "lengths"],
)
def test_bounds_made_for_inference_serve_training(hidden, device):
    """Bounds that a call in inference mode has cached can be saved for a backward."""
    q, k, v = make_inputs(Problem(batch=2, heads=2, seq_q=8, head_dim=16), device=device)
    call = hidden(
        partial(attention, impl="triton", return_lse=True), torch.tensor([0, 3, 8]).to(device)
    )
    with torch.inference_mode():
        inferred, _ = call(q, k, v)
    o, _ = call(q.requires_grad_(), k, v)
    o.sum().backward()
    assert torch.equal(o, inferred)


def test_chunks_count_positions_of_the_corner():
    """With a bottom-right mask the last queries see what they see beside all queries."""
    q, k, v = make_inputs(Problem(batch=2, heads=2, seq_q=12, head_dim=16), device="cpu")
    whole = attention(q, k, v, causal=True, mask=masks.chunked(5))
    for rows in (1, 4, 7):
        last = q[:, :, -rows:], k, v
        o = attention(*last, causal="bottom_right", mask=masks.chunked(5))
        torch.testing.assert_close(o, whole[:, :, -rows:])


@pytest.mark.parametrize(("batch", "seq_q"), [(0, 8), (2, 0)])
def test_masks_of_nothing(batch, seq_q):
    """Masks that are evaluated take no batches and no queries."""
    q, k, v = make_inputs(Problem(batch=2, heads=2, seq_q=8, head_dim=16), device="cpu")
    q, k, v = q[:batch, :, :seq_q], k[:batch], v[:batch]
    seen = torch.ones(batch, seq_q, 8, dtype=torch.bool)
    for mask in (masks.of(seen), masks.of(seen[:, None]), masks.of(lambda b, h, t, s: s <= t)):
        assert attention(q, k, v, mask=mask).shape == q.shape


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # of mapped lengths
def test_a_mapped_mask_of_tiled_is_refused():
    """The tiled attention reads bounds on the host, so that vmap cannot map them."""
    q, k, v = make_inputs(Problem(batch=2, heads=2, seq_q=8, head_dim=16), device="cpu")

    def masked(lengths):
        return attention(q, k, v, mask=masks.padding(lengths), impl="tiled")

    with pytest.raises(NotImplementedError, match=r"takes none that torch.func.vmap maps"):
        torch.func.vmap(masked)(torch.tensor([[5, 7], [2, 8]]))
