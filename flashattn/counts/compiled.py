"""Compile every kernel with every tile for each architecture, and count its resources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from inspect import getsource
from itertools import product
from subprocess import SubprocessError
from typing import Any
from warnings import filterwarnings

import triton
from triton import knobs
from triton.runtime.cache import triton_key

from flashattn.counts import resources as counted
from flashattn.counts import stale as judged
from flashattn.counts.expect import SOURCE, Rows
from flashattn.counts.offline import Variant, compiled_kernel, front_end
from flashattn.counts.resources import Resources, resources_of, sass_of
from flashattn.counts.stale import stale_addresses, stale_operands
from flashattn.counts.variants import ARCHITECTURES, variants
from flashattn.kernels.hopper.offline import HopperVariant

# Each minor version of Triton has its own assembler, which allots registers and lays out code.
MINOR = ".".join(triton.__version__.split(".")[:2])
FILE = f"compiled-triton-{MINOR}.json"
# fp32 at BLOCK_D 128 and 256: six bf16 products decompose such wide operands in registers, three
# terms a number, and hardly any tile of the search has room for that. On sm_100 bwd_preprocess's
# two tiles of 256, 128 numbers a thread each, do not fit either. Where operands come decomposed, dk
# and dv have many addresses, and the fastest tile of 64 columns has no room for all. These spills
# must be as expected to the byte, but are no complaint.
KNOWN_TO_SPILL = {
    *product(("fwd", "bwd_dkdv", "bwd_dq"), (4,), (128, 256)),
    *product(("decode", "bwd_preprocess"), (4,), (256,)),
    ("bwd_dq", 2, 64),  # by bounds of rows, 208 bytes on sm_80 with Triton 3.6
    ("bwd_dkdv", 2, 128),  # under a mask, 8 bytes with Triton 3.6, which cost no time
    *product(("bwd_fused", "bwd_dkdv"), (4,), (64,)),
    ("bwd_dbias", 4, 256),
    *product(("bwd_dbias_relative",), (4,), (64, 256)),
    # Warp-specialized kernels are compiled for a thread's share of a launch, 128 or 168 registers.
    # Roles change it to 160 or 240 at run time; what is spilled until then is 8 to 488 bytes.
    *product(("hopper_fwd", "hopper_bwd"), (2,), (64, 96, 128, 256)),
    *product(("hopper_fwd_fp32", "hopper_bwd_fp32_dkdv", "hopper_bwd_fp32_dq"), (4,), (128,)),
    ("hopper_bwd_d256_dkdv", 2, 192),
    ("hopper_bwd_d256_dkdv", 2, 256),  # in a window only
    ("hopper_bwd_d256_dq", 2, 256),
}
# Triton 3.6's ptxas makes different code of the same PTX from run to run, on sm_90 if tiles have
# descriptors and registers run out. Such a row has no code, stack and registers.
UNSTEADY = {
    "3.6": {
        *product(("bwd_fused", "bwd_dkdv"), (4,), (64,)),
        *product(("fwd", "bwd_dkdv"), (4,), (128,)),
        ("bwd_dkdv", 2, 256),
    }
}
VARYING = ("code", "stack", "registers")
BORROWED_MAY_SPILL = 72  # bytes a thread: 18 registers
ASSEMBLERS = "ptxas"  # the row of the versions of the assemblers
BARRIERS = re.compile(r"(%[\w$.-]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*i64")
ROLES = re.compile(r"ttg\.warp_specialize\((.*?)\)")
NAME = re.compile(r"%[\w$.-]+")
COUNTERS = getsource(counted) + getsource(judged)  # if these change, all is counted again


def _assemblers() -> dict[str, str]:
    """Return the version of the assembler for each architecture."""
    nvidia = knobs.nvidia
    return {
        arch: (nvidia.ptxas_blackwell if arch == "sm_100" else nvidia.ptxas).version
        for arch in ARCHITECTURES
    }


def may_spill(variant: Variant | HopperVariant, stack: int) -> bool:
    """Return whether a variant may spill ``stack`` bytes, contrary to the rule that none spills.

    A variant with split rows, a window, bounds of rows, a softcap or other scores borrows the tile
    that was found for a variant without these, and may spill a little.
    """
    borrowed = isinstance(variant, Variant) and (
        variant.split or variant.window or variant.rows or variant.softcap or variant.scored
    )
    if borrowed and stack <= BORROWED_MAY_SPILL:
        return True
    return (variant.kernel, variant.size, variant.head_dim) in KNOWN_TO_SPILL


def unsteady(variant: Variant | HopperVariant, minor: str = MINOR) -> bool:
    """Return whether a version's assembler makes different code of a variant from run to run."""
    if not (isinstance(variant, Variant) and variant.tma_compatible and variant.arch == "sm_90"):
        return False
    return (variant.kernel, variant.size, variant.head_dim) in UNSTEADY.get(minor, ())


def _stale(variant: Variant | HopperVariant, compiled: Any, resources: Resources) -> str | None:
    """Return what is wrong with the operands of a kernel's products, which only SASS shows.

    Reading all portable kernels takes as long as all other checks, so only backwards with bounds of
    rows are read. Of 178 portable kernels, none has stale addresses or operands.
    """
    if not any(kind.startswith("wgmma") for kind in resources.matrix):
        return None
    if isinstance(variant, HopperVariant):
        what, stale = "addresses", stale_addresses
    elif variant.rows and variant.kernel.startswith("bwd"):
        what, stale = "operands", stale_operands
    else:
        return None
    try:
        found = stale(sass_of(compiled))
    except (OSError, SubprocessError, ValueError) as error:
        return f"{what} of products are UNPROVEN: {error}"
    return f"{what} of products may be stale, {len(found)}: {found[0]}" if found else None


def _idle(ttgir: str) -> str | None:
    """Return what is wrong with a kernel's barriers: those that no role uses, if any.

    The compiler reuses their memory as soon as they are initialized. The GPU still takes it for
    barriers, and changes what is stored there when another process takes its turn.
    """
    roles = ROLES.search(ttgir)
    given = set(NAME.findall(roles[1])) if roles else set()
    found = [name for name in BARRIERS.findall(ttgir) if roles and name not in given]
    return f"barriers that no role uses: {', '.join(found)}" if found else None


def _compile(variant: Variant | HopperVariant) -> tuple[dict[str, Any] | None, str | None]:
    """Compile a variant; return its row, and what is wrong with it regardless of expectations."""
    try:
        compiled = compiled_kernel(variant)
        resources = resources_of(compiled)
    except Exception as error:  # noqa: BLE001 - one that does not compile must not hide the others
        return None, f"does not compile: {error}"
    excused = may_spill(variant, resources.stack)  # everything else is still judged
    complaints = (
        (replace(resources, stack=0) if excused else resources).complaint(variant.arch),
        _stale(variant, compiled, resources),
        _idle(compiled.asm["ttgir"]),
    )
    row = {"tile": variant.launch, **asdict(resources)}
    if unsteady(variant):
        row = {name: value for name, value in row.items() if name not in VARYING}
    return row, "; ".join(filter(None, complaints)) or None


def source_hash(variant: Variant | HopperVariant) -> str:
    """Return a hash of all that determines a row: what is compiled, how, and how it is counted.

    It is the same on every machine. It does not depend on the names of values, on line numbers, or
    on how functions divide the work and pass arguments to one another.
    """
    front = front_end(variant)
    options = vars(front.options) | {"extern_libs": None}  # paths; these come with Triton
    version = triton.__version__, _assemblers()[variant.arch]
    how = *version, variant.arch, variant.launch, sorted(options.items()), COUNTERS
    made_of = f"{how} {front.module.str_nodebug()}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


def _row(
    variant: Variant | HopperVariant, known: dict[str, Any]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return a row and a complaint; a known row of the same source is not compiled again.

    A row with a complaint has no source, so it is compiled again until there is no complaint.
    """
    filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")  # it announces a change of Triton 3.10
    try:
        source = source_hash(variant)
    except Exception as error:  # noqa: BLE001 - as above
        return None, f"does not compile: {error}"
    if known.get(SOURCE) == source:
        return known, None
    row, complaint = _compile(variant)
    return (row if row is None or complaint else row | {SOURCE: source}), complaint


def names() -> list[str]:
    """Return the names of all rows, without compiling any."""
    return [ASSEMBLERS, *map(str, variants())]


def collect(wanted: Container[str], known: Rows) -> tuple[Rows, list[str]]:
    """Compile the variants whose source has changed.

    Args:
        wanted: names of rows.
        known: previous rows, which stand where their source is the same.

    Returns:
        The rows, and what is wrong regardless of expectations: a tile that spills or does not fit,
        a product that may read stale operands, or a barrier that no role uses.
    """
    rows: Rows = {ASSEMBLERS: _assemblers()} if ASSEMBLERS in wanted else {}
    complaints = []
    chosen = [variant for variant in variants() if str(variant) in wanted]
    triton_key()  # cached, or it takes each process half a second
    with ProcessPoolExecutor() as pool:
        before = [known.get(str(variant), {}) for variant in chosen]
        for variant, (row, complaint) in zip(chosen, pool.map(_row, chosen, before), strict=True):
            if row is not None:
                rows[str(variant)] = row
            if complaint is not None:
                complaints.append(f"{variant}: {complaint}")
    return rows, complaints
