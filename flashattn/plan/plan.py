"""Plans: all decisions for an attention, as data that can be printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from flashattn.plan.splits import Split
from flashattn.plan.tile import HopperBackward, HopperFp32Tile, HopperTile, Tile

WHOLE = Split(1, 0)


class Workspace(NamedTuple):
    """Temporary memory that launches pass on to later ones, or that programs share.

    Args:
        name: what it holds.
        shape: its sizes.
        dtype: its dtype.
        zeroed: whether it must be filled with zeros first.
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
        order: "lpt", longest processing time first, by visible pairs; or "linear".
        persistent: whether a program computes several tiles.
        dynamic: whether a program draws its next tile from a counter.
        section: heads that are scheduled together, so that their tiles share the L2 cache.
    """

    order: Literal["linear", "lpt"] = "linear"
    persistent: bool = False
    dynamic: bool = False
    section: int = 1

    def __str__(self) -> str:
        """Return the order, and the options that are set."""
        words = [self.order, "persistent" * self.persistent, "dynamic" * self.dynamic]
        words += [f"sections of {self.section} heads"] * (self.section > 1)
        return ", ".join(filter(None, words))


class ForwardPlan(NamedTuple):
    """How o and lse are computed.

    Args:
        kernel: "none" where no query sees a key; "portable", "sm90", or "sm90_fp32".
        tile: the kernel's tile.
        precision: as ``precision.input_precision`` returns it.
        terms: bf16 terms into which a separate launch decomposes fp32; 0 if there is none.
        split: how the keys are split (split-KV).
        pack_gqa: whether the query heads that share keys are rows of one tile.
        keys: keys that a packed query sees.
        programs: number of programs.
        scheduler: the order of tiles.
        copies: inputs that are copied first.
        padded: whether values are narrower than keys, and are padded with zeros to their width.
        counters: shared counters, 0 before and after, that hand out tiles or count splits.
        workspaces: memory besides the outputs.
        why: one sentence for each decision.
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
        """Put earlier reasons before the plan's; ``_replace`` takes the host twice as long."""
        return ForwardPlan(*self[:-1], (*why, *self.why)) if why else self

    @property
    def loads(self) -> str:
        """Return how tiles of q, k and v are loaded to shared memory."""
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
        kernel: its name.
        tile: its tile.
        programs: number of programs for dk and dv, for dq, or for both.
        splits: likewise, how the queries or keys that programs walk over are split.
        terms: bf16 terms of its fp32 inputs; 0 if they are not decomposed.
    """

    kernel: str
    tile: Tile | HopperBackward | HopperFp32Tile
    programs: tuple[int, ...]
    splits: tuple[Split, ...] = (WHOLE,)
    terms: int = 0

    def __str__(self) -> str:
        """Return the launch on one line."""
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
        dbias: the separate launch for the gradient of a bias, or None if there is none.
        precision: as ``precision.input_precision`` returns it.
        dq: how dq is summed: "two_pass", by programs that own queries; "semaphore", by programs
            that own keys, in a fixed order; "atomic", in any order.
        dq_accumulators: dQ accumulators that programs add to.
        gqa_splits: programs among which the query heads of a tile of keys are divided.
        scheduler: the order of tiles.
        copies: inputs that are copied first.
        padded: whether v, o and grad_o are narrower than keys, and are padded with zeros.
        workspaces: memory besides the outputs.
        why: one sentence for each decision.
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
        """Return the bf16 terms into which a separate launch decomposes fp32; 0 if none does."""
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
    """The plans of both passes of an attention."""

    forward: ForwardPlan
    backward: BackwardPlan

    def __str__(self) -> str:
        """Return both plans in lines."""
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
