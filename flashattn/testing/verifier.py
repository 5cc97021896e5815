"""Verify the results of an implementation before it is timed, so that nothing wrong is timed.

Exact results take a score matrix in fp64. Heads are independent, so only the first and the last
group of heads are verified. Of a long causal problem, only the last queries and keys are verified:
no other query sees these keys, so they are a problem of their own, aligned at the bottom right.
With a bias, all rows are verified. The gradient of a bias or of sinks is verified only where no
other batch, head or row contributes to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.accuracy import OF_KEYS, Expected
from flashattn.testing.inputs import make_grads, make_inputs, make_scored
from flashattn.testing.sample import LEARNED, Case

SCORES_VERIFIED = 1 << 26  # scores of all heads; several copies in fp64 take a few GiB
SCORES_OF_A_GROUP = 1 << 29
OF_SCORES = tuple(f"d{name}" for name in LEARNED)
LAST = 2048  # verified queries of a longer problem
Part = tuple[int, slice, slice, slice]  # a batch, its query heads, its key heads, the rows


@dataclass
class Verifier:
    """Verifies one implementation on one problem."""

    impl: Impl
    problem: Problem
    device: torch.device
    facts: dict[str, Any]  # filled in by ``admit``

    def admit(self, passes: str) -> str | None:
        """Record the facts; return why the case cannot be solved, as a sentence, or None."""
        self.facts |= {
            "impl": self.impl.name,
            "problem": str(self.problem),
            **asdict(self.problem),
            "pass": passes,
            "flops": self.problem.flops(passes),
            "bytes": self.problem.bytes(passes),
        }
        return self.impl.why_not(self.problem, self.device, grad=passes != "forward")

    def check(self, **outputs: torch.Tensor | None) -> None:
        """Check outputs, any of o, lse and gradients, against their budgets.

        Raises:
            AssertionError: some outputs exceed their budgets, and the message says which, and by
                how much; or they have another dtype; or the logsumexp that was claimed is missing.
        """
        wanted = self.problem.torch_dtype
        for name, x in outputs.items():
            if x is None and name == "lse" and self.impl.lse:
                raise AssertionError(f"{self.impl.name}: lse: wanted the logsumexp, got None")
            if x is not None and name in ("o", "dq", "dk", "dv") and x.dtype != wanted:
                raise AssertionError(f"{self.impl.name}: {name}: wanted {wanted}, got {x.dtype}")
        grad = not {"dq", "dk", "dv"}.isdisjoint(outputs)
        for part, expected in _expected(self.problem, self.device, grad=grad):
            got = {
                name: self._own(name, x.detach(), part)
                for name, x in outputs.items()
                if x is not None and not self._shared(name, x, part)
            }
            broken = expected.failures(got)
            if broken:
                raise AssertionError(f"{self.impl.name}: " + "; ".join(broken))

    @staticmethod
    def _own(name: str, x: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the slice of an output that belongs to a part."""
        batch, queries, keys, rows = part
        if name in OF_SCORES:
            return _of_heads(x, batch, queries)
        return x[batch, keys if name in OF_KEYS else queries, rows][None]

    def _shared(self, name: str, x: torch.Tensor, part: Part) -> bool:
        """Return whether other parts contribute to the gradient of a bias or of sinks."""
        counts = self.problem.batch, self.problem.heads
        several = any(n == 1 < count for n, count in zip(x.shape[:2], counts, strict=True))
        return name in OF_SCORES and (several or part[-1] != slice(None))


@lru_cache(maxsize=1)  # one implementation after another runs a problem
def _expected(
    problem: Problem, device: torch.device, *, grad: bool
) -> Iterable[tuple[Part, Expected]]:
    """Return the verified parts of the outputs, and what each is compared with."""
    inputs, group = make_inputs(problem, device=device), problem.heads // problem.kv_heads
    scored = make_scored(problem, device=device)
    grad_o = make_grads(problem, device=device)[0] if grad else None
    scale, queries = problem.head_dim**-0.5, problem.batch * problem.heads * problem.seq_q
    whole = None  # so few heads say little about naive's error: use all, if there is room
    if queries * problem.seq_kv <= SCORES_VERIFIED:
        whole = Case(problem=problem, inputs=inputs, scored=scored, scale=scale, grad_o=grad_o)
    rows = _rows(problem)
    few = replace(problem, batch=1, heads=group, kv_heads=1)
    if rows != slice(None):
        few = replace(few, seq_q=LAST, causal="bottom_right")
    parts = []
    for batch, g in sorted({(0, 0), (problem.batch - 1, problem.kv_heads - 1)}):
        heads, keys = slice(g * group, (g + 1) * group), slice(g, g + 1)
        q, k, v = (
            x[batch, part][None] for x, part in zip(inputs, (heads, keys, keys), strict=True)
        )
        case = Case(
            problem=few,
            inputs=(q[..., rows, :], k, v),
            scored={name: _of_heads(x, batch, heads) for name, x in scored.items()},
            scale=scale,
            grad_o=None if grad_o is None else grad_o[batch, heads, rows][None],
        )
        parts.append(((batch, heads, keys, rows), Expected.of(case, whole).of_keys(rows)))
    return parts


def _of_heads(x: torch.Tensor, batch: int, heads: slice) -> torch.Tensor:
    """Return the slopes, bias or sinks of some heads of a batch."""
    x = x if x.shape[0] == 1 else x[batch][None]
    return x if x.shape[1] == 1 else x[:, heads]


def _rows(problem: Problem) -> slice:
    """Return the rows that are verified: all, or the last of a long causal problem with T = S."""
    group = problem.heads // problem.kv_heads
    square = problem.causal and problem.seq_q == problem.seq_kv and not problem.bias
    if not square or group * problem.seq_q * problem.seq_kv <= SCORES_OF_A_GROUP:
        return slice(None)
    return slice(problem.seq_q - LAST, problem.seq_q)
