"""attn_implementation="fattn": tiny random models of transformers agree with their eager.

They run on the CPU: this tests which mask and scores a model asks for, not the kernels.
"""

import re
from inspect import signature
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn import resolve
from flashattn.bounds import Bounds, of_rows
from flashattn.testing.accuracy import Error

transformers = pytest.importorskip("transformers", reason="the extra integrations is not installed")
# What follows imports transformers.
from transformers import masking_utils  # noqa: E402

from flashattn.integrations import transformers as drop_in  # noqa: E402

LENGTH, PADDING, DOCUMENTS, WINDOW = 24, 7, (5, 12, 7), 8
DRAWS = 4  # draws of tokens; the budget takes eager's largest error
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
BOTH = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODERS = {
    "Llama": ("Llama", GROUPED),
    "Qwen3": ("Qwen3", GROUPED),
    "Mistral": ("Mistral", WINDOWED),
    "Phi3": ("Phi3", WINDOWED),
    "Olmo3": ("Olmo3", BOTH),
    "GptOss": ("GptOss", BOTH | EXPERTS),
    "Gemma2": ("Gemma2", BOTH | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3", BOTH | {"query_pre_attn_scalar": 16}),
    "Llama4": (
        "Llama4",
        GROUPED | EXPERTS | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 32},
    ),
    "DeepseekV3": (
        "DeepseekV3",
        SMALL
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"experts_implementation": "batched_mm"},
    ),
}
TEXT_CONFIGS = ("Gemma3", "Llama4")  # whose other configuration includes images
ENCODERS = {
    "Bert": ("Bert", SMALL | NO_DROPOUT),
    "ModernBert": (
        "ModernBert",
        SMALL
        | {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
}
T5 = {
    "T5": (
        "T5",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
        | {"eos_token_id": None, "tie_word_embeddings": False},
    )
}
MODELS = DECODERS | ENCODERS | T5
MODES = [(name, mode) for name in MODELS for mode in ("plain", "padded")]
MODES += [(name, "packed") for name in DECODERS]


def exact(_, q, k, v, mask, *, scaling=None, softcap=None, s_aux=None, **options):
    """Compute attention by its definition, called as transformers calls it, with a bool mask."""
    group, bias = q.shape[1] // k.shape[1], options.get("position_bias")
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    dead = scores.isneginf().all(dim=-1, keepdim=True)
    p = scores.masked_fill(dead, 0).softmax(dim=-1).masked_fill(dead, 0)
    return (p[..., : k.shape[2]] @ v).transpose(1, 2).contiguous(), None


def exact_mask(**asked):
    """Evaluate every mask, without transformers' shortcuts."""
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    return masking_utils.sdpa_mask(**asked | dict.fromkeys(skips, False))


@pytest.fixture(autouse=True, scope="module")
def _registered():
    """Register ours, with the tiled PyTorch code, and the exact attention that judges it."""
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    before = [dict(x._global_mapping) for x in interfaces]
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    drop_in.register(impl="tiled")
    for interface, function in zip(interfaces, (exact, exact_mask), strict=True):
        interface.register("exact", function)
    yield
    transformers.logging.set_verbosity(level)
    for interface, mapping in zip(interfaces, before, strict=True):
        interface._global_mapping = mapping


def model_of(name, **changes):
    """Return a tiny model with random weights."""
    family, options = MODELS[name]
    options = options | changes
    config = getattr(transformers, f"{family}{'Text' * (name in TEXT_CONFIGS)}Config")(**options)
    head = {"T5": "ForConditionalGeneration"} | dict.fromkeys(ENCODERS, "ForMaskedLM")
    torch.manual_seed(0)
    return getattr(transformers, family + head.get(name, "ForCausalLM"))(config)


def inputs_of(mode, seed=1):
    """Return random tokens, labels, and the inputs that the mode adds."""
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if mode == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :PADDING] = 0
        inputs["labels"][0, : PADDING + 1] = -100  # no loss of the last one's next token either
    if mode in ("packed", "documents"):
        positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].expand(2, -1)
        inputs |= {"position_ids": positions, "use_cache": False}
    return inputs


def by_lengths(inputs):
    """Return packed inputs whose lengths, not positions, say where documents begin."""
    cu = torch.tensor([0, *DOCUMENTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shown = torch.ones_like(inputs["input_ids"])
    most = dict.fromkeys(("max_length_q", "max_length_k"), max(DOCUMENTS))
    return inputs | {"attention_mask": shown, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu} | most


def step(model, inputs, attention, run=None):
    """Return the logits of tokens in the loss, and all gradients."""
    model.set_attn_implementation(attention)
    model.train().zero_grad()
    out = (model if run is None else run)(**inputs)
    out.loss.backward()
    grads = [x.grad.double().flatten() for x in model.parameters() if x.grad is not None]
    return out.logits.detach()[inputs["labels"] != -100].double(), torch.cat(grads)


def assert_as_eager(model, mode, run=None, ours=lambda inputs: inputs):
    """Check that no error exceeds attention's own budget, with eager as its naive.

    A whole model is one chain of roundings, whose largest error is small by luck for some tokens.
    So eager runs on several draws of tokens, as naive attention does for a small problem.
    """
    draws = [inputs_of(mode, seed) for seed in range(1, 1 + DRAWS)]
    if mode == "documents":
        draws = [{x: y if x == "use_cache" else y[:1] for x, y in one.items()} for one in draws]
    got = step(model, ours(draws[0]), "fattn", run)
    naive = [step(model, inputs, "eager") for inputs in draws]
    model.double()
    truth = [step(model, inputs, "exact") for inputs in draws]
    eps = torch.finfo(torch.float32).eps
    for i, one in enumerate(got):
        errors = [Error.of(x[i], exact[i]).max for x, exact in zip(naive, truth, strict=True)]
        size = max(exact[i].abs().max().item() for exact in truth)
        assert Error.of(one, truth[0][i]).max <= 2.0 * max(errors) + eps * size


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_training_step(name, mode):
    """Logits and gradients are those of eager attention."""
    assert_as_eager(model_of(name), mode)


@pytest.mark.parametrize("name", [x for x in DECODERS if x not in ("GptOss", "Llama4")])
def test_documents_by_lengths(name):
    """Documents given by lengths are those that transformers finds by positions.

    In gpt-oss transformers looks for none, and Llama 4 counts chunks from the first token of all.
    """
    assert_as_eager(model_of(name), "documents", ours=by_lengths)


def not_generated(name, cache):
    """Return why transformers itself, such as 5.17, cannot generate in this way, or None."""
    takes = signature(masking_utils.create_chunked_causal_mask).parameters
    if (name, cache) == ("Llama4", "static") and "block_sequence_ids" not in takes:
        return "transformers gives create_chunked_causal_mask an argument that it does not take"
    return None


@pytest.mark.why_not.with_args(not_generated)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, *T5])
def test_generate(name, cache):
    """Greedy tokens after a padded prompt are those of eager attention, beyond the window."""
    model, inputs = model_of(name).eval(), inputs_of("padded")
    tokens = []
    for attention in ("eager", "fattn"):
        model.set_attn_implementation(attention)
        how = {"max_new_tokens": 2 * WINDOW, "do_sample": False, "cache_implementation": cache}
        asked = {x: inputs[x] for x in ("input_ids", "attention_mask")}
        tokens.append(model.generate(**asked, **how))
    assert torch.equal(*tokens)


# torch.compile reads the gradient of each input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "layers", "whole", "mode"),  # each pair of name, whole and mode
    [
        ("Llama", 1, True, "plain"),
        ("Llama", 1, False, "padded"),
        ("GptOss", 2, True, "padded"),  # one of each kind
        ("GptOss", 1, False, "plain"),  # with a window, and Llama's has none
    ],
)
def test_compiled(name, layers, whole, mode):
    """Compiling the model, or each layer, as one graph changes nothing."""
    torch.compiler.reset()
    types = BOTH["layer_types"][:layers] if name == "GptOss" else None
    model = model_of(name, num_hidden_layers=layers, layer_types=types)
    how = {"backend": "aot_eager", "fullgraph": True}
    if whole:
        return assert_as_eager(model, mode, run=torch.compile(model, **how))

    def run(**inputs):
        for layer in model.model.layers:
            layer.compile(**how)
        out = model(**inputs)
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        return out

    return assert_as_eager(model, mode, run=run)


@pytest.mark.parametrize("mode", ["plain", "padded"])
def test_lengths_share_a_graph(mode):
    """A compiled layer takes any length after the second without recompiling, under any mask."""
    torch.compiler.reset()
    counter = CompileCounter()
    attend = torch.compile(drop_in._attend, backend=counter, fullgraph=True)
    for length in (16, 20, 24, 28):
        padding = torch.ones(2, length, dtype=torch.bool)
        padding[0, :PADDING] = mode == "plain"
        mask = drop_in._make_mask(2, length, length, attention_mask=padding)
        q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
        attend(None, q, k, v, mask, impl="sdpa")  # "tiled" has a graph for each number of tiles
    assert counter.frame_count == 2


FUNCTIONS = {
    "causal": lambda w: (masking_utils.causal_mask_function, None),
    "full": lambda w: (masking_utils.bidirectional_mask_function, None),
    "window": lambda w: (masking_utils.sliding_window_causal_mask_function(w), w),
    "two-sided": lambda w: (masking_utils.sliding_window_bidirectional_mask_function(w), w),
    "chunks": lambda w: (masking_utils.chunked_causal_mask_function(w, torch.tensor([0, 2])), w),
    "prefix": lambda w: (lambda b, h, t, s: (s <= t) | (s < w), None),
    "dilated": lambda w: (lambda b, h, t, s: (t - s) % (w + 1) == 0, None),
}


@st.composite
def masks(draw):
    """Draw a mask that transformers may ask for: cache offsets, as numbers or tensors, padding."""
    lengths = st.integers(1, 9)
    queries, past, spare, dropped = (draw(lengths), *(draw(st.integers(0, 6)) for _ in range(3)))
    dropped, spare = min(dropped, past), spare - min(3, queries - 1)
    function, size = FUNCTIONS[draw(st.sampled_from(sorted(FUNCTIONS)))](draw(st.integers(1, 6)))
    asked = {"batch_size": 2, "q_length": queries, "kv_length": past + queries + spare - dropped}
    asked |= {"q_offset": past, "kv_offset": dropped, "mask_function": function}
    asked |= {"local_size": size, "device": "cpu"}
    if draw(st.booleans()):
        asked["q_offset"] = torch.tensor(past)
    kind = draw(st.sampled_from(["none", "all", "left", "any"]))
    if kind != "none":
        seen = torch.ones(2, past + queries, dtype=torch.bool)
        if kind == "left":
            seen[0, : draw(st.integers(0, past + queries))] = False
        if kind == "any":
            seen = torch.tensor(draw(st.lists(st.booleans(), min_size=len(seen[0]) * 2)))
            seen = seen[: 2 * (past + queries)].view(2, -1)
        asked["attention_mask"] = seen
    return asked


def packed(function, positions):
    """Return the mask function that transformers makes for packed documents."""
    documents = masking_utils.find_packed_sequence_indices(positions)
    documents = torch.zeros_like(positions) if documents is None else documents
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):  # of 5.18 to 5.23
        return masking_utils.packed_sequence_compatibility_function(function, positions, documents)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # the only way from 5.24 on
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))


@st.composite
def packed_masks(draw):
    """Draw a mask of packed documents."""
    names = ["causal", "full", "window", "two-sided", "chunks"]
    function, size = FUNCTIONS[draw(st.sampled_from(names))](draw(st.integers(1, 6)))
    length = draw(st.integers(1, 12))
    ends = st.sets(st.integers(1, length))
    rows = []
    for _ in range(2):
        starts = [0, *sorted(draw(ends) - {length}), length]
        rows.append(torch.cat([torch.arange(n) for n in torch.tensor(starts).diff().tolist()]))
    asked = {"batch_size": 2, "q_length": length, "kv_length": length, "device": "cpu"}
    return asked | {"mask_function": packed(function, torch.stack(rows)), "local_size": size}


CHUNKS = {"batch_size": 2, "local_size": 3, "device": "cpu"}
# Chunks of 3: a second document that begins inside a chunk, and a cache that dropped two keys.
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
PACKED_CHUNKS = {"mask_function": packed(FUNCTIONS["chunks"](3)[0], POSITIONS), **CHUNKS}
PACKED_CHUNKS |= {"q_length": 12, "kv_length": 12}
LATE_CHUNKS = {"mask_function": FUNCTIONS["chunks"](3)[0], **CHUNKS}
LATE_CHUNKS |= {"q_length": 3, "kv_length": 6, "q_offset": 5, "kv_offset": 2}


@hypothesis.settings(max_examples=100)
@hypothesis.given(asked=masks() | packed_masks(), most=st.sampled_from([1, 20, 1 << 26]))
@hypothesis.example(asked=PACKED_CHUNKS, most=1 << 26)
@hypothesis.example(asked=LATE_CHUNKS, most=1 << 26)
def test_masks_are_those_of_transformers(asked, most):
    """A mask, recognised or evaluated, shows what transformers' own shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drop_in, "MOST_PAIRS", most)
        got = drop_in._make_mask(**asked)
    seen = got.dense() if isinstance(got, drop_in.KeyRanges) else got
    assert torch.equal(seen, exact_mask(**asked))
    if isinstance(got, drop_in.KeyRanges) and got.call is None:
        bounds = Bounds(got.key_bounds, got.query_bounds)
        assert torch.equal(bounds.seen[:, None].expand(got.shape), seen)
        assert torch.equal(bounds.unseen_keys.expand(2, -1), ~seen.any(2)[:, 0])


@hypothesis.settings(max_examples=200)
@hypothesis.given(asked=masks() | packed_masks(), data=st.data())
def test_scores_are_those_of_transformers(asked, data):
    """Under any mask, caps, sinks, biases, grouped heads and wider values mean the same."""
    draw = data.draw
    heads, keys, width, values = draw(
        st.sampled_from([(4, 2, 8, 8), (2, 2, 8, 5), (3, 1, 8, 11), (2, 1, 4, 4)])
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    size = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(2, heads, asked["q_length"], width, **size)
    k = torch.randn(2, keys, asked["kv_length"], width, **size)
    v = torch.randn(2, keys, asked["kv_length"], values, **size)
    options = {"scaling": draw(st.sampled_from([None, 1.0])), "is_causal": True}
    options["softcap"] = draw(st.sampled_from([None, 1.5]))
    options["s_aux"] = torch.randn(heads, **size) if draw(st.booleans()) else None
    if draw(st.booleans()):
        options["position_bias"] = torch.randn(1, heads, q.shape[2], k.shape[2], **size)
    mask, wanted_mask = drop_in._make_mask(**asked), exact_mask(**asked)
    got, _ = drop_in._attend(None, q, k, v, mask, impl="tiled", **options)
    wanted, _ = exact(None, q, k, v, wanted_mask, **options)
    torch.testing.assert_close(got, wanted)
    assert got.is_contiguous()
    leaves = [x for x in (q, k, v, *options.values()) if isinstance(x, torch.Tensor)]
    weights = torch.randn_like(wanted)
    for x, y in zip(*(torch.autograd.grad(o, leaves, weights) for o in (got, wanted)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("one", ["query", "keys"])
def test_a_batch_of_one_is_broadcast(one):
    """Learned queries have a batch of 1, and SDPA broadcasts them to the batch of the keys."""
    batch = {"query": (1, 3), "keys": (3, 1)}[one]
    q = torch.randn(batch[0], 4, 5, 8, requires_grad=True)
    k, v = (torch.randn(batch[1], 2, 7, 8, requires_grad=True) for _ in range(2))
    got, _ = drop_in._attend(SimpleNamespace(is_causal=False), q, k, v, None, impl="tiled")
    wanted = sdpa(q, k, v, enable_gqa=True)
    torch.testing.assert_close(got, wanted.transpose(1, 2))
    results = ((o, (q, k, v), torch.ones_like(o)) for o in (got, wanted))
    for x, y in zip(*(torch.autograd.grad(*each) for each in results), strict=True):
        torch.testing.assert_close(x, y)


LONG = 1 << 20


@pytest.fixture
def _not_evaluated(monkeypatch):
    """Fail if a mask is evaluated."""

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(drop_in, "sdpa_mask", refuse)


@pytest.mark.usefixtures("_not_evaluated")
@pytest.mark.parametrize(
    ("name", "offset", "call"),
    [
        ("causal", 0, ("bottom_right", (None, None), LONG)),
        ("causal", 5, ("bottom_right", (None, None), LONG + 5)),
        ("window", 0, ("bottom_right", (3, None), LONG)),
        ("causal", 9, ("bottom_right", (None, None), None)),
        ("two-sided", 0, (False, (4, 4), None)),
        ("full", 0, (False, (None, None), None)),
    ],
)
def test_usual_masks_are_calls(name, offset, call):
    """Common masks become arguments of the call: a million queries and keys need no matrix."""
    function, local = FUNCTIONS[name](4)
    mask = drop_in._make_mask(1, LONG, LONG + 9, offset, 0, function, local_size=local)
    assert mask.call == call
    assert mask.contiguous() is mask


@pytest.mark.usefixtures("_not_evaluated")
@pytest.mark.parametrize("name", ["causal", "window", "two-sided", "full", "chunks", "packed"])
@pytest.mark.parametrize("offset", [0, 5, torch.tensor(5)], ids=str)
@pytest.mark.parametrize("side", ["left", "right", None])
def test_known_masks_are_not_evaluated(name, offset, side):
    """Known masks are not evaluated, even with padding, packed documents or a device offset."""
    queries, keys = 4096, 5000
    if name == "packed":
        queries, offset = keys, 0
        positions = (torch.arange(keys) % 1000).expand(2, -1)
        function = packed(FUNCTIONS["window"](4)[0], positions)
    else:
        function, _ = FUNCTIONS[name](4)
    padding = None if side is None else torch.arange(keys)[None] < torch.tensor([[7], [keys]])
    padding = ~padding if side == "left" else padding
    mask = drop_in._make_mask(2, queries, keys, offset, 0, function, padding)
    assert isinstance(mask, drop_in.KeyRanges)
    assert mask.contiguous() is mask


class Unread(TorchDispatchMode):
    """A mode that fails when a value of a tensor is read, as on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Refuse the operator behind ``item`` and ``bool``."""
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_padding_is_a_range():
    """Padding at the ends leaves a range of keys; padding with holes does not."""
    padding = torch.tensor([[False, False, True], [True, True, False]])
    assert isinstance(drop_in._make_mask(2, 3, 3, attention_mask=padding), drop_in.KeyRanges)
    with Unread():
        drop_in._make_mask(2, 3, 3, attention_mask=padding)
    padding[1, 1:] = torch.tensor([False, True])
    assert not isinstance(drop_in._make_mask(2, 3, 3, attention_mask=padding), drop_in.KeyRanges)
    with Unread(), pytest.raises(RuntimeError, match=re.escape(drop_in.HOLES)):
        drop_in._make_mask(2, 3, 3, attention_mask=padding)
    with Unread(), pytest.raises(AssertionError):
        drop_in._make_mask(2, 3, 3, attention_mask=padding, holes=True)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_layers_share_masks(name, monkeypatch):
    """Bounds are made once for all layers of a kind."""
    made = Mock(wraps=of_rows)
    monkeypatch.setattr(drop_in, "of_rows", made)
    monkeypatch.setattr(resolve, "of_rows", made)
    model = model_of(name)
    step(model, inputs_of("padded"), "fattn")
    assert made.call_count == (2 if name == "Gemma3" else 1)
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize(("name", "rows"), [("prefix", True), ("dilated", False)])
def test_other_masks_are_evaluated(name, rows):
    """Other masks are evaluated, and become bounds of rows where they can."""
    function, _ = FUNCTIONS[name](2)
    mask = drop_in._make_mask(2, 9, 9, mask_function=function)
    assert isinstance(mask, drop_in.KeyRanges) == rows


def test_mask_is_a_boolean_tensor():
    """Our masks can be used as boolean tensors, as models do."""
    mask = drop_in._make_mask(2, 3, 5, 2)
    wanted = exact_mask(batch_size=2, q_length=3, kv_length=5, q_offset=2)
    assert (mask.dtype, mask.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(mask[..., 1:], wanted[..., 1:])
    assert torch.equal(torch.where(mask, 0.0, 1.0), torch.where(wanted, 0.0, 1.0))


LATER_HIDDEN = torch.full((3, 3), -torch.inf).triu(1)[None, None]
CU = torch.tensor([0, 1, 3])
PADDED = drop_in._make_mask(1, 3, 3, attention_mask=torch.tensor([[True, True, False]]))


def attend(t=3, s=3, mask=None, **options):
    """Call a causal layer of one head."""
    q, k = torch.ones(1, 1, t, 4), torch.ones(1, 1, s, 4)
    v = torch.arange(4.0 * s).view(1, 1, s, 4)
    module = SimpleNamespace(is_causal=True)
    return drop_in._attend(module, q, k, v, mask, **options)[0][0, :, 0, 0]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, [0, 2, 4]),
        ({"is_causal": False}, [4, 4, 4]),
        ({"t": 1}, [4]),
        ({"sliding_window": 2}, [0, 2, 6]),
        ({"sliding_window": 2, "is_causal": False}, [2, 4, 6]),
        ({"position_bias": torch.zeros(1, 1, 3, 3)}, [0, 2, 4]),
        ({"mask": torch.zeros(1, 1, 3, 3), "sliding_window": 2}, [4, 4, 4]),
        ({"mask": torch.ones(1, 1, 3, 3) > 0, "position_bias": LATER_HIDDEN}, [0, 2, 4]),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, [0, 2, 4]),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, [0, 4, 6]),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3]), "is_causal": False}, [0, 6, 6]),
        ({"cu_seq_lens_q": CU, "position_bias": torch.zeros(1, 1, 3, 3)}, [0, 4, 6]),
        ({"cu_seq_lens_q": CU, "mask": torch.zeros(1, 1, 3, 3)}, [0, 6, 6]),
        ({"cu_seq_lens_q": CU, "mask": torch.ones(1, 1, 3, 3) > 0}, [0, 6, 6]),
        ({"cu_seq_lens_q": CU, "cu_seq_lens_k": torch.tensor([0, 2, 3])}, [0, 8, 8]),
        ({"cu_seq_lens_q": CU, "mask": PADDED}, [0, 4, 4]),
        ({"s": 5, "mask": drop_in._make_mask(1, 3, 5)}, [0, 2, 4]),
    ],
)
def test_without_our_mask(asked, wanted):
    """A layer without a mask is causal if its module is; a model's own tensor is added."""
    assert attend(**asked).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    "asked",
    [
        {"dropout": 0.1},
        {"cache": object()},
        {"output_attentions": True},
        {"sinks": torch.zeros(1, 1, 3, 1)},
        {"indices": torch.zeros(1)},
        {"block_indices": torch.zeros(1)},
    ],
)
def test_refuses_what_it_cannot(asked):
    """A keyword that would change the answer is refused by its name, and ignored when not set."""
    (name,) = asked
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        attend(**asked)
    attend(**{name: 0.0 if name == "dropout" else None})


def test_documents_of_a_batch():
    """Packed documents are refused in a batch of more than 1."""
    q = torch.ones(2, 1, 3, 4)
    with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_q: documents are packed in a"):
        drop_in._attend(None, q, q, q, None, cu_seq_lens_q=CU)


def test_name():
    """A name with "flash" is refused: transformers takes it for a kernel of its Hub."""
    with pytest.raises(ValueError, match='name: wanted one without "flash", got'):
        drop_in.register("flashattn")
