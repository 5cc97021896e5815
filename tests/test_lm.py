"""The transformer: its parts against their definitions, its costs against what torch uses."""

import dataclasses
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flashattn import attention
from flashattn.costs import Costs
from flashattn.lm import SIZES, Config, RMSNorm, RoPE, TransformerLM, cross_entropy
from flashattn.testing.live_bytes import Live

EXACT = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}
STUDY = Config(width=48, hidden=80, layers=3, heads=3, vocab=50, longest=64)
naive = partial(attention, causal=True, impl="naive")
flash = partial(attention, causal=True, impl="sdpa")


def naive_autocast(q, k, v):
    """Run naive attention on any device as autocast runs it on a GPU: with softmax in fp32."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.float().softmax(dim=-1).to(v.dtype) @ v


ATTENTION = {"naive": naive, "naive_autocast": naive_autocast, "flash": flash}


def model_of(config=STUDY, attention=naive, **options):
    """Make a model from seed 0."""
    torch.manual_seed(0)
    return TransformerLM(config, attention, **options)


def batch_of(config=STUDY, batch=2, context=24):
    """Make tokens and targets."""
    return torch.randint(config.vocab, (2, batch, context))


def autocast(precision):
    """Cast as the precision says, on the CPU."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


@pytest.mark.parametrize("size", EXACT)
def test_parameter_counts(size):
    """Each size has exactly as many parameters as the study and the formula say."""
    with torch.device("meta"):
        model = TransformerLM(SIZES[size], naive)
    assert sum(x.numel() for x in model.parameters()) == EXACT[size] == SIZES[size].parameters


def test_nothing_but_parameters_is_saved():
    """A checkpoint holds parameters only, without RoPE's tables."""
    model = model_of()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(device, dtype):
    """RMSNorm is x / sqrt(mean(x^2) + eps) * weight in x's dtype, with statistics in fp32."""
    norm = RMSNorm(1000).to(device)
    torch.nn.init.normal_(norm.weight)
    # Squares from 1e-4, where eps matters, to 1e4, whose sum needs more than 8 bits.
    scale = torch.logspace(-2, 2, 5, device=device)[:, None]
    x = (torch.randn(5, 1000, device=device) * scale).to(dtype)
    wide, weight = x.double(), norm.weight.to(dtype).double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    y = norm(x)
    assert y.dtype == dtype
    # Two roundings in the dtype, and the error of the mean in fp32.
    eps = 2 * torch.finfo(dtype).eps + 10 * torch.finfo(torch.float32).eps
    assert ((y.double() - exact).abs() <= eps * exact.abs()).all()


def test_rope_turns_pairs():
    """Pair (i, i + D/2) is a complex number, rotated by t * theta^(-2 i / D)."""
    config = dataclasses.replace(STUDY, theta=100.0)
    x = torch.randn(2, 64, 3, 16)
    t, i = torch.arange(64.0).double(), torch.arange(8.0).double()
    angles = t[:, None] * 100.0 ** (-2 * i / 16)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * angles)[:, None]
    exact = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(RoPE(config)(x), exact.float(), atol=2e-6, rtol=0)


def test_rope_at_positions():
    """Rows taken from a longer sequence are rotated by their positions in it."""
    x, rope = torch.randn(2, 64, 3, 16), RoPE(STUDY)
    where = torch.tensor([3, 4, 40, 63])
    assert torch.equal(rope(x[:, where], where), rope(x)[:, where])


def test_rope_keeps_dtypes():
    """A bf16 input gives a bf16 output, rotated in fp32."""
    x = torch.randn(1, 64, 16).bfloat16()
    assert RoPE(STUDY)(x).dtype == torch.bfloat16
    assert torch.equal(RoPE(STUDY)(x), RoPE(STUDY)(x.float()).bfloat16())


def test_model_is_its_definition():
    """The logits are those of the architecture in fp64, with heads, w1 and w3 taken one by one."""
    model, (tokens, _) = model_of(), batch_of()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0)
    weights = {name: x.detach().double() for name, x in model.named_parameters()}

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name + ".weight"]

    rope = model.rope.double()
    x = weights["embedding.weight"][tokens]
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    for i in range(3):
        of = {n.removeprefix(f"blocks.{i}."): x for n, x in weights.items()}
        y = norm(x, f"blocks.{i}.norm1")
        heads = []
        for h in range(3):
            q, k, v = (y @ of["attention.qkv.weight"].view(3, 3, 16, 48)[j, h].T for j in range(3))
            scores = (rope(q) @ rope(k).mT / 4).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ of["attention.o.weight"].T
        y = norm(x, f"blocks.{i}.norm2")
        w1, w3 = of["mlp.w13.weight"].chunk(2)
        gate = y @ w1.T
        x = x + (gate * gate.sigmoid() * (y @ w3.T)) @ of["mlp.w2.weight"].T
    exact = norm(x, "norm") @ weights["head.weight"].T
    model.rope.float()
    torch.testing.assert_close(model(tokens).double(), exact, atol=2e-5, rtol=0)


def test_attention_gets_views():
    """Attention is called once per layer, with views [B, H, T, D] that were never copied."""
    spy = Mock(side_effect=lambda q, k, v: torch.zeros_like(v))
    logits = model_of(attention=spy)(batch_of()[0])
    assert not torch.equal(logits, model_of()(batch_of()[0]))
    assert spy.call_count == STUDY.layers
    for call in spy.call_args_list:
        for x in call.args:
            assert x.shape == (2, 3, 24, 16)
            assert x.stride()[1::2] == (16, 1)
            assert x.stride(2) > 16


def test_residual_stream_is_fp32_under_autocast():
    """Under bf16 autocast only q, k, v and logits are bf16; blocks take and return fp32."""
    spy = Mock(wraps=naive)
    model, (tokens, targets) = model_of(attention=spy), batch_of()
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, x, y: streams.extend([x[0].dtype, y.dtype]))
    with autocast("bf16"):
        logits = model(tokens)
        loss = cross_entropy(logits, targets)
    loss.backward()
    assert [x.dtype for call in spy.call_args_list for x in call.args] == [torch.bfloat16] * 9
    assert streams == [torch.float32] * 6
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {x.grad.dtype for x in model.parameters()} == {torch.float32}


def test_loss_is_fp32():
    """The loss of bf16 logits is that of the same numbers in fp32."""
    logits, targets = torch.randn(2, 24, 50).bfloat16(), batch_of()[1]
    exact = logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean().neg()
    assert cross_entropy(logits, targets).double() == pytest.approx(exact.item(), rel=1e-6)


def test_initial_weights():
    """Matrices preserve variance, are truncated at three deviations, and differ between layers."""
    model = model_of(SIZES["tiny"])
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all()
            continue
        std = 1 if name.startswith("embedding") else weight.shape[1] ** -0.5
        assert weight.std().item() == pytest.approx(
            0.9866 * std, rel=0.02
        )  # 0.9866: left by the truncation
        assert 2.8 * std < weight.abs().max() <= 3.001 * std
    assert not torch.equal(*(block.mlp.w2.weight for block in model.blocks))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_compiles_as_one_graph(checkpoint):
    """torch.compile makes one graph of the model, with the gradients of the eager model."""
    tokens, targets = batch_of()
    config = dataclasses.replace(STUDY, layers=2)
    eager, graph = (model_of(config, flash, checkpoint=checkpoint) for _ in range(2))
    call = torch.compile(graph, fullgraph=True, backend="aot_eager")
    cross_entropy(eager(tokens), targets).backward()
    cross_entropy(call(tokens), targets).backward()
    for a, b in zip(eager.parameters(), graph.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers: wanted at least 1, got 0"),
        ({"heads": 5}, "heads: wanted a divisor of the width 48 .*, got 5"),
        ({"heads": 16}, "heads: .* even head dimension, got 16"),
        ({"theta": 0.0}, "theta: wanted a number above 0, got 0.0"),
    ],
)
def test_bad_config(change, words):
    """An invalid configuration is refused, with the name of the field."""
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(STUDY, **change)


def test_context_has_a_limit():
    """A context beyond RoPE's tables is refused."""
    with pytest.raises(ValueError, match="tokens: wanted a context up to 64, got 65"):
        model_of()(torch.zeros(1, 65, dtype=torch.long))


@contextmanager
def saving(model, *inputs):
    """Collect the storages saved for backward, except those of the model and of the inputs."""
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *inputs)}
    saved = {}

    def keep(x):
        if x.untyped_storage()._cdata not in own:
            saved[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield saved


def saved_bytes(model, batch, context, precision):
    """Run forward and loss; return the bytes saved for backward."""
    tokens, targets = batch_of(model.config, batch, context)
    with saving(model, tokens, targets) as saved, autocast(precision):
        loss = cross_entropy(model(tokens), targets)  # stays alive, with all that it saves
        total = sum(x.untyped_storage().nbytes() for x in saved.values())
    del loss
    return total


@pytest.mark.parametrize(
    ("size", "layers", "held"),
    [
        ("small", 2, "naive_autocast"),
        *((size, 2, held) for size in SIZES for held in ("naive", "flash")),
        ("small", 12, "flash"),  # at full depth
    ],
)
def test_activation_bytes(size, layers, held):
    """The bytes that forward saves are predicted exactly: every size, contexts 128 and 1024.

    All blocks are alike, so two stand for many; one model at full depth confirms that.
    """
    with FakeTensorMode():
        config = dataclasses.replace(SIZES[size], layers=layers)
        model = TransformerLM(config, ATTENTION[held])
        for precision in ("fp32", "bf16"):
            for context in (128, 1024):
                costs = Costs(
                    config=model.config,
                    batch=4,
                    context=context,
                    precision=precision,
                    attention=held,
                    device="cpu",
                )
                kept = costs.activation_bytes + costs.cast_bytes
                assert saved_bytes(model, 4, context, precision) == kept


def test_activation_bytes_of_one_sequence():
    """A batch of one, whose products need no copies of q, k and v, is predicted to the byte."""
    with FakeTensorMode():
        costs = Costs(config=SIZES["tiny"], batch=1, context=128, device="cpu")
        model = TransformerLM(SIZES["tiny"], naive)
        assert saved_bytes(model, 1, 128, "fp32") == costs.activation_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("held", ATTENTION)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_bytes_on_a_gpu(device, held, precision):
    """On a GPU, whose kernels differ, the prediction is within 1% of the bytes saved."""
    with device:
        model = TransformerLM(SIZES["tiny"], ATTENTION[held])
        tokens, targets = batch_of(SIZES["tiny"], 4, 128)
    cast = torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16")
    with saving(model, tokens, targets) as saved, cast:
        loss = cross_entropy(model(tokens), targets)
        got = sum(x.untyped_storage().nbytes() for x in saved.values())
    del loss
    costs = Costs(config=SIZES["tiny"], batch=4, context=128, precision=precision, attention=held)
    assert got == pytest.approx(costs.activation_bytes + costs.cast_bytes, rel=0.01)


def test_gpu_norm_keeps_less():
    """The GPU's norm, one kernel, does not save the normalized x: 2 norms a block, and the last."""
    cpu = Costs(config=STUDY, batch=2, context=24, device="cpu")
    gpu = dataclasses.replace(cpu, device="cuda")
    assert cpu.activation_bytes - gpu.activation_bytes == (2 * 3 + 1) * 4 * 2 * 24 * 48


def peaks_of(costs):
    """Run each step on fake tensors; return its peak of live bytes."""
    with FakeTensorMode(), Live() as live:
        model = TransformerLM(costs.config, ATTENTION[costs.attention], checkpoint=costs.checkpoint)
        tokens, targets = batch_of(costs.config, costs.batch, costs.context)
        live.peak = 0
        with torch.no_grad(), autocast(costs.precision):
            model(tokens)
        peaks, live.peak = {"forward": live.peak}, 0
        with autocast(costs.precision):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
    return peaks | {"forward+backward": live.peak}


PEAKS = [  # some at full depth, others with fewer layers
    ("tiny", 2, "naive", 1024, False),  # the scores are the largest
    ("small", 4, "naive_autocast", 1024, False),
    ("small", 4, "naive", 1024, True),  # one block's scores at a time
    ("small", 12, "flash", 1024, False),
    ("small", 4, "flash", 1024, True),
    ("medium", 4, "flash", 128, False),  # gradients outweigh activations
    ("2.7B", 4, "naive", 256, False),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "layers", "held", "context", "checkpoint"), PEAKS)
def test_peak_bytes(size, layers, held, context, checkpoint, precision):
    """The predicted peak of each step is within 3% of its peak of live bytes."""
    costs = Costs(
        config=dataclasses.replace(SIZES[size], layers=layers),
        batch=4,
        context=context,
        precision=precision,
        attention=held,
        checkpoint=checkpoint,
        device="cpu",
    )
    peaks = peaks_of(costs)
    # AdamW's state is always allocated, and the fused optimizer adds nothing.
    peaks["train"] = peaks["forward+backward"] + costs.optimizer_bytes
    for step, peak in peaks.items():
        assert costs.bytes(step) == pytest.approx(peak, rel=0.03), step
    assert costs.bytes("backward") == costs.bytes("forward+backward")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_executed_flops(checkpoint):
    """The flops that a model with naive attention executes are predicted exactly."""
    costs = Costs(config=STUDY, batch=2, context=24, checkpoint=checkpoint)
    with FakeTensorMode():
        model = TransformerLM(STUDY, naive, checkpoint=checkpoint)
        tokens, targets = batch_of()
        with FlopCounterMode(display=False) as forward:
            loss = cross_entropy(model(tokens), targets)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counted = {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}
    counted["forward+backward"] = counted["train"] = sum(counted.values())
    assert {step: costs.executed(step) for step in counted} == counted


def test_model_flops():
    """Forward takes 2 flops per weight and token and 4 D per pair, and backward twice that."""
    costs = Costs(config=STUDY, batch=2, context=24, checkpoint=True)
    with torch.device("meta"):
        model = TransformerLM(STUDY, naive)
    matrices = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    pairs = 2 * 3 * sum(t + 1 for t in range(24))  # batch, heads
    forward = 2 * 2 * 24 * sum(matrices) + 3 * 4 * 16 * pairs
    steps = {"forward": 1, "backward": 2, "forward+backward": 3, "train": 3}
    assert {step: costs.flops(step) for step in steps} == {k: v * forward for k, v in steps.items()}


def test_flash_flops():
    """Flash forward executes no extra flops; backward adds q @ k.T, half of forward's attention."""
    costs = Costs(config=STUDY, batch=2, context=24, attention="flash")
    pairs = 2 * 3 * 24 * 25 // 2
    assert costs.executed("forward") == costs.flops("forward")
    assert costs.executed("train") - costs.flops("train") == 3 * 2 * 16 * pairs


def test_packed_documents_cost_their_own_pairs():
    """Documents of 10, 0 and 14 tokens cost only their pairs, which flash computes 3.5 times."""
    whole = Costs(config=STUDY, batch=2, context=24, attention="flash")
    packed = dataclasses.replace(whole, documents=(10, 0, 14))
    spared = 4 * 48 * 2 * 3 * (24 * 25 - 10 * 11 - 14 * 15) // 2  # 4 C, batch, layers
    assert whole.flops("train") - packed.flops("train") == 3 * spared
    assert 2 * (whole.executed("train") - packed.executed("train")) == 7 * spared
    assert packed.bytes("train") == whole.bytes("train")


def test_checkpointing():
    """Checkpointed blocks give the same gradients, and the predicted saving in bytes is exact."""
    tokens, targets = batch_of()
    grads, alive, predicted = [], [], []
    for checkpoint in (False, True):
        model = model_of(checkpoint=checkpoint)
        with Live() as live:  # also counts the parameters, the tokens and the loss
            loss = cross_entropy(model(tokens), targets)
            alive.append(live.now)
        loss.backward()
        grads.append([x.grad for x in model.parameters()])
        costs = Costs(config=STUDY, batch=2, context=24, checkpoint=checkpoint, device="cpu")
        predicted.append(costs.activation_bytes)
    assert all(map(torch.equal, *grads))
    assert alive[0] - alive[1] == predicted[0] - predicted[1]
    assert predicted[1] < predicted[0] / 3


def test_parameter_gradient_optimizer_bytes():
    """A step of AdamW leaves exactly the predicted bytes of parameters, gradients and moments."""
    model, (tokens, targets) = model_of(), batch_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with autocast("bf16"):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    optimizer.step()
    costs = Costs(config=STUDY, batch=2, context=24, precision="bf16")
    moments = [x for s in optimizer.state.values() for n, x in s.items() if n != "step"]
    assert sum(x.nbytes for x in model.parameters()) == costs.parameter_bytes
    assert sum(x.grad.nbytes for x in model.parameters()) == costs.gradient_bytes
    assert sum(x.nbytes for x in moments) == costs.optimizer_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 0}, "batch: wanted at least 1, got 0"),
        ({"context": 0}, "context: wanted at least 1, got 0"),
        ({"precision": "int8"}, "precision: wanted one of fp32, tf32, bf16, fp16, got 'int8'"),
        ({"documents": (3, 4)}, "documents: wanted 8 tokens in all, got 7"),
        ({"attention": "sdpa"}, "attention: wanted one of naive, .*, got 'sdpa'"),
    ],
)
def test_bad_costs(change, words):
    """An invalid argument of ``Costs`` is refused by name."""
    with pytest.raises(ValueError, match=words):
        Costs(**{"config": STUDY, "batch": 1, "context": 8} | change)


@pytest.mark.parametrize("cost", [Costs.flops, Costs.executed, Costs.bytes])
def test_bad_step(cost):
    """An unknown step is refused by name."""
    with pytest.raises(ValueError, match=r"step: wanted one of forward, .*, got 'sideways'"):
        cost(Costs(config=STUDY, batch=1, context=8), "sideways")
