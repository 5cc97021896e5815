"""Plans: what was decided, as data that prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from flashattn.plan.splits import Split
from flashattn.plan.tile import HopperBackward, HopperFp32Tile, HopperTile, Tile

WHOLE = Split(1, 0)


class Workspace(NamedTuple):
    """Memory that launches pass on to later ones, or that programs share.

    Args:
        name: what it holds.
        shape: its sizes.
        dtype: its dtype.
        zeroed: whether it must be zero at first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    zeroed: bool = False

    def __str__(self) -> str:
        """Return its name, sizes and dtype."""
        zeros = ", zeros" * self.zeroed
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}{zeros}"


class Scheduler(NamedTuple):
    """The order in which programs take tiles.

    Args:
        order: "lpt", those with the most visible pairs first, or "linear".
        persistent: whether a program takes several tiles.
        dynamic: whether it draws the next one from a counter.
        section: heads that are started together, so that their tiles share the L2 cache.
    """

    order: Literal["linear", "lpt"] = "linear"
    persistent: bool = False
    dynamic: bool = False
    section: int = 1

    def __str__(self) -> str:
        """Return what differs from one program a tile in linear order."""
        words = [self.order, "persistent" * self.persistent, "dynamic" * self.dynamic]
        words += [f"sections of {self.section} heads"] * (self.section > 1)
        return ", ".join(filter(None, words))


class ForwardPlan(NamedTuple):
    """How o and lse are computed.

    Args:
        kernel: "none" where no query sees a key; "portable", "sm90", or "sm90_fp32".
        tile: of the kernel.
        precision: as ``precision.input_precision`` returns it.
        terms: bf16 terms that fp32 is decomposed into by a launch of its own; 0: it is not.
        split: of the keys (split-KV).
        pack_gqa: whether the query heads that share keys are rows of one tile.
        keys: that a packed query sees.
        programs: that are launched.
        scheduler: the order of tiles.
        copies: inputs that are copied first.
        padded: whether values, narrower than keys, are padded with zeros to their width.
        counters: zeros that programs share, and leave zero: of tiles that are drawn, or of splits.
        workspaces: memory besides the outputs.
        why: one sentence a decision.
    """

    kernel: Literal["none", "portable", "sm90", "sm90_fp32"]
    tile: Tile | HopperTile | HopperFp32Tile | None = None
    precision: str = "ieee"
    terms: int = 0
    split: Split = WHOLE
    pack_gqa: bool = False
    keys: int = 0
    programs: int = 0
    scheduler: Scheduler = Scheduler()
    copies: tuple[str, ...] = ()
    padded: bool = False
    counters: int = 0
    workspaces: tuple[Workspace, ...] = ()
    why: tuple[str, ...] = ()

    def after(self, why: Sequence[str]) -> ForwardPlan:
        """Return it with earlier decisions; ``_replace`` takes the host twice as long."""
        return ForwardPlan(*self[:-1], (*why, *self.why)) if why else self

    @property
    def loads(self) -> str:
        """How tiles of q, k and v come to shared memory."""
        tma = not isinstance(self.tile, Tile) or self.tile.descriptors
        return "tma" if tma else "pointers"

    def __str__(self) -> str:
        """Return the plan in lines."""
        facts = {
            "kernel": self.kernel,
            "tile": f"{self.tile}, {self.loads}",
            "operands": operands(self.precision, self.terms),
            "num_splits": f"{self.split.num} of {self.split.length} keys" * (self.split.num > 1),
            "pack_gqa": f"{self.keys} keys" * self.pack_gqa,
            "counters": str(self.counters) * bool(self.counters),
        }
        if self.kernel == "none":
            facts = {"kernel": "none"}
        return _lines("forward", facts, self.programs, self)


class Pass(NamedTuple):
    """A launch of the backward.

    Args:
        kernel: which.
        tile: of it.
        programs: of dk and dv, of dq, or of both.
        splits: likewise, of the queries and of the keys that these walk over.
        terms: bf16 terms of its fp32 inputs; 0: they are not decomposed.
    """

    kernel: str
    tile: Tile | HopperBackward | HopperFp32Tile
    programs: tuple[int, ...]
    splits: tuple[Split, ...] = (WHOLE,)
    terms: int = 0

    def __str__(self) -> str:
        """Return its numbers in a line."""
        loads = "tma"
        if isinstance(self.tile, Tile):
            loads = "tma" if self.tile.descriptors else "pointers"
        parts = [f"{x.num} splits of {x.length}" for x in self.splits if x.num > 1]
        words = [self.kernel, str(self.tile), loads, f"{sum(self.programs)} programs", *parts]
        return ", ".join(filter(None, words))


class BackwardPlan(NamedTuple):
    """How dq, dk and dv are computed.

    Args:
        kernel: "none", "portable", "sm90", "sm90_d256", or "sm90_fp32".
        passes: its launches, without preprocess, decomposition, reductions and postprocess.
        dbias: the launch for the gradient of a bias that several scores share, if it is wanted.
        precision: as ``precision.input_precision`` returns it.
        dq: how it is summed: "two_pass", by programs that own queries; "semaphore", by programs
            that own keys, in a fixed order; "atomic", in any order.
        dq_accumulators: workspaces that these add to.
        gqa_splits: programs among which the query heads of a tile of keys are divided.
        scheduler: the order of tiles.
        copies: inputs that are copied first.
        padded: whether values, o and its gradient, narrower than keys, are padded with zeros.
        workspaces: memory besides the outputs.
        why: one sentence a decision.
    """

    kernel: Literal["none", "portable", "sm90", "sm90_d256", "sm90_fp32"]
    passes: tuple[Pass, ...] = ()
    dbias: Pass | None = None
    precision: str = "ieee"
    dq: Literal["two_pass", "semaphore", "atomic"] = "two_pass"
    dq_accumulators: int = 1
    gqa_splits: int = 1
    scheduler: Scheduler = Scheduler()
    copies: tuple[str, ...] = ()
    padded: bool = False
    workspaces: tuple[Workspace, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def terms(self) -> int:
        """Bf16 terms that fp32 is decomposed into by a launch of its own; 0: it is not."""
        return max((x.terms for x in self.passes), default=0)

    def __str__(self) -> str:
        """Return the plan in lines."""
        facts: dict[str, str] = {"kernel": self.kernel}
        if self.passes:
            facts |= {f"pass {i + 1}": str(x) for i, x in enumerate(self.passes)}
            facts |= {"dbias": str(self.dbias)} if self.dbias else {}
            facts |= {
                "operands": operands(self.precision, self.terms),
                "dq": self.dq,
                "dq_accumulators": str(self.dq_accumulators) * (self.dq_accumulators > 1),
                "gqa_splits": str(self.gqa_splits) * (self.gqa_splits > 1),
            }
        return _lines("backward", facts, 0, self)


@dataclass(frozen=True)
class Plan:
    """Both passes of an attention."""

    forward: ForwardPlan
    backward: BackwardPlan

    def __str__(self) -> str:
        """Return both."""
        return f"{self.forward}\n{self.backward}"


def operands(precision: str, terms: int) -> str:
    """Return how fp32 is multiplied, in a word."""
    return {2: "bf16x3, decomposed before", 3: "bf16x6, decomposed before"}.get(
        terms, "native" if precision == "ieee" else precision
    )


def _lines(
    title: str, facts: dict[str, str], programs: int, plan: ForwardPlan | BackwardPlan
) -> str:
    if plan.kernel != "none":
        facts |= {
            "programs": str(programs) * bool(programs),
            "scheduler": str(plan.scheduler),
            "copies": ", ".join(plan.copies),
            "workspaces": "; ".join(map(str, plan.workspaces)),
        }
    lines = [f"  {name:<15} {value}" for name, value in facts.items() if value]
    return "\n".join([title, *lines, *(f"  - {sentence}" for sentence in plan.why)])
