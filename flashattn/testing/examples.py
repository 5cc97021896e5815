"""How many examples Hypothesis ran: a property is proven by what was drawn, so that is counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Check = Callable[..., None]


class Count:
    """How many examples passed in this process."""

    passed = 0

    @classmethod
    def of(cls, check: Check) -> Check:
        """Return ``check``, counted; an example that was rejected, or fails, is none."""
        if getattr(check, "is_counted", False):
            return check

        @wraps(check)
        def counted(*args: Any, **drawn: Any) -> None:
            check(*args, **drawn)
            cls.passed += 1

        counted.is_counted = True  # type: ignore[attr-defined]
        return counted
