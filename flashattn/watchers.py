"""Whether anybody but us looks at what is called, so that it has to be an operator of PyTorch."""

from __future__ import annotations

import torch

# There is no public way to ask, or none that is quick.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001
_tracing = torch._C._get_tracing_state  # noqa: SLF001

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def unwatched(*tensors: torch.Tensor | None) -> bool:
    """Return whether nobody looks, and the tensors are of no kind of their own.

    The compiler, modes, function transforms, autocast and subclasses of tensors want to see an
    operator; to pass by them costs the host as much as a launch.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        _modes() == 0
        and _function_modes() == 0
        and _transform() is None
        and _tracing() is None
        and not _autocast()
        and PLAIN.issuperset(map(type, tensors))
    )
