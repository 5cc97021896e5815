"""Golden list of decisions: what is launched for 20 000 problems on five cards, none of them here.

    python -m flashattn.counts.decisions --check tests/plan/decisions.json.xz
    python -m flashattn.counts.decisions --write tests/plan/decisions.json.xz

Tensors are on the device "meta", and launches are noted instead of started. Each decision names
the kernels with their tiles, operands, splits and schedules; numbers of programs and shapes of
workspaces are in a digest for every ``BLOCK`` problems.

Exit status: 0 the same; 1 different.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from flashattn import api, ops, registry
from flashattn.kernels import execute
from flashattn.kernels.launch import Launch
from flashattn.plan import support
from flashattn.plan.gpu import Gpu
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
HEAD_DIMS: tuple[Any, ...] = (64, 128) * 6 + (
    1,
    2,
    7,
    8,
    16,
    17,
    24,
    32,
    33,
    40,
    48,
    65,
    72,
    80,
    96,
    97,
    100,
    112,
)
HEAD_DIMS += (129, 136, 160, 192, 193, 200, 224, 256, 256, 256, 320)
LENGTHS: tuple[Any, ...] = (
    0,
    1,
    1,
    1,
    2,
    7,
    16,
    17,
    64,
    100,
    128,
    129,
    256,
    300,
    500,
    512,
    768,
    769,
    1000,
)
LENGTHS += (1024, 1024, 2048, 2048, 3000, 4096, 4096, 8192, 8192, 16384, 32768, 65536)
HEADS = (1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 16, 32, 32, 48, 64, 128, 600)
BATCHES = (1, 1, 1, 2, 3, 4, 8, 16, 64)
MASKS = (False, "top_left", "bottom_right")
PRECISIONS = ("auto", "auto", "bf16x6", "tf32", "tf32", "tf32x3", "ieee")
SCALES = (None,) * 12 + (0.3, 0.0, -0.2)
IMPLS = ("auto",) * 4 + ("triton", "hopper", "hopper")
LAYOUTS = ("contiguous",) * 10 + ("heads_last", "misaligned", "expanded", "odd_rows", "not_dense")


@dataclass(frozen=True)
class Question:
    """A problem, how its tensors lie in memory, and what else a choice may depend on."""

    problem: Problem
    impl: str
    precision: str
    scale: float | None
    deterministic: bool
    layouts: tuple[str, str, str, str]  # of q, k, v and grad_o
    grad_lse: str

    def __str__(self) -> str:
        """Return all of it in a line."""
        words = [str(self.problem), self.impl, self.precision, f"scale={self.scale}"]
        words += ["" if self.deterministic else "any-order", *self.layouts, self.grad_lse]
        return " ".join(filter(None, words))


def questions(count: int = COUNT) -> list[Question]:
    """Return the list's questions; what is drawn depends on ``SEED`` and the axes alone."""
    drawn = random.Random(SEED)  # noqa: S311 - the same list every time is the point

    def pick(axis: Sequence[Any]) -> Any:
        return axis[int(drawn.random() * len(axis))]

    def layouts() -> tuple[Any, Any, Any, Any]:
        if drawn.random() < 0.7:  # noqa: PLR2004
            return ("contiguous",) * 4
        return pick(LAYOUTS), pick(LAYOUTS), pick(LAYOUTS), pick(LAYOUTS)

    def one() -> Question:
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
        return Question(
            problem=problem,
            impl=pick(IMPLS),
            precision=pick(PRECISIONS),
            scale=pick(SCALES),
            deterministic=drawn.random() < 0.7,  # noqa: PLR2004
            layouts=layouts(),
            grad_lse=pick(("absent", "absent", "contiguous", "not_dense")),
        )

    return [one() for _ in range(count)]


def tensor(shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a tensor without memory that would lie so."""
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


class Noted:
    """The launches of a forward and a backward, in words and in numbers."""

    def __init__(self) -> None:
        """Nothing is launched yet."""
        self.words: list[str] = []
        self.numbers: list[object] = []

    def note(self, launch: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        """Note a launch."""
        kernel, given = launch._kernel, [*tensors, *launch._numbers]  # noqa: SLF001
        name = kernel.fn.__name__.removeprefix("flashattn_")
        options = dict(zip(kernel.arg_names, given, strict=False)) | launch._options  # noqa: SLF001
        loads = "".join("p" if x is None else "t" for x in launch._operands)  # noqa: SLF001
        known = [f"{key}={int(options[key])}" for key in WORDS if options.get(key) is not None]
        batch = next(len(x) for x in tensors if x is not None)
        parts = [
            f"{key}/{len(options[key]) // batch}"
            for key in PARTED
            if options.get(key) is not None and len(options[key]) != batch
        ]
        precision = options.get("PRECISION", "")
        self.words.append(" ".join(filter(None, [name, precision, loads, *known, *parts])))
        self.numbers += [name, launch._grid[0]]  # noqa: SLF001
        shared = [i for i, key in enumerate(kernel.arg_names) if key in ("k", "v")]
        self.numbers += [
            None if x is None or i in shared else x.numel() for i, x in enumerate(tensors)
        ]
        self.numbers += [options[key] for key in NUMBERS if isinstance(options.get(key), int)]


# Arguments of kernels that a decision determines, where a kernel has them.
WORDS = (
    *("BLOCK_Q", "BLOCK_KV", "num_warps", "num_stages", "maxnreg", "DESCRIPTORS", "SPLIT"),
    *("SPLIT_KV", "PARTS", "COLUMNS", "FIRST", "REST", "GROUPS", "SLOTS", "DRAWN", "STAGED"),
    *("REGISTERS", "PINNED", "CAUSAL", "POSITIVE_SCALE", "launch_cooperative_grid"),
    *("shares", "slabs", "apart"),
)
PARTED = ("o", "dk", "dv", "dq", "total")  # these have a batch for each part
NUMBERS: tuple[Any, ...] = (
    "PADDED",
    "chunk",
    "chunk_kv",
    "band",
    "at_once",
    "ordered",
    "tiles",
    "blocks",
    "heads",
    "group",
)


def answer(question: Question, card: str) -> tuple[str, str]:
    """Return what is launched within ``on(card)``, in words, and the numbers that go with it."""
    problem = question.problem
    causal, device = problem.causal, torch.device("cuda")
    options: dict[str, Any] = {"causal": causal, "scale": question.scale}
    try:
        if card == INTERPRETER:
            if problem.dtype == "float64" or problem.head_dim > support.LARGEST_HEAD_DIM:
                return "refused", ""
            fastest: dict[str, Any] = {}
            impl = registry.get("triton" if question.impl == "auto" else question.impl)
        else:
            impl, fastest = api._choose(question.impl, problem, device, grad=True, lse=True)  # noqa: SLF001
    except ValueError as error:
        return f"refused: {error}", ""
    if impl.name not in ("triton", "hopper"):
        return impl.name, ""
    options |= fastest | {"precision": question.precision}
    if impl.name == "hopper":
        options["deterministic"] = question.deterministic
    rows = [(problem.heads, problem.seq_q)] + [(problem.kv_heads, problem.seq_kv)] * 2
    dtype, noted = problem.torch_dtype, Noted()
    q, k, v = (
        tensor((problem.batch, *n, problem.head_dim), dtype, layout)
        for n, layout in zip(rows, question.layouts[:3], strict=True)
    )
    with patch.object(Launch, "__call__", lambda *given: noted.note(given[0], given[1:])):
        prepared: Any = impl.prepared(q, k, v, **options)
        o, lse = prepared(q, k, v)
        noted.words.append("|")
        grad_o = tensor(o.shape, dtype, question.layouts[3])
        grad_lse = None
        if question.grad_lse != "absent":
            lie = lse.transpose(1, 2).contiguous().transpose(1, 2)
            grad_lse = torch.empty_like(lse) if question.grad_lse == "contiguous" else lie
        prepared.backward((grad_o, grad_lse), (q, k, v, o, lse))
    return "; ".join(noted.words), repr(noted.numbers)


@contextmanager
def on(card: str) -> Iterator[None]:
    """Have everything that asks for the GPU be told of this one."""
    gpu = CARDS[card]
    bound = (execute.bind_forward, execute.bind_backward)
    with ExitStack() as stack:
        for module in (execute, ops):
            stack.enter_context(patch.object(module, "gpu_of", lambda _: gpu))
        for function in bound:
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield


def decisions(card: str, blocks: Sequence[int]) -> list[list[Any]]:
    """Return what each block of questions is answered with on a card: words, and a digest."""
    asked, found = questions(), []
    with on(card):
        for block in blocks:
            answers = [answer(x, card) for x in asked[block * BLOCK : (block + 1) * BLOCK]]
            digest = hashlib.sha256("\n".join(numbers for _, numbers in answers).encode())
            found.append([[words for words, _ in answers], digest.hexdigest()[:DIGEST]])
    return found


def write(path: Path) -> None:
    """Store the list: launches, sequences of these, and what each question is answered with."""
    launches: dict[str, int] = {}
    sequences: dict[tuple[int, ...], int] = {}
    cards: dict[str, Any] = {}
    for card in CARDS:
        found = decisions(card, range(COUNT // BLOCK))
        words = [one.split("; ") for block, _ in found for one in block]
        numbered = [tuple(launches.setdefault(x, len(launches)) for x in one) for one in words]
        indices = [sequences.setdefault(one, len(sequences)) for one in numbered]
        cards[card] = {"sequences": indices, "digests": "".join(digest for _, digest in found)}
    stored = {"launches": list(launches), "sequences": list(sequences), "cards": cards}
    with lzma.open(path, "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        json.dump(stored, file, separators=(",", ":"))


def differences(path: Path, blocks: Sequence[int]) -> list[str]:
    """Return a paragraph for each decision of these blocks that is not the stored one."""
    with lzma.open(path, "rt") as file:
        stored = json.load(file)
    asked, lines = questions(), []
    for card, known in stored["cards"].items():
        for block, (words, digest) in zip(blocks, decisions(card, blocks), strict=True):
            wanted = [
                "; ".join(stored["launches"][i] for i in stored["sequences"][index])
                for index in known["sequences"][block * BLOCK : (block + 1) * BLOCK]
            ]
            for i, (old, new) in enumerate(zip(wanted, words, strict=True)):
                if old != new:
                    question = asked[block * BLOCK + i]
                    lines.append(f"{card} {block * BLOCK + i} {question}\n  was {old}\n  now {new}")
            if (
                wanted == words
                and digest != known["digests"][DIGEST * block : DIGEST * (block + 1)]
            ):
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
