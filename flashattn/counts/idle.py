"""Barriers of a kernel's roles that no role uses.

The compiler gives their memory to others as soon as they are initialized. The GPU still takes it
for barriers: when processes take turns on it, it changes what is stored there.
"""

from __future__ import annotations

import re

BARRIERS = re.compile(r"(%[\w$.-]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*i64")
ROLES = re.compile(r"ttg\.warp_specialize\((.*?)\)")
NAME = re.compile(r"%[\w$.-]+")


def idle_barriers(ttgir: str) -> list[str]:
    """Return the names of barriers that are not given to a kernel's roles, if it has roles."""
    roles = ROLES.search(ttgir)
    if roles is None:
        return []
    given = set(NAME.findall(roles[1]))
    return [name for name in BARRIERS.findall(ttgir) if name not in given]
