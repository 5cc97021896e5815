"""Profile a call: time by kernel, by category and by phase.

On a GPU the times are device times of kernels; on a CPU, self times of operators.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd import DeviceType

Edge = Literal["start", "end"]
Listener = Callable[[str, Edge], object]
_LISTENERS: list[Listener] = []

# The first pattern that matches a kernel's name decides.
CATEGORIES: tuple[tuple[str, str], ...] = (
    ("ours", r"^flashattn(_|::)"),
    # Inductor names begin with the kind of loop, then list the fused operators.
    ("softmax", r"^triton_(red|per)_.*softmax"),
    ("reduction", r"^triton_(red|per)_"),
    ("elementwise", r"^triton_(poi|for)_"),
    ("attention", r"attention|flash_(fwd|bwd)|flash::|fmha|sdpa|dot_do_o|convert_dq"),
    ("matmul", r"gemm|nvjet|cublas|^triton_tem_|_linear"),
    ("matmul", r"^aten::(b?mm|(add|badd)b?mm|matmul|linear|(add)?mv|dot|einsum)$"),
    ("optimizer", r"multi_tensor_apply|[Aa]dam|foreach"),
    ("copy", r"^Memcpy|^Memset|copy_kernel|BatchedCopy|FillFunctor"),
    ("copy", r"^aten::(copy_|clone|contiguous|to|_to_copy|cat|stack|fill_|zero_|zeros|ones|full)$"),
    ("softmax", r"(?i:softmax)"),
    ("indexing", r"gather|scatter|embedding|::index|RadixSort"),
    ("indexing", r"krn_partial|compute_grad_weight"),  # gradient of the embedding
    ("reduction", r"(?i:reduce|moments|gammabeta|layer_?norm|rms_?norm|nll_loss)"),
    ("reduction", r"^aten::(sum|mean|a?max|a?min|var|var_mean|(linalg_vector_)?norm|argmax)$"),
    ("elementwise", r"elementwise|triu_tril|masked_fill|dropout|^aten::\w+_backward$"),
    ("elementwise", r"^aten::(add|sub|mul|div|neg|pow|r?sqrt|reciprocal|exp|log|sin|cos)_?$"),
    ("elementwise", r"^aten::(silu|sigmoid|tanh|gelu|relu|where|maximum|minimum|clamp)_?$"),
    ("elementwise", r"^aten::(tril|triu|arange|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+)_?$"),
)

# A kernel template names its operation in one of its arguments, inside wrappers to be skipped.
_FUNCTOR = re.compile(
    r"\b(?!gpu_|AUnary|BUnary|BinaryFunctor|UnaryFunctor)"
    r"(\w*Functor\w*|\w+_functor|\w+Ops|\w+_kernel(?:_cuda|_impl)?|\w+_cuda_out|\w+Epilogue"
    r"|FlashAttn\w+|cutlass_\w+)\b"
)
_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_RETURNS = re.compile(r"^(?:void|std::enable_if<.*?>::type) ")
_GRAPH = re.compile(r"^## Call (\w+) .*")


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in one call."""

    name: str  # by ``short``
    category: str  # by ``category``
    calls: float  # launches
    seconds: float  # of all launches


@dataclass(frozen=True)
class Profile:
    """The time of one call, broken down."""

    kernels: list[Kernel]  # longest first
    categories: dict[str, float]  # seconds by category, longest first
    phases: dict[str, float]  # seconds of the kernels in each ``phase``, nested phases included
    device_seconds: float  # of all kernels


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a block of code in the profiler, in an NVTX range and for every listener."""
    # Passed as an argument, the name may contain braces.
    marked = torch.cuda.nvtx.range("{}", name) if torch.cuda.is_available() else nullcontext()
    _tell(name, "start")
    with marked, torch.profiler.record_function(name):
        try:
            yield
        finally:
            _tell(name, "end")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener(name, "start" | "end")`` at the start and end of every phase in the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def _tell(name: str, edge: Edge) -> None:
    for listener in tuple(_LISTENERS):
        listener(name, edge)


def category(kernel: str) -> str:
    """Return the category of a kernel or CPU operator by its full name, or "other"."""
    return next((kind for kind, pattern in CATEGORIES if re.search(pattern, kernel)), "other")


def short(kernel: str) -> str:
    """Return a kernel's name without namespaces and template arguments, except the operation.

    ``vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)`` becomes
    ``vectorized_elementwise_kernel[CUDAFunctor_add]``; a plain name is unchanged.
    """
    plain = _RETURNS.sub("", _UNNAMED.sub("", _GRAPH.sub(r"\1", kernel)))
    found = re.search(r"[<(]", plain)
    if found is None:
        return plain
    *spaces, name = plain[: found.start()].strip().split("::")
    if name == "kernel" and spaces:  # cuBLAS distinguishes kernels by namespace
        name = f"{spaces[-1]}::{name}"
    does = _FUNCTOR.search(plain, found.end())
    return f"{name}[{does[1]}]" if does else name


def profile(call: Callable[[], object], device: torch.device, *, calls: int = 1) -> Profile:
    """Profile ``call``, which must be warm; average over ``calls`` calls.

    The device is synchronized at both ends of each ``phase``, so each kernel runs in the phase that
    launched it.

    Raises:
        ValueError: ``calls`` is not positive.
    """
    if calls < 1:
        raise ValueError(f"calls: wanted at least 1, got {calls}")
    kinds, where = [torch.profiler.ProfilerActivity.CPU], DeviceType.CPU
    if device.type == "cuda":
        kinds, where = [*kinds, torch.profiler.ProfilerActivity.CUDA], DeviceType.CUDA
    phases: dict[str, None] = {}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def on_phase(name: str, _: Edge) -> None:
        phases[name] = None
        wait()

    wait()
    with listening(on_phase), torch.profiler.profile(activities=kinds, acc_events=True) as recorded:
        for _ in range(calls):
            call()
        wait()
    return summary(recorded.events(), where=where, phases=[*phases], calls=calls)


def summary(
    events: Iterable[Any], *, where: DeviceType, phases: Sequence[str] = (), calls: int = 1
) -> Profile:
    """Summarize the ``FunctionEvent``s of the PyTorch profiler, as the mean of ``calls`` calls.

    Events on the device ``where`` are kernels; ``phases`` are names of annotations.
    """
    events = list(events)
    # Annotations also appear on the device's timeline, but are not kernels.
    annotations = {event.name for event in events if event.is_user_annotation}
    kernels = [e for e in events if e.device_type == where and e.name not in annotations]
    names = {name: (short(name), category(name)) for name in {event.name for event in kernels}}
    counts = Counter(names[event.name] for event in kernels)
    times: defaultdict[tuple[str, str], float] = defaultdict(float)
    categories: defaultdict[str, float] = defaultdict(float)
    for event in kernels:
        name, kind = names[event.name]
        times[name, kind] += _seconds(event) / calls
        categories[kind] += _seconds(event) / calls
    longest = sorted(times, key=lambda key: -times[key])
    return Profile(
        kernels=[Kernel(*key, _each(counts[key], calls), times[key]) for key in longest],
        categories=dict(sorted(categories.items(), key=lambda item: -item[1])),
        phases={name: _inside(kernels, events, name) / calls for name in phases},
        device_seconds=sum(times.values()),
    )


def _seconds(event: Any) -> float:
    """Return the seconds of a kernel, or the self time of a CPU operator."""
    on_cpu = event.device_type == DeviceType.CPU
    return 1e-6 * (event.self_cpu_time_total if on_cpu else event.time_range.elapsed_us())


def _each(count: int, calls: int) -> float:
    """Return the count per call: an integer unless the calls differed."""
    return count / calls if count % calls else count // calls


def _inside(kernels: Iterable[Any], events: Iterable[Any], name: str) -> float:
    """Return the seconds of the kernels whose midpoint lies in a phase.

    Midpoints tolerate the few microseconds by which host and device clocks differ.
    """
    spans = [e.time_range for e in events if e.name == name and e.device_type == DeviceType.CPU]
    inside = 0.0
    for kernel in kernels:
        middle = (kernel.time_range.start + kernel.time_range.end) / 2
        if any(span.start <= middle <= span.end for span in spans):
            inside += _seconds(kernel)
    return inside
