"""Matrix products for head dimensions that are sums of two powers of two, such as 64 + 32.

Shapes in Gluon are powers of two, so a tile has room for 128 columns, or is a ``SplitTile`` of two
pieces; D_LO + D_HI columns are multiplied. An accumulator is a tuple of D_LO columns and, unless
D_HI is 0, of D_HI columns. Values may have other columns than queries and keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashattn.kernels.hopper.registers import (
    acc_layout,
    any_changes,
    operand_layout,
    scale_where,
    unpack,
)

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.constexpr_function
def products(d_hi):
    """Return how many ``warpgroup_mma`` a product of D_LO + D_HI columns takes."""
    return 1 if d_hi == 0 else 2


@gluon.jit
def zero_acc(D_LO: gl.constexpr, D_HI: gl.constexpr):
    """Return a zero accumulator of a warpgroup's rows."""
    first = gl.zeros([ROWS, D_LO], gl.float32, acc_layout(D_LO))
    if D_HI == 0:
        accs = (first,)
    else:
        rest = gl.zeros([ROWS, D_HI], gl.float32, acc_layout(D_HI))
        accs = (first, rest)  # type: ignore[assignment]
    return accs


@gluon.jit
def mma_qk(a, b, D_LO: gl.constexpr, D_HI: gl.constexpr, start=None):
    """Start the product of a [64, D] and b [rows, D] transposed, added to ``start`` if not None."""
    first = b if D_HI == 0 else b.slice(0, D_LO, dim=1)
    ADDS: gl.constexpr = start is not None
    if start is not None:
        acc = start
    else:
        COLUMNS: gl.constexpr = first.shape[0]
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout(COLUMNS))
    if D_HI == 0:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=ADDS, is_async=True)
    else:
        x = a.slice(0, D_LO, dim=1)
        acc = warpgroup_mma(x, first.permute((1, 0)), acc, use_acc=ADDS, is_async=True)
        x, y = a.slice(D_LO, D_HI, dim=1), b.slice(D_LO, D_HI, dim=1)
        acc = warpgroup_mma(x, y.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def mma_pv(p, x, accs, D_LO: gl.constexpr, D_HI: gl.constexpr):
    """Start adding the product of p [64, rows] and x [rows, D] to an accumulator."""
    if D_HI == 0:
        accs = (warpgroup_mma(p, x, accs[0], is_async=True),)
    else:
        first = warpgroup_mma(p, x.slice(0, D_LO, dim=1), accs[0], is_async=True)
        p = gl.convert_layout(p, operand_layout(D_HI), assert_trivial=True)
        rest = warpgroup_mma(p, x.slice(D_LO, D_HI, dim=1), accs[1], is_async=True)
        accs = (first, rest)
    return accs


@gluon.jit
def mma_packed(p, x, accs, D_LO: gl.constexpr, D_HI: gl.constexpr):
    """Do the same as ``mma_pv`` for a packed p."""
    return mma_pv(unpack(p, x.dtype, D_LO), x, accs, D_LO, D_HI)


@gluon.jit
def mma_wait(x, LATER: gl.constexpr):
    """Return the result of product x, once at most LATER later products are in flight."""
    return warpgroup_mma_wait(LATER, deps=[x])


@gluon.jit
def acc_wait(accs, LATER: gl.constexpr, D_HI: gl.constexpr):
    """Do the same as ``mma_wait`` for an accumulator."""
    if D_HI == 0:
        accs = (warpgroup_mma_wait(LATER, deps=[accs[0]]),)
    else:
        first, rest = warpgroup_mma_wait(LATER, deps=[accs[0], accs[1]])
        accs = (first, rest)
    return accs


@gluon.jit
def scale_rows(x, factors):
    """Return x with each row multiplied by its factor."""
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factors, L, assert_trivial=True)[:, None]


@gluon.jit
def scale_acc(accs, factors, D_HI: gl.constexpr):
    """Return an accumulator with each row multiplied by its factor."""
    if D_HI == 0:
        accs = (scale_rows(accs[0], factors),)
    else:
        accs = (scale_rows(accs[0], factors), scale_rows(accs[1], factors))
    return accs


@gluon.jit
def rescale_acc(accs, factors, D_HI: gl.constexpr):
    """Do the same as ``scale_acc``; a warp skips it if all factors of its rows are 1."""
    L: gl.constexpr = gl.SliceLayout(1, accs[0].type.layout)
    factors = gl.convert_layout(factors, L, assert_trivial=True)
    flags = any_changes(factors)
    first = scale_where(accs[0], factors, flags)
    if D_HI == 0:
        accs = (first,)
    else:
        H: gl.constexpr = gl.SliceLayout(1, accs[1].type.layout)
        factors = gl.convert_layout(factors, H, assert_trivial=True)
        flags = gl.convert_layout(flags, H, assert_trivial=True)
        accs = (first, scale_where(accs[1], factors, flags))
    return accs


@gluon.jit
def store_acc(accs, factor, tile, D_LO: gl.constexpr, D_HI: gl.constexpr):
    """Scale an accumulator, round it, and store it in a tile of shared memory.

    The tile is [64, D], or a ``SplitTile`` whose first piece has the accumulator's columns.
    """
    first = tile.slice(0, D_LO, dim=1)
    first.store((accs[0] * factor).to(first.dtype))
    if D_HI > 0:
        rest = tile.slice(D_LO, D_HI, dim=1)
        rest.store((accs[1] * factor).to(first.dtype))


@gluon.jit
def store_global(x, total, strides, place, head, start, size, head_dim):
    """Store a sum [64, columns] to rows ``start ...`` of a head of x, below row ``size``."""
    layout: gl.constexpr = total.type.layout
    rows = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    stride_b, stride_h, stride_t = strides
    base = x + place.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    at = rows.to(gl.int64)[:, None] * stride_t + columns[None, :]
    gl.store(base + at, total, mask=(rows < size)[:, None] & (columns < head_dim)[None, :])
