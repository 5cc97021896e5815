"""Resolve --impl: a registered implementation, or a file that holds some.

The simplest file is one function::

    # my_kernel.py
    def attention(q, k, v, *, causal, scale):  # q [B, H, T, D]; k, v [B, G, S, D]
        ...
        return o  # [B, H, T, D], or (o, lse)

It is known by the file's name, here ``my_kernel``, and makes the default claims of
``flashattn.claims``. To claim less or more, a file registers its functions with flags::

    @flashattn.register("my_kernel", grad=False, dtypes=("float16", "bfloat16"))
    def fast(q, k, v, *, causal, scale): ...
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from flashattn import registry

DEFAULT = "attention"  # the function of a file that registers nothing
FILE = re.compile(r"(.+\.py)(?::(\w+))?")


def choose(option: str) -> list[str]:
    """Return the names of the implementations that one --impl selects.

    Args:
        option: a registered name; ``FILE.py``, for all that the file registers or else its function
            ``attention``; or ``FILE.py:NAME``, for one that it registers or a function of it.

    Raises:
        ValueError: the name is unknown; or the file does not exist, cannot be loaded, has no such
            implementation, or registers a name that is taken.
    """
    found = FILE.fullmatch(option)
    if found is None:
        return [registry.get(option).name]
    file, wanted = found.groups()
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"wanted a file, got {file}, which is none")
    with registry.origin(file):
        module, added = _load(path)
        name, function = wanted or path.stem, wanted or DEFAULT
        if name in added or (added and not wanted):
            return [wanted] if wanted else list(added)
        if name in registry.names() and registry.get(name).origin == file:
            return [name]  # asked for twice
        if not callable(getattr(module, function, None)):
            raise ValueError(  # noqa: TRY004 - one kind of error for one kind of mistake
                f"wanted a function {function}(q, k, v, *, causal, scale) in {file}, or one that it"
                f" registers, got {', '.join(added) or 'neither'}"
            )
        registry.register(name)(getattr(module, function))
    return [name]


def loaded_by(option: str) -> list[Path]:
    """Return the files that an --impl may load: its file and those beside it; none for a name."""
    found = FILE.fullmatch(option)
    return sorted(Path(found[1]).resolve().parent.glob("*.py")) if found else []


def asked(impl: registry.Impl) -> str:
    """Return the --impl option that selects ``impl`` alone."""
    if not impl.origin.endswith(".py"):
        return impl.name
    return impl.origin if impl.name == Path(impl.origin).stem else f"{impl.origin}:{impl.name}"


@cache
def _load(path: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """Run the file as a module, and return it with the names that it registers.

    Raises:
        ValueError: the file raises an error; the message has that error and its line.
    """
    name = "impl_of_" + re.sub(r"\W", "_", path.stem)  # not the stem, which could be torch
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(name=name, path=str(path))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # so that it can import files beside it
        sys.path.append(str(path.parent))
    before = registry.names()
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"line {lines[-1]}: " if lines else ""
        said = f"{path.name} cannot be loaded: {where}{type(error).__name__}: {error}"
        raise ValueError(said) from error
    return module, tuple(name for name in registry.names() if name not in before)
