"""Decide whether a call may bypass PyTorch's dispatcher."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# There is no public way to ask, or only a slow one.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001
_tracing = torch._C._get_tracing_state  # noqa: SLF001

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def dispatch_is_trivial(*tensors: torch.Tensor | None) -> bool:
    """Return whether dispatching an operator on these tensors would just call its kernel.

    torch.compile, modes, function transforms, forward-mode derivatives, autocast and tensor
    subclasses must see an operator. Without any of them the dispatcher may be bypassed, which saves
    the host as much time as a launch takes.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        _modes() == 0
        and _function_modes() == 0
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0  # noqa: SLF001
        and not _autocast()
        and PLAIN.issuperset(map(type, tensors))
    )


def has_tangents(*tensors: torch.Tensor) -> bool:
    """Return whether any of these tensors carries a forward-mode tangent."""
    return forward_ad._current_level >= 0 and any(  # noqa: SLF001
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def no_forward_mode(name: str, error: NotImplementedError | None = None) -> NotImplementedError:
    """Return the error that ``name`` has no forward mode, or ``error`` if it has another cause."""
    if error is not None and forward_ad._current_level < 0:  # noqa: SLF001
        return error
    return NotImplementedError(f'{name} has no forward-mode derivative; impl="reference" has')
