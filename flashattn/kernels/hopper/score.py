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


@aggregate
class Score:
    """The factors of ``kernels.portable.score.Scale`` that a kernel needs for its scores.

    Args:
        log2: on a score, where it enters exp2.
        cap: on a product, where it enters tanh; None is no softcap.
        exact: whether tanh has the bits that fp16 would show.
    """

    log2: gl.tensor
    cap: gl.tensor | gl.constexpr
    exact: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, log2, cap, exact):
        """Store the fields."""
        self.log2 = log2
        self.cap = gl.constexpr(None) if cap is None else cap
        self.exact = gl.constexpr(exact)

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
