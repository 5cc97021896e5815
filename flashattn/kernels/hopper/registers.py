"""Registers: packed 16-bit pairs, multiplications that a warp can skip, an opaque copy.

Triton keeps a loop-carried 16-bit number in a 32-bit register, and packs and unpacks it in each
step: that was an eighth of the instructions of a forward step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
TO_FP32 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
APART = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.constexpr_function
def acc_layout(columns):
    """Return the layout of a warpgroup's accumulator with ``columns`` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Return the layout of a left operand in registers, for a product with ``columns`` columns."""
    return gl.DotOperandLayout(0, acc_layout(columns), 2)


@gluon.jit
def pack(x, dtype: gl.constexpr):
    """Round fp32 x [rows, columns] to a dtype, and return packed pairs [rows, columns / 2]."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    ROUND: gl.constexpr = TO_FP16 if dtype == gl.float16 else TO_BF16
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], gl.int32, True, 1)


@gluon.jit
def to_fp32(x):
    """Return 16-bit numbers in fp32; for two of bf16 the compiler would use three instructions."""
    if x.dtype == gl.bfloat16:
        numbers = gl.inline_asm_elementwise(TO_FP32, "=f,=f,r", [x], gl.float32, True, 2)
    else:
        numbers = x.to(gl.float32)
    return numbers


@gluon.jit
def bits_as(x, DTYPE: gl.constexpr):
    """Reinterpret 16-bit numbers as another 16-bit dtype."""
    return x.to(DTYPE, bitcast=True)


@gluon.jit
def unpack(packed, DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    """Unpack numbers to the left operand [rows, columns] of a product with COLUMNS columns."""
    even, odd = gl.inline_asm_elementwise(APART, "=h,=h,r", [packed], (gl.int16, gl.int16), True, 1)
    L: gl.constexpr = operand_layout(COLUMNS)
    numbers = gl.reshape(gl.join(even, odd), [packed.shape[0], 2 * packed.shape[1]])
    return gl.convert_layout(numbers.to(DTYPE, bitcast=True), L, assert_trivial=True)


# Each thread holds the factors of two rows.
ANY_CHANGES = gl.constexpr(
    "{ .reg .pred any, other; setp.neu.f32 any, $2, 0f3F800000; setp.neu.f32 other, $3, 0f3F800000;"
    " or.pred any, any, other; vote.sync.any.pred any, any, 0xffffffff; selp.b32 $0, 1, 0, any;"
    " mov.b32 $1, $0; }"
)


@gluon.jit
def any_changes(factors):
    """Return, for each row, whether any row of its warp has a factor other than 1."""
    return gl.inline_asm_elementwise(ANY_CHANGES, "=r,=r,f,f", [factors], gl.int32, True, 2)


@gluon.constexpr_function
def scale_text(n):
    """Return PTX that multiplies n numbers by n factors if a flag is set."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred any; setp.ne.b32 any, ${3 * n}, 0; @!any bra done; {products} done: }}"


@gluon.constexpr_function
def scale_operands(n):
    """Return the constraints of ``scale_text``: results are in the registers of the numbers."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def scale_where(acc, factors, flags):
    """Return an accumulator whose rows are multiplied in warps that have a flag."""
    N: gl.constexpr = acc.shape[1] // 2
    TEXT: gl.constexpr = scale_text(N)
    of_rows = [acc, factors[:, None], flags[:, None]]
    return gl.inline_asm_elementwise(TEXT, scale_operands(N), of_rows, gl.float32, True, N)


OPAQUE = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def opaque(x):
    """Return a copy of x that the compiler does not recognize as x.

    If a tile stays in place during a loop, the compiler keeps its addresses in registers, one for
    each 16 columns that are multiplied. With an opaque index, each step computes them again.
    """
    return gl.inline_asm_elementwise(OPAQUE, "=r,r", [gl.to_tensor(x)], gl.int32, False, 1)
