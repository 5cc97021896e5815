"""A bias on the device, which is added to the scores of a head.

A warpgroup loads whole rows, and brings them into the layout of scores through shared memory. If
they were loaded in that layout, each load of a warp would touch eight rows, which takes the L1
cache eight cycles. A relative bias is one row: it is loaded in the layout of scores, as the initial
accumulator of S.
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.bf16x3 import leading_bits
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.registers import acc_layout, bits_as, to_fp32
from flashattn.plan import bias

MARGIN = gl.constexpr(bias.MARGIN)
STRIP_ROWS, STRIP_COLUMNS = gl.constexpr(64), gl.constexpr(8)  # scores that are loaded at once


@gluon.constexpr_function
def rows_layout(columns):
    """Return the layout in which a warpgroup loads rows of ``columns`` keys, 16 bytes a thread."""
    across = columns // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@aggregate
class Bias:
    """The bias of all heads; after ``of_head``, of one head; after ``of_rows``, of a query tile.

    A stride is None where the dimension is broadcast. ``length`` is that of a relative bias,
    ``vector`` the number of keys that are loaded together, and ``rows`` the offsets of the queries.
    """

    start: gl.tensor
    batch: gl.tensor | gl.constexpr
    head: gl.tensor | gl.constexpr
    query: gl.tensor | gl.constexpr
    key: gl.tensor | gl.constexpr
    length: gl.tensor | gl.constexpr
    vector: gl.constexpr
    rows: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, start, batch, head, query, key, length, vector, rows=None):
        """Store the fields; strides that are Python integers, such as 1, become constexprs."""
        self.start = start
        self.batch = gl.constexpr(batch) if batch is None or isinstance(batch, int) else batch
        self.head = gl.constexpr(head) if head is None or isinstance(head, int) else head
        self.query = gl.constexpr(query) if query is None or isinstance(query, int) else query
        self.key = gl.constexpr(key) if key is None or isinstance(key, int) else key
        self.length = gl.constexpr(length) if length is None or isinstance(length, int) else length
        self.vector = gl.constexpr(vector)
        self.rows = gl.constexpr(None) if rows is None else rows

    @gluon.jit
    def of_head(self, batch, head):
        """Return the bias of a head."""
        V: gl.constexpr = self.vector
        start = self.start
        if self.batch is not None:
            start += batch.to(gl.int64) * (self.batch // V * V)
        if self.head is not None:
            start += head.to(gl.int64) * (self.head // V * V)
        return Bias(start, None, None, self.query, self.key, self.length, V)

    @gluon.jit
    def of_rows(self, start_q, seq_q, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """Return the bias of a tile's queries; rows of padding repeat the last query's."""
        V: gl.constexpr = self.vector
        if self.length is not None:
            start = self.start + (MARGIN + seq_q - 1 - start_q)
            tile = Bias(start, None, None, None, None, self.length, V)
        else:
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows_layout(COLUMNS)))
            rows = gl.minimum(start_q + rows, seq_q - 1)
            at = rows * 0
            if self.query is not None:
                at = rows.to(gl.int64) * (self.query // V * V)
            tile = Bias(self.start, None, None, None, self.key, None, V, at)
        return tile

    @gluon.jit
    def load(self, start_kv, seq_kv, COLUMNS: gl.constexpr, ALL_KEYS: gl.constexpr):
        """Load a tile of keys, all of which exist if ALL_KEYS; return None if bias is relative."""
        V: gl.constexpr = self.vector
        bias = None
        if self.length is None:
            start_kv = start_kv // COLUMNS * COLUMNS  # tells the compiler that it is a multiple
            keys = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, rows_layout(COLUMNS)))
            if self.key is not None:
                at = self.rows[:, None] + ((start_kv + keys).to(gl.int64) * self.key)[None, :]
            else:
                at = self.rows[:, None] + (keys * 0)[None, :]
            if ALL_KEYS:
                bias = gl.load(self.start + at)
            else:
                there = keys // V < (seq_kv - start_kv) // V
                bias = gl.load(self.start + at, mask=there[None, :], other=0.0)
        return bias

    @gluon.jit
    def by_distance(self, start_kv, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr):
        """Load a tile of a relative bias in the layout of scores; return None for another bias.

        The tile is [keys, queries] if TRANSPOSED.
        """
        bias = None
        if self.length is not None:
            layout: gl.constexpr = acc_layout(STRIP_COLUMNS)
            SIGN: gl.constexpr = -1 if TRANSPOSED else 1
            rows = gl.arange(0, STRIP_ROWS, layout=gl.SliceLayout(1, layout))
            columns = gl.arange(0, STRIP_COLUMNS, layout=gl.SliceLayout(0, layout))
            apart = (columns[None, :] - rows[:, None]) * SIGN
            bias = load_columns(self.start + start_kv + apart, SIGN * STRIP_COLUMNS, WIDTH)
        return bias


@gluon.jit
def load_columns(pointers, STEP: gl.constexpr, WIDTH: gl.constexpr):
    """Load [STRIP_ROWS, WIDTH] in strips: pointers are to the first, and the next is STEP further.

    A thread thus computes few addresses, and the others differ by constants. The compiler does not
    see these constants in the addresses of a whole tile.
    """
    if WIDTH == STRIP_COLUMNS:
        x = gl.load(pointers)
    else:
        HALF: gl.constexpr = WIDTH // 2
        first = load_columns(pointers, STEP, HALF)
        rest = load_columns(pointers + STEP * (HALF // STRIP_COLUMNS), STEP, HALF)
        x = gl.reshape(gl.permute(gl.join(first, rest), (0, 2, 1)), [STRIP_ROWS, WIDTH])
        x = gl.convert_layout(x, acc_layout(WIDTH), assert_trivial=True)
    return x


@gluon.jit
def new_bias(bias, strides, VECTOR: gl.constexpr):
    """Return the bias of all heads, or None where there is none."""
    found = None
    if bias is not None:
        found = Bias(bias, *strides, VECTOR)
    return found


@gluon.jit
def as_scores(bias):
    """Return a tile of a bias in the layout of scores."""
    return gl.convert_layout(bias, acc_layout(bias.shape[1]))


@gluon.jit
def exchanged(bias, place):
    """Do the same as ``transposed`` for a tile that is exact in bf16 or in place's dtype."""
    if bias.dtype == gl.float32:
        place.store(bits_as(bias.to(gl.bfloat16), place.dtype))
        x = bits_as(place.permute((1, 0)).load(acc_layout(bias.shape[0])), gl.bfloat16)
    else:
        place.store(bias)
        x = place.permute((1, 0)).load(acc_layout(bias.shape[0]))
    return to_fp32(x)


@gluon.jit
def transposed(bias, place):
    """Transpose a tile of a bias through ``place``; return it in fp32 as scores [keys, queries].

    An fp32 bias is exchanged as two bf16 terms, which hold 16 bits: P is rounded to fewer.
    """
    if bias.dtype == gl.float32:
        high = leading_bits(bias, 0)
        rest = gl.where(high == bias, 0.0, bias - high)  # an infinity has no rest
        x = exchanged(high, place) + exchanged(rest, place)
    else:
        x = exchanged(bias, place)
    return x
