"""The host reads nothing from the device: drop-ins with packed documents, padding and caches.

A torch mode catches reads on a CPU, and PyTorch's own check catches them on a GPU.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn import attention
from flashattn.integrations import flash_attn, kvcache, operators, sdpa

READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
} | {torch.nonzero}
CU = (0, 7, 7, 40)
USED = (5, 0, 30)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Refuse functions that read values."""
        assert function not in READS, function
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Refuse the operator that reads values."""
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@contextmanager
def unread(device):
    """Fail if a value is read from the device."""
    if device.type != "cuda":
        with _Functions(), _Operators():
            yield
        return
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def unseen(device, call, *values):
    """Call with numbers on the device, to compile and choose kernels, then again without reads.

    The second call gets new tensors, for which nothing is cached.
    """
    call(*(numbers(device, x) for x in values))
    given = [numbers(device, x) for x in values]
    with unread(device):
        return call(*given)


def tokens(device, count=40, heads=2):
    """Return random tokens that need gradients, in a dtype that the kernels take."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(count, heads, 64, generator=generator, device=device, dtype=dtype)
    return x.requires_grad_()


def numbers(device, values):
    """Return int32 numbers on the device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def _ours(device, monkeypatch):
    """On a CPU use our kernels: others read bounds, since values are in host memory there."""
    if device.type == "cpu":
        for module in (flash_attn, kvcache):
            monkeypatch.setattr(module, "attention", partial(attention, impl="triton"))


@pytest.mark.parametrize(
    "reads", [bool, int, torch.Tensor.item, torch.Tensor.tolist, torch.nonzero]
)
def test_a_read_is_caught(reads, device):
    """Every kind of read is caught."""
    x = torch.ones((), device=device)
    with pytest.raises((AssertionError, RuntimeError)), unread(device):
        reads(x)


@pytest.mark.usefixtures("_ours")
@pytest.mark.parametrize("used", [False, True])
def test_flash_attn_varlen(device, used):
    """Both passes over documents read nothing, whether all or only some tokens are used."""
    q, k = tokens(device), tokens(device, heads=1)

    def step(cu, lengths=None):
        how = {"causal": True, "window_size": (9, 0), "softcap": 5.0}
        o = flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, 33, 33, **how, seqused_k=lengths)
        return torch.autograd.grad(o.sum(), (q, k))

    results = unseen(device, step, CU, *[USED] * used)
    assert all(x.isfinite().all() for x in results)


@pytest.mark.usefixtures("_ours")
def test_one_graph_for_all_lengths(device):
    """With lengths as inputs, the functions compile once for all lengths, and change no bit."""
    q, k = tokens(device), tokens(device, heads=1)
    k_cache, v_cache = (tokens(device, heads=1).detach().view(2, 20, 1, 64) for _ in range(2))

    def step(cu, used):
        how = {"causal": True, "window_size": (9, 0)}
        cached = used[1:].clamp(max=20)
        o = flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, 33, 33, **how, seqused_k=used)
        return o, flash_attn.flash_attn_with_kvcache(
            q[None, :2].transpose(0, 1), k_cache, v_cache, cache_seqlens=cached, **how
        )

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cu, used in ((CU, USED), ((0, 20, 30, 39), (20, 3, 9))):
            given = numbers(device, cu), numbers(device, used)
            both = step(*given), compiled(*given)
            results = [(o, torch.autograd.grad(o.sum(), (q, k)), d) for o, d in both]
            torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_for_all_lengths(device):
    """A CUDA graph replayed with other lengths in place gives their results."""
    q, cu = tokens(device), numbers(device, CU)

    def step():
        how = {"causal": True, "deterministic": True}
        o = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 33, 33, **how)
        return o.detach(), *torch.autograd.grad(o.sum(), q)  # o would keep nodes of its stream

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for lengths in (CU, (0, 20, 30, 39)):
        cu.copy_(numbers(device, lengths))
        graph.replay()
        torch.testing.assert_close(got, step(), rtol=0, atol=0)


@pytest.mark.usefixtures("_ours")
def test_flash_attn_with_kvcache(device):
    """A decoding step reads nothing."""
    q, k_cache, v_cache = (tokens(device).detach().view(2, 20, 2, 64) for _ in range(3))

    def step(lengths):
        new = q[:, :1]
        return flash_attn.flash_attn_with_kvcache(
            new, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True
        )

    assert unseen(device, step, (3, 17)).isfinite().all()


def test_varlen_operators(device):
    """Our kernels for PyTorch's varlen operators read nothing; called here where modes see them."""
    q = tokens(device).detach()
    how = {"window_size_left": 9, "window_size_right": 0}

    def step(cu):
        shared = cu, cu, 33, 33, 0.0, True
        o, lse, *rest = operators.KERNELS["_flash_attention_forward"](
            q, q, q, *shared, False, **how, seqused_k=None
        )
        return operators.KERNELS["_flash_attention_backward"](
            o, q, q, q, o, lse, *shared, *rest[:2], **how
        )

    assert all(x.isfinite().all() for x in unseen(device, step, CU))


def test_varlen_attn(device):
    """``varlen_attn`` reads nothing; on a CPU only the test above sees what it calls."""
    q = tokens(device)

    def step(cu):
        return torch.autograd.grad(varlen_attn(q, q, q, cu, cu, 33, 33).sum(), q)[0]

    with sdpa.enabled(device.type):
        assert unseen(device, step, CU).isfinite().all()


def models(device):
    """Return tiny models of transformers, which differ in their masks."""
    transformers = pytest.importorskip("transformers", reason="the extra integrations is missing")
    from flashattn.integrations.transformers import register  # noqa: PLC0415

    register("fattn_unread", impl="auto" if device.type == "cuda" else "triton")
    size = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attn_implementation": "fattn_unread",
    }
    window = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    return {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)),
        "gemma 2": transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**size, **window)),
    }


@pytest.mark.parametrize("name", ["llama", "gemma 2"])
@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_training_step(name, mode, device):
    """A training step of a transformers model reads nothing: masks, both passes, the loss.

    Transformers itself reads ``position_ids`` unless it gets an ``attention_mask``.
    """
    model = models(device)[name].to(device)
    model = model.bfloat16() if device.type == "cuda" else model
    batch = 1 if mode == "packed" else 2
    ids = torch.arange(40 * batch, device=device).view(batch, 40) % 64
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    inputs["attention_mask"] = torch.ones_like(ids)
    if mode == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 33)]).to(device)[None]
        inputs |= {"position_ids": positions, "max_length_q": 33, "max_length_k": 33}
    else:
        inputs["attention_mask"][0, :9] = 0

    def step(cu):
        if mode == "packed":
            inputs.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        loss = model(**inputs).loss
        return torch.autograd.grad(loss, model.get_input_embeddings().weight)[0]

    assert unseen(device, step, CU).isfinite().all()
