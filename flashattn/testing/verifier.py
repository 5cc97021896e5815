"""Admits an implementation to a problem, and its results to the clock: nothing wrong is timed.

Exact results cost a score matrix in fp64. Heads do not depend on one another, so the first and the
last group of heads are verified; and of a long causal problem the last queries and keys, which is a
problem of its own, aligned at the bottom right: no other query sees these keys. With a bias all are
verified. The gradient of a bias or of sinks is verified where it is that of a head alone.
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

SCORES_VERIFIED = 1 << 26  # of all heads; in fp64, several copies at once: a few GiB
SCORES_OF_A_GROUP = 1 << 29
OF_SCORES = tuple(f"d{name}" for name in LEARNED)
LAST = 2048  # queries that are verified of a longer problem
Part = tuple[int, slice, slice, slice]  # a batch, its query heads, its key heads, the rows


@dataclass
class Verifier:
    """Verifies one implementation on one problem."""

    impl: Impl
    problem: Problem
    device: torch.device
    facts: dict[str, Any]  # which ``admit`` fills in

    def admit(self, passes: str) -> str | None:
        """Note the facts; return the sentence that says why the case cannot be solved, or None."""
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
        """Hold the outputs, any of o, lse and gradients, to their budgets against fp64.

        Raises:
            AssertionError: which outputs are off, by how much, and what was allowed.
        """
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
        """Return what a part has of an output."""
        batch, queries, keys, rows = part
        if name in OF_SCORES:
            return _of_heads(x, batch, queries)
        return x[batch, keys if name in OF_KEYS else queries, rows][None]

    def _shared(self, name: str, x: torch.Tensor, part: Part) -> bool:
        """Return whether other parts give to a gradient of what scores are made with."""
        counts = self.problem.batch, self.problem.heads
        several = any(n == 1 < count for n, count in zip(x.shape[:2], counts, strict=True))
        return name in OF_SCORES and (several or part[-1] != slice(None))


@lru_cache(maxsize=1)  # implementations of one problem run next to one another
def _expected(
    problem: Problem, device: torch.device, *, grad: bool
) -> Iterable[tuple[Part, Expected]]:
    """Return what is verified, as parts of the outputs, and what each is held against."""
    inputs, group = make_inputs(problem, device=device), problem.heads // problem.kv_heads
    scored = make_scored(problem, device=device)
    grad_o = make_grads(problem, device=device)[0] if grad else None
    scale, queries = problem.head_dim**-0.5, problem.batch * problem.heads * problem.seq_q
    whole = None  # so few heads say little about how wrong naive is: hear all, if there is room
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
    """Return what some heads of a batch have of what scores are made with."""
    x = x if x.shape[0] == 1 else x[batch][None]
    return x if x.shape[1] == 1 else x[:, heads]


def _rows(problem: Problem) -> slice:
    """Return the queries and keys that are verified: all, or the last of a long causal square."""
    group = problem.heads // problem.kv_heads
    square = problem.causal and problem.seq_q == problem.seq_kv and not problem.bias
    if not square or group * problem.seq_q * problem.seq_kv <= SCORES_OF_A_GROUP:
        return slice(None)
    return slice(problem.seq_q - LAST, problem.seq_q)
