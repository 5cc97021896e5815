"""One attention problem: its shapes, mask, scores and dtype, checked, and its exact costs.

Notation of this package: ``B`` batch, ``H`` query heads, ``G`` key/value heads, ``T`` queries,
``S`` keys, ``D`` head dimension, ``Dv`` head dimension of values. q is ``[B, H, T, D]``, k
``[B, G, S, D]``, v ``[B, G, S, Dv]``, the logsumexp and delta ``[B, H, T]``. Query head ``h``
reads key/value head ``h // (H // G)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, cast

import torch

from flashattn.checks import check_among, dense
from flashattn.mask import UNBOUNDED, Band, Causal, Mask, Window
from flashattn.score import check_softcap

ALIGNMENT = 16  # bytes; a larger alignment changes no load

# Queries and keys of each packed document, or "unknown" if only the device knows the mask.
Lengths = tuple[tuple[int, int], ...]
Documents = Lengths | Literal["unknown"] | None

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # name: bytes per element
_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
BIAS = re.compile("([b1][h1]([t1][s1]|r))?")
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention: softmax(scale * q @ k.T + mask) @ v over ``batch * heads`` score matrices.

    Args:
        batch: B.
        heads: H, query heads.
        kv_heads: G, key/value heads; must divide H; None means H.
        seq_q: T, queries.
        seq_kv: S, keys; None means T.
        head_dim: D.
        value_dim: Dv, if it is less than D; None means D.
        causal: False, "top_left" (or True) or "bottom_right".
        window: (left, right), see ``Mask.of``; for a causal mask only ``left`` is kept.
        documents: numbers of queries and keys of each packed document; the mask applies within
            each, and rows after the last see nothing. "unknown": only the device knows which keys a
            query sees, and costs are those without documents.
        prefix: number of keys that every query may see; after them it sees keys up to its own
            position. Excludes causal, a right bound and documents; None hides nothing.
        softcap: bound on the scores, see ``score``; None means no bound.
        alibi: whether each head has a slope, see ``score``.
        bias: dimensions of the bias, each its letter or 1, as "1hts" or "b11s"; "bhr" is relative,
            see ``score``; "" means no bias.
        sink: whether each head has a sink, see ``score``.
        dtype: the name of q's, k's and v's ``torch.dtype``.

    Raises:
        ValueError: a size is negative, G does not divide H, documents are longer than the rows, or
            causal, window, prefix, softcap or dtype is wrong.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int = cast("int", None)  # filled in below
    seq_q: int = 128
    seq_kv: int = cast("int", None)
    head_dim: int = 64
    value_dim: int | None = None
    causal: Causal = False
    window: Window = UNBOUNDED
    documents: Documents = None
    prefix: int | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: str = ""
    sink: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Fill in the defaults, then check all fields."""
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.seq_kv is None:
            object.__setattr__(self, "seq_kv", self.seq_q)
        for name in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"):
            least = 1 if name == "head_dim" else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name}: wanted at least {least}, got {getattr(self, name)}")
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)
        if not 1 <= self.dv <= self.head_dim:
            raise ValueError(f"value_dim: wanted 1 to {self.head_dim}, got {self.value_dim}")
        if self.heads != 0 and (self.kv_heads == 0 or self.heads % self.kv_heads != 0):
            msg = f"kv_heads: wanted a divisor of the {self.heads} query heads, got {self.kv_heads}"
            raise ValueError(msg)
        check_among("dtype", self.dtype, DTYPES)
        if not BIAS.fullmatch(self.bias):
            raise ValueError(f"bias: wanted dimensions like 1hts, 11ts, bhr, got {self.bias!r}")
        _check_lengths(self.documents, (self.seq_q, self.seq_kv))
        mask = self.mask
        alone = self.documents is None and mask.right is None
        if self.prefix is not None and not (self.prefix >= 0 and alone):
            wanted = "at least 0, and no causal, right bound or documents beside it"
            raise ValueError(f"prefix: wanted {wanted}, got {self.prefix}")
        object.__setattr__(self, "causal", mask.causal)
        object.__setattr__(self, "window", mask.window)
        object.__setattr__(self, "softcap", check_softcap(self.softcap))

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: Causal = False,
        window: Window = UNBOUNDED,
        softcap: float | None = None,
        alibi: bool = False,
        bias: str = "",
        sink: bool = False,
        documents: Documents = None,
    ) -> Problem:
        """Check q, k and v against each other and return the problem that they pose.

        Args:
            q: [B, H, T, D], or [B, T, D] for one head.
            k: [B, G, S, D], or [B, S, D].
            v: like k.
            causal: see ``Mask.of``.
            window: see ``Mask.of``.
            softcap: see ``score.check_softcap``.
            alibi: see ``Problem``.
            bias: see ``Problem``.
            sink: see ``Problem``.
            documents: see ``Problem``.

        Raises:
            ValueError: an argument does not fit; the message names it, what was wanted and given.
        """
        for name, x in {"q": q, "k": k, "v": v}.items():
            _check_tensor(name, x, q)
        one_head = q.ndim == 3  # noqa: PLR2004 - [B, T, D]
        batch, heads, (seq_q, head_dim) = q.shape[0], 1 if one_head else q.shape[1], q.shape[-2:]
        kv_heads, seq_kv = 1 if one_head else k.shape[1], k.shape[-2]
        _check_shape(
            "k", k, (batch, seq_kv, head_dim) if one_head else (batch, kv_heads, seq_kv, head_dim)
        )
        _check_shape("v", v, k.shape)
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=head_dim,
            causal=causal,
            window=window,
            documents=documents,
            softcap=softcap,
            alibi=alibi,
            bias=bias,
            sink=sink,
            dtype=str(q.dtype).removeprefix("torch."),
        )

    def __str__(self) -> str:
        """Return the name used as a test id; G and S are left out if they equal H and T."""
        grouped = "" if self.kv_heads == self.heads else f"kv{self.kv_heads}"
        keys = "" if self.seq_kv == self.seq_q else f"-kv{self.seq_kv}"
        heads, rows = f"b{self.batch}h{self.heads}{grouped}", f"q{self.seq_q}{keys}"
        hidden = "" if self.documents is None else f"-docs{_listed(self.documents)}"
        hidden = hidden if self.prefix is None else f"-prefix{self.prefix}"
        cap = "" if self.softcap is None else f"-cap{self.softcap:g}"
        bias = f"-bias{self.bias}" if self.bias else ""
        score = f"{cap}{'-alibi' * self.alibi}{bias}{'-sink' * self.sink}"
        values = "" if self.value_dim is None else f"v{self.value_dim}"
        dims = f"d{self.head_dim}{values}"
        return f"{SHORT[self.dtype]}-{heads}-{rows}-{dims}-{self.mask}{hidden}{score}"

    @classmethod
    def parse(cls, name: str) -> Problem:
        """Return the problem with this name, such as ``bf16-b2h8kv2-q1-kv70-d64-causal_br``.

        Raises:
            ValueError: ``name`` is not the name of a problem.
        """
        wrong = ValueError(
            "problem: wanted a name like bf16-b2h8kv2-q1-kv70-d64-causal_br (or -full,"
            " -window70+0, then -docs40+30x20+8of64 or -prefix9, -cap50, -alibi, -bias1hts, -sink),"
            f" got {name!r}"
        )
        found = re.fullmatch(
            r"(\w+)-b(?P<batch>\d+)h(?P<heads>\d+)(?:kv(?P<kv_heads>\d+))?-q(?P<seq_q>\d+)"
            r"(?:-kv(?P<seq_kv>\d+))?-d(?P<head_dim>\d+)(?:v(?P<value_dim>\d+))?-([^-]+)"
            r"(?:-docs(\w+(?:\+\w+)*))?"
            r"(?:-prefix(?P<prefix>\d+))?(?:-cap([^-]+))?(-alibi)?(?:-bias([^-]+))?(-sink)?",
            name,
        )
        dtypes = {short: dtype for dtype, short in SHORT.items()}
        if found is None or found[1] not in dtypes:
            raise wrong
        try:
            mask = Mask.parse(found[9])
            documents = None if found[10] is None else _parsed(found[10])
            softcap = check_softcap(None if found[12] is None else float(found[12]))
        except ValueError:
            raise wrong from None
        sizes: Any = {size: int(x) for size, x in found.groupdict().items() if x is not None}
        problem = cls(
            **sizes,
            causal=mask.causal,
            window=mask.window,
            documents=documents,
            softcap=softcap,
            alibi=found[13] is not None,
            bias=found[14] or "",
            sink=found[15] is not None,
            dtype=dtypes[found[1]],
        )
        if str(problem) != name:
            raise wrong
        return problem

    @property
    def dv(self) -> int:
        """Dv, the number of columns of v."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """The ``torch.dtype`` that ``dtype`` names."""
        return getattr(torch, self.dtype)

    @property
    def mask(self) -> Mask:
        """Which keys a query sees, as a mask that does not depend on the lengths."""
        return Mask.of(self.causal, self.window)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for an implementation: ``causal``, and the others that are set."""
        asked = {
            "window": None if self.window == UNBOUNDED else self.window,
            "documents": self.documents,
            "prefix": self.prefix,
            "softcap": self.softcap,
        }
        return {"causal": self.causal} | {name: x for name, x in asked.items() if x is not None}

    @property
    def is_empty(self) -> bool:
        """Return whether it has no batch, no heads, no queries or no keys."""
        return 0 in (self.batch, self.heads, self.seq_q, self.seq_kv)

    @property
    def by_rows(self) -> bool:
        """Return whether documents or a prefix also hide keys, which takes ``Bounds``."""
        return self.documents is not None or self.prefix is not None

    @property
    def added(self) -> bool:
        """Return whether something is added to the scores."""
        return self.alibi or self.bias != ""

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """The shape of the bias, or None if there is none."""
        sizes = {"b": self.batch, "h": self.heads, "t": self.seq_q, "s": self.seq_kv, "1": 1}
        sizes["r"] = max(self.seq_q + self.seq_kv - 1, 0)
        return tuple(sizes[x] for x in self.bias) if self.bias else None

    @property
    def band(self) -> Band:
        """The mask over this problem's queries and keys, without its documents."""
        return self.mask.over(self.seq_q, self.seq_kv)

    @property
    def bands(self) -> list[Band]:
        """The mask over the queries and keys of each document, or in and after a prefix."""
        if self.prefix is not None:
            return self.band.behind(self.prefix)
        if self.documents is None or self.documents == "unknown":
            return [self.band]
        return [self.mask.over(*lengths) for lengths in self.documents]

    @property
    def pairs(self) -> int:
        """The exact number of visible pairs over all batches and heads; about half if causal."""
        return self.batch * self.heads * sum(band.pairs for band in self.bands)

    @property
    def fully_masked_rows(self) -> int:
        """The number of queries of each head that see no key."""
        in_documents = sum(band.seq_q for band in self.bands)
        return self.seq_q - in_documents + sum(band.fully_masked_rows for band in self.bands)

    def flops(self, passes: str = "forward") -> int:
        """Return the FLOPs, two per multiply-add: two products forward, five backward.

        One of the five recomputes the scores.

        Args:
            passes: forward, backward or forward+backward.
        """
        products = {"forward": (1, 1), "backward": (3, 2), "forward+backward": (4, 3)}[passes]
        return 2 * self.pairs * (products[0] * self.head_dim + products[1] * self.dv)

    def bytes(self, passes: str = "forward") -> int:
        """Return the fewest bytes that can move: each input read once, each output written once.

        Forward reads q, k, v and writes o and the fp32 logsumexp; backward reads those and o's
        gradient and writes the gradients of q, k and v.

        Args:
            passes: forward, backward or forward+backward.
        """
        wide = DTYPES[self.dtype] * (self.head_dim + self.dv) * self.batch
        queries, keys = wide * self.heads * self.seq_q, wide * self.kv_heads * self.seq_kv
        lse = 4 * self.batch * self.heads * self.seq_q
        moved = {"forward": queries + keys + lse, "backward": 2 * (queries + keys) + lse}
        return sum(moved[name] for name in passes.split("+"))


def _check_lengths(documents: Documents, sizes: tuple[int, int]) -> None:
    if documents is None or documents == "unknown":
        return
    pairs = isinstance(documents, tuple) and all(
        isinstance(x, tuple) and len(x) == len(sizes) and min(x) >= 0 for x in documents
    )
    if not pairs or not documents:
        raise ValueError(f"documents: wanted pairs of lengths, got {documents!r}")
    for rows, size in zip(zip(*documents, strict=True), sizes, strict=True):
        if sum(rows) > size:
            raise ValueError(f"documents: wanted {size} rows at the most, got {sum(rows)}")


def _listed(documents: Lengths | Literal["unknown"]) -> str:
    """Return the name of documents, as 40+30x20+256of64; a single number counts both sides."""
    if documents == "unknown":
        return documents
    said = []
    for (t, s), same in groupby(documents):
        size, count = f"{t}" if t == s else f"{t}x{s}", len(list(same))
        said.append(size if count == 1 else f"{count}of{size}")
    return "+".join(said)


def _parsed(name: str) -> Documents:
    """Return the documents with this name, the inverse of ``_listed``."""
    if name == "unknown":
        return "unknown"
    found: list[tuple[int, int]] = []
    for said in name.split("+"):
        count, _, size = said.rpartition("of")
        numbers = [int(x) for x in size.split("x")]
        found += [(numbers[0], numbers[-1])] * int(count or 1)
    return tuple(found)


def _check_tensor(name: str, given: object, q: torch.Tensor) -> None:
    x = dense(name, given)
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: wanted dtype {', '.join(DTYPES)}, got {x.dtype}")
    if x.ndim not in (3, 4):
        shapes = "[batch, heads, sequence, head_dim] or [batch, sequence, head_dim]"
        raise ValueError(f"{name}: wanted {shapes}, got {x.ndim} dimensions")
    if x is q:
        return
    facts: tuple[tuple[str, object, object], ...] = (
        ("number of dimensions", x.ndim, q.ndim),
        ("dtype", x.dtype, q.dtype),
        ("device", x.device, q.device),
    )
    for what, got, wanted in facts:
        if got != wanted:
            raise ValueError(f"{name}: wanted q's {what}, {wanted}, got {got}")


def _check_shape(name: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != tuple(wanted):
        raise ValueError(f"{name}: wanted shape {list(wanted)}, got {list(x.shape)}")
