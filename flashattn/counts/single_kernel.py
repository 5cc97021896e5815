"""Run a single backward kernel in isolation, for tuning, resource counts and tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from flashattn.gpus import gpu_of
from flashattn.kernels.execute import BOUND, Bound
from flashattn.kernels.portable import steps
from flashattn.plan import portable
from flashattn.plan.plan import BackwardPlan
from flashattn.plan.precision import input_precision
from flashattn.plan.rows import Kernel
from flashattn.plan.spec import Options, Signature, TensorSpec, signature
from flashattn.plan.tile import Tile

NAMES = ("q", "k", "v", "grad_o", "o", "lse", "grad_lse")
ROWS = ("lse_log2", "delta")
ALONE = BackwardPlan(kernel="portable")
OF = {"dk": 1, "dv": 2, "dq": 0}  # positions of the inputs that gradients are like


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What a kernel recomputes P and dS from.

    q, k, v, grad_o and o have dense rows. ``num_splits`` is the maximum of a pass; None leaves it
    to the plan.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_o: torch.Tensor
    grad_lse: torch.Tensor | None
    o: torch.Tensor
    lse: torch.Tensor
    right: int | None
    scale: float
    precision: str = "auto"
    num_splits: int | None = None

    @cached_property
    def preprocessed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """lse_log2 and delta."""
        bound = _preprocess(signature(self.o, self.grad_o))
        lse_log2, delta = bound(self.o, self.grad_o, self.lse, self.grad_lse)
        return lse_log2, delta

    def gradients(self, kernel: Kernel, tile: Tile | None = None) -> tuple[torch.Tensor, ...]:
        """Launch a kernel with the table's tile or another.

        Args:
            kernel: one of ``steps.KERNELS``.
            tile: the tile to use; None is the table's.

        Returns:
            dk and dv, dq, or all three.
        """
        inputs = self.q, self.k, self.v, self.grad_o, self.o
        options = Options(self.right, self.scale, input_precision(self.precision, self.q.dtype))
        bound = _alone(kernel, signature(*inputs), options, tile, self.num_splits)
        rows = (None, None) if kernel == "bwd_one_launch" else self.preprocessed
        grads: tuple[torch.Tensor, ...] = bound(*inputs, self.lse, self.grad_lse, *rows)
        return grads


@lru_cache(BOUND)
def _preprocess(given: tuple[Signature, ...]) -> Bound:
    """Return flashattn_bwd_preprocess, bound to a signature."""
    o, grad_o = (TensorSpec(*x) for x in given)
    outputs, runs = portable.row_workspaces(o), [steps.preprocessing(o, grad_o)]
    return Bound(("o", "grad_o", "lse", "grad_lse"), {}, outputs, ALONE, runs, o.device)


@lru_cache(BOUND)
def _alone(
    kernel: Kernel,
    given: tuple[Signature, ...],
    options: Options,
    tile: Tile | None,
    num_splits: int | None,
) -> Bound:
    """Return one pass, with the launches that decompose its inputs and add its partials."""
    specs = [TensorSpec(*x) for x in given]
    q, k, v, grad_o, _ = specs
    one = portable.backward_pass(
        kernel,
        *specs[:4],
        gpu=gpu_of(q.device),
        causal=options.causal,
        precision=options.precision,
        tile=tile,
        most=num_splits,
    )
    grads = steps.WRITTEN[kernel]
    splits = {name: one.splits[-1 if name == "dq" else 0].num for name in grads}
    summed = {name: (specs[i], splits.get(name, 1)) for name, i in OF.items()}
    decomposing, *_ = steps.terms(one.terms, q=q, k=k, v=v, grad_o=grad_o)
    run = steps.backward_pass(one, specs, options.precision, options)
    workspaces = portable.terms_workspaces(one.terms, q=q, k=k, v=v, grad_o=grad_o)
    for name in grads:
        workspaces += portable.partials(splits[name], **{name: summed[name][0]})
    plan = ALONE._replace(passes=(one,), workspaces=workspaces)
    outputs = {name: NAMES[OF[name]] for name in grads}
    runs = [*decomposing, run, *steps.sum_partials(summed)]
    return Bound((*NAMES, *ROWS), outputs, [], plan, runs, q.device)


def decompose(*inputs: torch.Tensor, terms: int) -> tuple[torch.Tensor, ...]:
    """Launch flashattn_decompose; return the bf16 terms of fp32 q, k, v and perhaps grad_o."""
    filled: tuple[torch.Tensor, ...] = _decompose(signature(*inputs), terms)(*inputs)
    return filled


@lru_cache(BOUND)
def _decompose(given: tuple[Signature, ...], terms: int) -> Bound:
    """Return flashattn_decompose, bound to a signature."""
    inputs = dict(zip(steps.INPUTS, (TensorSpec(*x) for x in given), strict=False))
    decomposing, _, _ = steps.terms(terms, **inputs)
    workspaces = portable.terms_workspaces(terms, **inputs)
    return Bound(tuple(inputs), {}, workspaces, ALONE, decomposing, inputs["q"].device)
