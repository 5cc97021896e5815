"""FlashAttention-2 in plain PyTorch, tile by tile: readable, and without a score matrix.

Algorithms 1 (forward, online softmax) and 2 (backward by recomputation) of Dao, 2023,
"FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning". The letters are
the paper's: ``m`` running maximum, ``l`` running sum, ``lse`` logsumexp (the paper's L), ``delta``
its D = rowsum(dO * O). Half-precision inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor

from flashattn import score
from flashattn.bounds import Bounds, Intervals
from flashattn.checks import check_scale
from flashattn.dispatch import dispatch_is_trivial, no_forward_mode
from flashattn.mask import UNBOUNDED, Band, BlockRange, Causal, Mask, Window
from flashattn.problem import Problem
from flashattn.score import Terms, of_keys

BLOCK_Q = 64
BLOCK_KV = 64
NOTHING = Terms()

Gradients = tuple[torch.Tensor, ...]


def _promoted(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _tiles(size: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


def _visited(tiles: list[slice], run: BlockRange) -> Iterator[tuple[slice, bool]]:
    """Yield the tiles of a range, each with whether it needs the mask."""
    for i in range(run.first, run.end):
        yield tiles[i], not run.full <= i < run.full_end


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: slice,
    keys: slice,
    scale: float,
    softcap: float | None,
    terms: Terms,
    band: Band | Intervals | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of a tile [..., rows, keys], masked unless ``band`` is None.

    Also return the scores before ``terms`` and the mask are applied.
    """
    products = _promoted(q[..., rows, :]) @ _promoted(k[..., keys, :]).mT
    capped = score.scores(products, scale, softcap)
    s = terms.added(capped, rows, keys)
    if band is not None:
        t, key = (torch.arange(x.start, x.stop, device=q.device) for x in (rows, keys))
        s = s.masked_fill(~band.sees(t[:, None], key[None, :]), -torch.inf)
    return s, capped


def tiled_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | Intervals,
    scale: float,
    softcap: float | None = None,
    terms: Terms = NOTHING,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run algorithm 1.

    Args:
        q: [..., T, D].
        k: [..., S, D], its leading dimensions broadcastable to q's.
        v: like k.
        mask: which keys a query sees.
        scale: factor on the scores.
        softcap: bound on the scores; None means no bound.
        terms: the terms that are added to the scores.
        sink: [..., 1, 1], or None.

    Returns:
        o like q, and lse [..., T] in fp32 (fp64 for fp64 inputs).
    """
    o = torch.empty_like(q)
    lse = torch.empty_like(q[..., 0], dtype=_promoted(q[..., :0, :0]).dtype)
    band, tiles = mask.over(q.shape[-2], k.shape[-2]), _tiles(k.shape[-2], BLOCK_KV)
    for rows in _tiles(q.shape[-2], BLOCK_Q):
        acc = torch.zeros_like(_promoted(q[..., rows, :]))  # [..., BLOCK_Q, D]
        m = torch.full_like(acc[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        if sink is not None:
            m, l = m.maximum(sink), l + 1
        for keys, masked in _visited(tiles, band.key_tiles(rows.start, rows.stop, BLOCK_KV)):
            s, _ = _scores(q, k, rows, keys, scale, softcap, terms, band if masked else None)
            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
            finite = m_new.masked_fill(m_new == -torch.inf, 0)  # a row that has seen no key yet
            alpha, p = (m - finite).exp(), (s - finite).exp()
            l = l * alpha + p.sum(dim=-1, keepdim=True)
            acc = acc * alpha + p @ _promoted(v[..., keys, :])
            m = m_new
        o[..., rows, :] = acc / l.masked_fill(l == 0, 1)
        lse[..., rows] = (m + l.log())[..., 0]
    return o, lse


def tiled_backward(
    grads: tuple[torch.Tensor, torch.Tensor | None],
    saved: tuple[torch.Tensor, ...],
    *,
    mask: Mask | Intervals,
    scale: float,
    softcap: float | None = None,
    terms: Terms = NOTHING,
    sink: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> Gradients:
    """Run algorithm 2.

    Args:
        grads: the gradients of o and of lse (None when lse was not used).
        saved: q, k, v, o, lse as ``tiled_forward`` took and returned them.
        mask: as forward.
        scale: as forward.
        softcap: as forward.
        terms: as forward.
        sink: as forward.
        bias_grad: whether the gradient of a bias in ``terms`` is wanted.

    Returns:
        The gradients of q, k and v; of the bias, if it is wanted; of the sink, if there is one.
    """
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    dq = torch.zeros_like(_promoted(q))
    # Leading dimensions that k and v are broadcast over are summed at the end.
    dk, dv = (dq.new_zeros(*q.shape[:-2], *x.shape[-2:]) for x in (k, v))
    delta = (_promoted(grad_o) * _promoted(o)).sum(dim=-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    biases = [x for x in (terms.bias, terms.relative) if x is not None and bias_grad]
    dbias = [torch.zeros_like(_promoted(x), memory_format=torch.contiguous_format) for x in biases]
    band, tiles = mask.over(q.shape[-2], k.shape[-2]), _tiles(q.shape[-2], BLOCK_Q)
    for keys in _tiles(k.shape[-2], BLOCK_KV):
        for rows, masked in _visited(tiles, band.query_tiles(keys.start, keys.stop, BLOCK_Q)):
            s, x = _scores(q, k, rows, keys, scale, softcap, terms, band if masked else None)
            row_lse = lse[..., rows, None]  # where it is -inf, all keys are masked, and p is 0
            p = (s - row_lse.masked_fill(row_lse == -torch.inf, torch.inf)).exp()
            do = _promoted(grad_o[..., rows, :])
            ds = p * (do @ _promoted(v[..., keys, :]).mT - delta[..., rows, None])
            for total in dbias:
                terms.add_gradient(total, ds, rows, keys)
            ds = ds * scale
            if softcap is not None:
                ds = ds * score.slope(x, softcap)
            dv[..., keys, :] += p.mT @ do
            dk[..., keys, :] += ds.mT @ _promoted(q[..., rows, :])
            dq[..., rows, :] += ds @ _promoted(k[..., keys, :])
    others = [x.to(y.dtype) for x, y in zip(dbias, biases, strict=True)]
    if sink is not None:
        share = (sink[..., 0] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
        others.append(-(share * delta)[..., None].sum(-2, keepdim=True).sum_to_size(sink.shape))
    dk, dv = (x.sum_to_size(y.shape).to(y.dtype) for x, y in ((dk, k), (dv, v)))
    return dq.to(q.dtype), dk, dv, *others


def _mapped(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Return the inputs of a vmap rule: tensors with the mapped dimension as a leading one."""

    def leading(x: Any, dim: int | None) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    return [leading(x, dim) for x, dim in zip(inputs, in_dims, strict=True)]


class _TiledGradients(torch.autograd.Function):
    """Algorithm 2 as one step, so that a second derivative raises an error instead of being 0."""

    @staticmethod
    def forward(  # torch.compile takes no *saved with setup_context
        mask: Mask | Intervals,
        scale: float,
        softcap: float | None,
        query_offset: int,
        seq_q: int,
        bias_grad: bool,  # noqa: FBT001
        grad_o: torch.Tensor,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
        relative: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> Gradients:
        grads, saved = (grad_o, grad_lse), (q, k, v, o, lse)
        terms = Terms(alibi_slopes, bias, relative, query_offset, seq_q)
        given: dict[str, Any] = {"terms": terms, "sink": sink, "bias_grad": bias_grad}
        with torch.autocast(q.device.type, enabled=False):
            return tiled_backward(grads, saved, mask=mask, scale=scale, softcap=softcap, **given)

    @staticmethod
    def setup_context(*_: object) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        found = _TiledGradients.apply(*_mapped(info, in_dims, inputs))
        return found, (0,) * len(found)

    @staticmethod
    def backward(*_: object) -> None:
        msg = 'the tiled attention has no second derivative; impl="reference" has'
        raise NotImplementedError(msg)


class _Tiled(torch.autograd.Function):
    """Algorithms 1 and 2 as a function of q, k and v with any leading dimensions."""

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
        relative: torch.Tensor | None,
        sink: torch.Tensor | None,
        mask: Mask | Intervals,
        scale: float,
        softcap: float | None,
        query_offset: int,
        seq_q: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = Terms(alibi_slopes, bias, relative, query_offset, seq_q)
        how: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap}
        with torch.autocast(q.device.type, enabled=False):
            return tiled_forward(q, k, v, **how, terms=terms, sink=sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, *scored = inputs[:7]
        ctx.how, ctx.scored = inputs[7:], [x is not None for x in scored]
        ctx.save_for_backward(q, k, v, *output, *(x for x in scored if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once, as a checkpoint allows
        saved, scored = kept[:5], iter(kept[5:])
        saved = *saved, *(next(scored) if there else None for there in ctx.scored)
        given = () if torch.compiler.is_compiling() else (grad_o, grad_lse)
        if any(x is not None and is_legacy_batchedtensor(x) for x in given):
            raise NotImplementedError(
                "is_grads_batched, vectorize: the tiled attention takes torch.func.vmap only;"
                ' impl="reference" takes both'
            )
        grad_o = torch.zeros_like(saved[3]) if grad_o is None else grad_o
        _, bias, relative, sink = saved[5:]
        bias_grad = any(ctx.needs_input_grad[4:6])
        alone = not torch.is_grad_enabled() and dispatch_is_trivial(grad_o, grad_lse, *saved)
        dq, dk, dv, *others = (_TiledGradients.forward if alone else _TiledGradients.apply)(
            *(*ctx.how, bias_grad, grad_o, grad_lse, *saved)
        )
        rest = iter(others)
        dbias = next(rest) if bias is not None and bias_grad else None
        drelative = next(rest) if relative is not None and bias_grad else None
        dsink = next(rest) if sink is not None else None
        return dq, dk, dv, None, dbias, drelative, dsink, *[None] * len(ctx.how)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return _Tiled.apply(*_mapped(info, in_dims, inputs)), (0, 0)


class FlashAttentionPyTorch(torch.autograd.Function):
    """FlashAttention-2 as an autograd function: ``apply(Q, K, V, is_causal=False)``.

    Q is ``(batch, N_q, d)``, K and V ``(batch, N_k, d)``; returns ``(batch, N_q, d)``. It saves Q,
    K, V, O and one tensor of shape ``(batch, N_q)``: the logsumexp L. More leading dimensions work,
    too; K's and V's are broadcast to Q's. With ``return_lse=True`` it returns ``(O, L)``, both
    differentiable.

    Raises:
        ValueError: three-dimensional arguments do not fit (see ``Problem.of``).
    """

    @staticmethod
    def forward(  # noqa: D102 - autograd's names; its arguments are positional
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        is_causal: Causal = False,  # noqa: FBT002
        scale: float | None = None,
        return_lse: bool = False,  # noqa: FBT001, FBT002
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if q.ndim == 3:  # noqa: PLR2004 - (batch, N, d); with more, the caller has checked
            Problem.of(q, k, v, causal=is_causal)
        how = Mask.of(is_causal), check_scale(scale, q.shape[-1]), None, 0, q.shape[-2]
        inputs = q, k, v, None, None, None, None, *how
        o, lse = _Tiled.forward(*inputs)
        _Tiled.setup_context(ctx, inputs, (o, lse))
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv, *_ = _Tiled.backward(ctx, grad_o, grad_lse)
        return dq, dk, dv, None, None, None


def _grouped(x: torch.Tensor | None, heads: tuple[int, int]) -> torch.Tensor | None:
    """Split the head dimension of x [B, H or 1, ...] into key heads and their groups."""
    if x is None:
        return None
    return x.unflatten(1, heads if x.shape[1] == heads[0] * heads[1] else (1, 1))


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with grouped heads; the caller has checked the arguments.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, D].
        causal: see ``attention``.
        window: see ``attention``.
        bounds: the whole mask, in place of ``causal`` and ``window``.
        softcap: see ``attention``.
        alibi_slopes: [B or 1, H].
        bias: [B or 1, H or 1, T or 1, S or 1], or [B or 1, H or 1, T + S - 1].
        sink: [B or 1, H].
        scale: see ``attention``.

    Returns:
        o [B, H, T, D] and lse [B, H, T].

    Raises:
        NotImplementedError: a second or forward-mode derivative is asked for (see ``reference``).
    """
    scale, heads = check_scale(scale, q.shape[3]), (k.shape[1], q.shape[1] // max(k.shape[1], 1))
    mask: Mask | Intervals
    query_offset, seq_q = k.shape[2] - q.shape[2], q.shape[2]
    if bounds is None:
        mask = Mask.of(causal, window)
        seen = mask.over(q.shape[2], k.shape[2]).seen_keys
        query_offset -= seen.start
        bias = of_keys({"bias": bias}, seen, seq_q)["bias"]
        k, v = k[:, :, seen], v[:, :, seen]  # keys that no query sees may be NaN
    else:
        mask = Intervals(bounds, dims=2)
        q, k, v = bounds.without_unseen(q, k, v)
    given = q.unflatten(1, heads), k[:, :, None], v[:, :, None]
    terms, sinks = Terms.of(q, k, alibi_slopes, bias), sink
    if sinks is not None:
        sinks = sinks[..., None, None]
    scored = (_grouped(x, heads) for x in (*terms[:3], sinks))
    try:
        o, lse = _Tiled.apply(*given, *scored, mask, scale, softcap, query_offset, seq_q)
    except NotImplementedError as error:  # torch.compile allows no jvp method
        raise no_forward_mode("the tiled attention", error) from None
    o = o.flatten(1, 2)
    return o if bounds is None else bounds.without_fully_masked(o), lse.flatten(1, 2)
