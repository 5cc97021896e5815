"""Scores on the device: what becomes of products of q and k before the mask and the softmax."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.constants import LOG2E
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.portable.score import capped

TANH = gl.constexpr("tanh.approx.f32 $0, $1;")


@gluon.jit
def tanh_approx(x):
    """Return tanh(x), as fast as exp2. Tests on a GPU check that it is off by 2^-16 of itself."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def with_sink(m, l, sink):
    """Return (m, l) of rows whose softmax has one more logit, and the weight of what they summed.

    All is in base 2. It is the last of a row's states: as the first it would let P underflow.
    """
    largest = gl.maximum(m, sink)
    finite = gl.where(largest == float("-inf"), 0.0, largest)
    weight = gl.exp2(m - finite)
    return largest, l * weight + gl.exp2(sink - finite), weight


@aggregate
class Score:
    """The factors of ``kernels.portable.score.Scale`` that a kernel needs for its scores; sinks.

    Args:
        log2: on a score, where it enters exp2.
        cap: on a product, where it enters tanh; None is no softcap.
        exact: whether tanh has the bits that fp16 would show.
        sink: points to the sinks of the first batch, whose heads are neighbours; or None.
        sink_stride: from batch to batch in these.
    """

    log2: gl.tensor
    cap: gl.tensor | gl.constexpr
    exact: gl.constexpr
    sink: gl.tensor | gl.constexpr
    sink_stride: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, log2, cap, exact, sink=None, sink_stride=None):
        """Store the fields."""
        self.log2 = log2
        self.cap = gl.constexpr(None) if cap is None else cap
        self.exact = gl.constexpr(exact)
        self.sink = gl.constexpr(None) if sink is None else sink
        self.sink_stride = gl.constexpr(None) if sink_stride is None else sink_stride

    @gluon.jit
    def sink_of(self, batch, head):
        """Return the sink of a head, in base 2, or None."""
        logit = None
        if self.sink is not None:
            logit = gl.load(self.sink + (batch * self.sink_stride + head)) * LOG2E
        return logit

    @gluon.jit
    def capped(self, s):
        """Return the scores of products: where they are capped, in units of the softcap."""
        if self.cap is None:
            scores = s
        elif self.exact:
            scores = capped(s, self.cap)
        else:
            scores = tanh_approx(s * self.cap)
        return scores

    @gluon.jit
    def with_slope(self, p, product, s):
        """Return P times the slope of its scores ``capped(product)``, which dS takes in place of P.

        1 - tanh^2 is e (1 + |tanh|)^2, e = exp(-2 |x|), which says more where tanh is nearly flat.
        """
        if self.cap is None:
            sloped = p
        elif self.exact:
            sloped = p * (1 - s * s)
        else:
            root = 1 + gl.abs(s)
            log2 = gl.abs(product) * (-2 * LOG2E * gl.abs(self.cap))
            sloped = p * (gl.exp2(log2) * (root * root))
        return sloped
