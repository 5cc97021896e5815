"""Scores on the device, from products of q and k to what the mask and the softmax take."""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.constants import LN2, LOG2E
from flashattn.kernels.hopper.bias import Bias, as_scores
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.registers import to_fp32
from flashattn.kernels.portable.score import capped

TANH = gl.constexpr("tanh.approx.f32 $0, $1;")


@gluon.jit
def tanh_approx(x):
    """Return tanh(x), as fast as exp2; GPU tests check that its relative error is at most 2^-16."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def with_sink(m, l, sink):
    """Return (m, l) of rows with the sink's logit added, and the factor of their previous sums.

    All logits are in base 2. The sink is a row's last state: as the first it would let P underflow.
    """
    largest = gl.maximum(m, sink)
    finite = gl.where(largest == float("-inf"), 0.0, largest)
    weight = gl.exp2(m - finite)
    return largest, l * weight + gl.exp2(sink - finite), weight


@aggregate
class Score:
    """The factors of ``kernels.portable.score.Scale`` that scores need, and what is added to them.

    ``slope`` and ``sink`` point to the numbers of the first batch. After ``of_head`` they are the
    numbers of a head, in base 2. Each may be None, and so may the bias.

    Args:
        log2: factor of a score in the argument of exp2.
        cap: factor of a product in the argument of tanh; None means no softcap.
        exact: whether tanh is exact enough for fp16.
        slope: slope of ALiBi.
        slopes_stride: stride between batches.
        query_offset: query t is at the position of key t + query_offset.
        before: whether no query sees a key behind its own position.
        sink: sink of a row's softmax.
        sink_stride: stride between batches.
        bias: bias of all scores; after ``of_rows``, of a tile's queries.
    """

    log2: gl.tensor
    cap: gl.tensor | gl.constexpr
    exact: gl.constexpr
    slope: gl.tensor | gl.constexpr
    slopes_stride: gl.tensor | gl.constexpr
    query_offset: gl.tensor | gl.constexpr
    before: gl.constexpr
    sink: gl.tensor | gl.constexpr
    sink_stride: gl.tensor | gl.constexpr
    bias: Bias | gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        log2,
        cap,
        exact,
        slope=None,
        slopes_stride=None,
        query_offset=None,
        before=None,
        sink=None,
        sink_stride=None,
        bias=None,
    ):
        """Store the fields."""
        self.log2 = log2
        self.cap = gl.constexpr(None) if cap is None else cap
        self.exact = gl.constexpr(exact)
        self.slope = gl.constexpr(None) if slope is None else slope
        self.slopes_stride = gl.constexpr(None) if slopes_stride is None else slopes_stride
        self.query_offset = gl.constexpr(None) if query_offset is None else query_offset
        self.before = gl.constexpr(before)
        self.sink = gl.constexpr(None) if sink is None else sink
        self.sink_stride = gl.constexpr(None) if sink_stride is None else sink_stride
        self.bias = gl.constexpr(None) if bias is None else bias

    @gluon.jit
    def of_head(self, batch, head):
        """Return the scores of a head."""
        slope, sink, bias = self.slope, self.sink, self.bias
        if slope is not None:
            slope = gl.load(slope + (batch * self.slopes_stride + head)) * LOG2E
        if sink is not None:
            sink = gl.load(sink + (batch * self.sink_stride + head)) * LOG2E
        if bias is not None:
            bias = bias.of_head(batch, head)
        offset = self.query_offset
        return Score(
            self.log2, self.cap, self.exact, slope, None, offset, self.before, sink, None, bias
        )

    @gluon.jit
    def of_rows(self, start_q, seq_q, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """Return the scores of a query tile of a head, with the bias of its queries, if any."""
        bias = self.bias
        if bias is not None:
            bias = bias.of_rows(start_q, seq_q, ROWS, COLUMNS)
        slope, offset, sink = self.slope, self.query_offset, self.sink
        return Score(
            self.log2, self.cap, self.exact, slope, None, offset, self.before, sink, None, bias
        )

    @gluon.jit
    def load_bias(self, start_kv, seq_kv, COLUMNS: gl.constexpr, ALL_KEYS: gl.constexpr):
        """Return the bias of a tile of keys, or None; the next two methods add a relative bias."""
        bias = None
        if self.bias is not None:
            bias = self.bias.load(start_kv, seq_kv, COLUMNS, ALL_KEYS)
        return bias

    @gluon.jit
    def initial_acc(self, start_kv, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr):
        """Return the initial accumulator of q k: a relative bias, or None."""
        bias = None
        if self.cap is None and self.bias is not None:
            bias = self.bias.by_distance(start_kv, WIDTH, TRANSPOSED)
        return bias

    @gluon.jit
    def added_to_capped(self, x, start_kv, TRANSPOSED: gl.constexpr):
        """Return scores in base 2, plus a relative bias if they are capped."""
        if self.cap is not None and self.bias is not None:
            bias = self.bias.by_distance(start_kv, x.shape[1], TRANSPOSED)
            if bias is not None:
                x += bias * LOG2E
        return x

    @gluon.jit
    def sloped(self, x, start_q, start_kv, TRANSPOSED: gl.constexpr):
        """Return scores in base 2 with ALiBi; the tile is [keys, queries] if TRANSPOSED."""
        if self.slope is not None:
            layout: gl.constexpr = x.type.layout
            rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
            columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
            ahead = start_q + self.query_offset - start_kv
            rows = rows - ahead if TRANSPOSED else rows + ahead
            apart = rows.to(gl.float32)[:, None] - columns.to(gl.float32)[None, :]
            x -= self.slope * gl.abs(apart)
        return x

    @gluon.jit
    def in_base_2(self, s, start_q, start_kv, bias=None):
        """Return (s, log2, far) of what ``capped`` returned: scores are s * log2 - far in base 2.

        The tile is [queries, keys], and ``bias`` is its bias or None. If no query sees a key behind
        its own position, ALiBi is the sum of a number for each key, which is added to s, and of one
        for each row, ``far``; ``nearer`` and ``farther`` apply ``far`` to row maxima instead.
        """
        log2, far = self.log2, 0.0
        if bias is not None:
            s = s * (log2 * LN2) + to_fp32(as_scores(bias))
            log2 = LOG2E
        elif self.cap is not None and self.bias is not None:
            s = self.added_to_capped(s * log2, start_kv, False)
            log2 = 1.0
        if self.slope is not None:
            s = s * log2
            log2 = 1.0
            if self.before:
                layout: gl.constexpr = s.type.layout
                rows = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout))
                keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
                s = s + (self.slope * keys.to(gl.float32))[None, :]
                far = self.slope * (rows + (start_q + self.query_offset - start_kv)).to(gl.float32)
            else:
                s = self.sloped(s, start_q, start_kv, False)
        return s, log2, far

    @gluon.jit
    def nearer(self, m, far):
        """Return row maxima of the scores from the maxima of s * log2 of ``in_base_2``."""
        if self.slope is not None:
            m = m - far
        return m

    @gluon.jit
    def farther(self, m, far):
        """Undo ``nearer``: return maxima of s * log2."""
        if self.slope is not None:
            m = m + far
        return m

    @gluon.jit
    def capped(self, s):
        """Return the scores of products; capped scores are in units of the softcap."""
        if self.cap is None:
            scores = s
        elif self.exact:
            scores = capped(s, self.cap)
        else:
            scores = tanh_approx(s * self.cap)
        return scores

    @gluon.jit
    def with_slope(self, p, s):
        """Return P times the softcap's slope at capped scores s; dS is computed from it."""
        return p if self.cap is None else p * (1 - s * s)
