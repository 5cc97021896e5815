"""FlashAttention in Triton, tested against naive attention and timed beside other libraries."""

from flashattn import masks
from flashattn.api import attention
from flashattn.explanation import explain
from flashattn.prepare import FlashAttentionTriton
from flashattn.problem import Problem
from flashattn.registry import get, names, register
from flashattn.score import relative
from flashattn.tiled import FlashAttentionPyTorch
from flashattn.weighted_sum import weighted_sum

__version__ = "0.1.0"  # pyproject.toml reads it here
__all__ = [
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "Problem",
    "__version__",
    "attention",
    "explain",
    "get",
    "masks",
    "names",
    "register",
    "relative",
    "weighted_sum",
]
