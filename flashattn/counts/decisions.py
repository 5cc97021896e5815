"""Golden list of decisions: the plans of 20 000 problems on five GPUs, without having one.

    python -m flashattn.counts.decisions --check tests/plan/decisions.json.xz
    python -m flashattn.counts.decisions --write tests/plan/decisions.json.xz

The list has kernels, tiles, operands, splits and schedules of each plan in words. For every
``BLOCK`` problems it has a digest of the whole plans, including numbers of programs and sizes of
workspaces.

Exit status: 0 the same; 1 different.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashattn.checks import check_scale
from flashattn.plan import support
from flashattn.plan.choose import choose_backward, choose_forward
from flashattn.plan.gpu import Gpu
from flashattn.plan.plan import BackwardPlan, ForwardPlan, operands
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Family, Options, TensorSpec
from flashattn.problem import Problem

COUNT, BLOCK, SEED = 20_000, 20, 1
DIGEST = 4  # hexadecimal digits
INTERPRETER = "interpreter"
CARDS = {
    "h200": Gpu((9, 0), 132, (3, 6)),
    "h200-later": Gpu((9, 0), 132, (3, 9)),
    "a100": Gpu((8, 0), 108, (3, 6)),
    "b200": Gpu((10, 0), 148, (3, 6)),
    INTERPRETER: Gpu.INTERPRETER,
}
DTYPES: tuple[str, ...] = ("bfloat16",) * 4 + ("float16", "float32", "float32", "float32")
HEAD_DIMS: tuple[Any, ...] = (64, 128) * 6
HEAD_DIMS += (1, 2, 7, 8, 16, 17, 24, 32, 33, 40, 48, 65, 72, 80, 96, 97, 100, 112)
HEAD_DIMS += (129, 136, 160, 192, 193, 200, 224, 256, 256, 256, 320)
LENGTHS: tuple[Any, ...] = (0, 1, 1, 1, 2, 7, 16, 17, 64, 100, 128, 129, 256, 300, 500, 512, 768)
LENGTHS += (769, 1000, 1024, 1024, 2048, 2048, 3000, 4096, 4096, 8192, 8192, 16384, 32768, 65536)
HEADS = (1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 16, 32, 32, 48, 64, 128, 600)
BATCHES = (1, 1, 1, 2, 3, 4, 8, 16, 64)
MASKS = (False, "top_left", "bottom_right")
PRECISIONS = ("auto", "auto", "bf16x6", "tf32", "tf32", "tf32x3", "ieee")
SCALES = (None,) * 12 + (0.3, 0.0, -0.2)
IMPLS: tuple[Family, ...] = ("auto",) * 4 + ("triton", "hopper", "hopper")
LAYOUTS = ("contiguous",) * 10 + ("heads_last", "misaligned", "expanded", "odd_rows", "not_dense")


@dataclass(frozen=True)
class Case:
    """A problem, the layouts of its tensors, and what else a choice may depend on."""

    problem: Problem
    impl: Family
    precision: str
    scale: float | None
    deterministic: bool
    layouts: tuple[str, str, str, str]  # of q, k, v and grad_o
    grad_lse: str

    def __str__(self) -> str:
        """Return all fields in a line."""
        words = [str(self.problem), self.impl, self.precision, f"scale={self.scale}"]
        words += ["" if self.deterministic else "any-order", *self.layouts, self.grad_lse]
        return " ".join(filter(None, words))


def cases() -> list[Case]:
    """Return the cases of the list; the draws depend only on ``SEED`` and the axes."""
    drawn = random.Random(SEED)  # noqa: S311 - the same list every time is the point

    def pick(axis: Sequence[Any]) -> Any:
        return axis[int(drawn.random() * len(axis))]

    def layouts() -> tuple[Any, Any, Any, Any]:
        if drawn.random() < 0.7:  # noqa: PLR2004
            return ("contiguous",) * 4
        return pick(LAYOUTS), pick(LAYOUTS), pick(LAYOUTS), pick(LAYOUTS)

    def one() -> Case:
        kv_heads, seq_q = pick(HEADS), pick(LENGTHS)
        group = 1 if drawn.random() < 0.6 else pick((2, 3, 4, 8, 16))  # noqa: PLR2004
        problem = Problem(
            batch=pick(BATCHES),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            seq_q=seq_q,
            seq_kv=seq_q if drawn.random() < 0.6 else pick(LENGTHS),  # noqa: PLR2004
            head_dim=pick(HEAD_DIMS),
            causal=pick(MASKS),
            dtype=pick(DTYPES),
        )
        return Case(
            problem=problem,
            impl=pick(IMPLS),
            precision=pick(PRECISIONS),
            scale=pick(SCALES),
            deterministic=drawn.random() < 0.7,  # noqa: PLR2004
            layouts=layouts(),
            grad_lse=pick(("absent", "absent", "contiguous", "not_dense")),
        )

    return [one() for _ in range(COUNT)]


def tensor(shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a tensor of a layout, without memory."""
    batch, heads, rows, columns = shape
    empty: Callable[..., torch.Tensor] = lambda *n: torch.empty(n, dtype=dtype, device="meta")  # noqa: E731
    if layout == "heads_last":
        return empty(batch, rows, heads, columns).transpose(1, 2)
    if layout == "misaligned":
        return empty(batch * heads * rows * columns + 1)[1:].view(*shape)
    if layout == "expanded":
        return empty(batch, 1, rows, columns).expand(*shape)
    if layout == "odd_rows":
        return empty(batch, heads, rows, columns + 1)[..., :columns]
    if layout == "not_dense":
        return empty(batch, heads, columns, rows).transpose(2, 3)
    return empty(*shape)


def tensors(case: Case) -> list[torch.Tensor]:
    """Return q, k, v, grad_o, o, lse, and grad_lse unless it is absent, without memory."""
    problem, dtype = case.problem, case.problem.torch_dtype
    rows = [(problem.heads, problem.seq_q)] + [(problem.kv_heads, problem.seq_kv)] * 2
    q, k, v, grad_o = (
        tensor((problem.batch, *n, problem.head_dim), dtype, layout)
        for n, layout in zip([*rows, rows[0]], case.layouts, strict=True)
    )
    o = torch.empty_like(q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous())
    lse = torch.empty(q.shape[:3], device="meta")
    given = [q, k, v, grad_o, o, lse]
    if case.grad_lse != "absent":
        lies = lse.transpose(1, 2).contiguous().transpose(1, 2)
        given.append(lse if case.grad_lse == "contiguous" else lies)
    return given


def asked(case: Case) -> Options:
    """Return the options of a case."""
    problem = case.problem
    return Options(
        problem.band.right,
        check_scale(case.scale, problem.head_dim),
        input_precision(case.precision, problem.torch_dtype),
        case.impl,
        case.deterministic,
    )


def plans(case: Case, gpu: Gpu) -> tuple[ForwardPlan, BackwardPlan] | str:
    """Return the plans of both passes, or why there are none."""
    problem = case.problem
    reason = support.why_not_portable(problem.torch_dtype, problem.head_dim)
    if case.impl == "hopper" and not gpu.interpreted:
        reason = support.why_not_hopper(problem.torch_dtype, problem.head_dim, gpu)
    if reason is not None:
        return reason
    given, options = [TensorSpec.of(x) for x in tensors(case)], asked(case)
    try:
        return choose_forward(given[:3], gpu, options), choose_backward(given, gpu, options)
    except ValueError as error:  # Hopper's kernels are asked for, but lack a pass
        return str(error)


def words(plan: ForwardPlan | BackwardPlan) -> str:
    """Return what was decided, without numbers that grow with the problem."""
    order = plan.scheduler._replace(section=1)
    said: list[object] = [plan.kernel, operands(plan.precision, plan.terms), order, *plan.copies]
    if isinstance(plan, ForwardPlan):
        said += [plan.tile, plan.loads, f"splits {plan.split.num}", "pack_gqa" * plan.pack_gqa]
    else:
        said += [plan.dq, f"accumulators {plan.dq_accumulators}", f"gqa {plan.gqa_splits}"]
        said += [f"{x.kernel} {x.tile} {x.terms} {[n for n, _ in x.splits]}" for x in plan.passes]
    return " ".join(filter(None, map(str, said))) if plan.kernel != "none" else "none"


def answer(case: Case, gpu: Gpu) -> tuple[str, str]:
    """Return what is decided for a case, in words and in full."""
    found = plans(case, gpu)
    if isinstance(found, str):
        return f"refused: {found}", ""
    return "; ".join(words(x) for x in found), "\n".join(str(x._replace(why=())) for x in found)


def decisions(card: str, blocks: Sequence[int]) -> list[tuple[list[str], str]]:
    """Return the answers to each block of cases on a card: words, and a digest."""
    everything, found = cases(), []
    for block in blocks:
        chosen = everything[block * BLOCK : (block + 1) * BLOCK]
        answers = [answer(case, CARDS[card]) for case in chosen]
        digest = hashlib.sha256("\n".join(whole for _, whole in answers).encode())
        found.append(([said for said, _ in answers], digest.hexdigest()[:DIGEST]))
    return found


def write(path: Path) -> None:
    """Store the list: plans, pairs of plans, and which pair answers each case."""
    known: dict[str, int] = {}
    pairs: dict[tuple[int, ...], int] = {}
    cards: dict[str, Any] = {}
    for card in CARDS:
        found = decisions(card, range(COUNT // BLOCK))
        said = [one.split("; ") for block, _ in found for one in block]
        numbered = [tuple(known.setdefault(x, len(known)) for x in one) for one in said]
        indices = [pairs.setdefault(one, len(pairs)) for one in numbered]
        cards[card] = {"pairs": indices, "digests": "".join(digest for _, digest in found)}
    stored = {"plans": list(known), "pairs": list(pairs), "cards": cards}
    with lzma.open(path, "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        json.dump(stored, file, separators=(",", ":"))


def differences(path: Path, blocks: Sequence[int]) -> list[str]:
    """Return a paragraph for each decision of these blocks that differs from the stored one."""
    with lzma.open(path, "rt") as file:
        stored = json.load(file)
    everything, lines = cases(), []
    for card, known in stored["cards"].items():
        for block, (said, digest) in zip(blocks, decisions(card, blocks), strict=True):
            wanted = [
                "; ".join(stored["plans"][i] for i in stored["pairs"][index])
                for index in known["pairs"][block * BLOCK : (block + 1) * BLOCK]
            ]
            for i, (old, new) in enumerate(zip(wanted, said, strict=True), block * BLOCK):
                if old != new:
                    lines.append(f"{card} {i} {everything[i]}\n  was {old}\n  now {new}")
            was = known["digests"][DIGEST * block : DIGEST * (block + 1)]
            if wanted == said and digest != was:
                lines.append(f"{card}: numbers of {block * BLOCK} ... {block * BLOCK + BLOCK - 1}")
    return lines


def main() -> int:
    """Write, check, or print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.counts.decisions")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", type=Path, metavar="FILE", help="store the list")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with all of a list")
    options = parser.parse_args()
    if options.write:
        write(options.write)
    lines = differences(options.check, range(COUNT // BLOCK)) if options.check else []
    print("\n".join(lines), end="\n" * bool(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
