"""Plans are data: chosen and explained without the GPU, and launched as they say."""

import heapq
import random
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch

import flashattn
from flashattn.counts.decisions import CARDS, asked, cases, plans, tensors
from flashattn.kernels import execute
from flashattn.kernels.launch import KernelLaunch
from flashattn.masks import prefix
from flashattn.plan.choose import NAMES, choose_forward
from flashattn.plan.gpu import Gpu
from flashattn.plan.spec import Options, TensorSpec, signature
from flashattn.plan.splits import equal_sections
from flashattn.testing.sweep import UNEQUAL


def explain(
    *,
    heads=32,
    kv_heads=8,
    seq_q=2048,
    seq_kv=None,
    head_dim=128,
    value_dim=None,
    dtype="bfloat16",
    **how,
):
    """Return the plan for an H200."""
    keys = kv_heads, seq_kv or seq_q
    shapes = (heads, seq_q, head_dim), (*keys, head_dim), (*keys, value_dim or head_dim)
    inputs = [torch.empty(1, *x, device="meta", dtype=getattr(torch, dtype)) for x in shapes]
    return flashattn.explain(*inputs, **{"gpu": "H200"} | how)


def test_a_plan_for_an_h200_prints_on_a_laptop():
    """A plan prints kernel, tile, scheduler and workspaces of both passes, and each reason."""
    plan = explain(causal=True)
    assert (
        str(plan)
        == """\
forward
  kernel          sm90
  tile            128x128 s2, tma
  operands        native
  counters        1
  programs        132
  scheduler       lpt, persistent, dynamic, sections of 32 heads
  - Hopper's kernel: 512 tiles for 132 SMs, Hopper's needs 0.67 each
  - 512 tiles of 128 queries on 132 SMs
backward
  kernel          sm90
  pass 1          hopper_bwd, s2, tma, 512 programs
  operands        native
  dq              semaphore
  gqa_splits      4
  scheduler       lpt, sections of 32 heads
  workspaces      minus_lse [32, 2048, 8] bfloat16; minus_delta [32, 2048, 8] bfloat16; \
dk_partial [4, 8, 2048, 128] float32; dv_partial [4, 8, 2048, 128] float32; \
dq_accum [1, 32, 4096, 64] float32; dq_semaphore [1024] int32
  - Hopper's kernels: 1365 tiles for 132 SMs, Hopper's need 0.95 each
  - one pass: programs own keys, and add to dq
  - 4 GQA splits: few programs would have much to do each"""
    )


BIAS, SLOPES = (torch.empty(x, device="meta") for x in ((2048, 2048), 32))
BEYOND, THEIRS = "Hopper's backward beyond 128 columns adds no bias to scores", "; triton's do"


@pytest.mark.parametrize(
    ("how", "kernels", "sentence"),
    [
        ({"impl": "triton"}, ("portable", "portable"), "the tile for a full GPU"),
        ({"gpu": "B200"}, ("portable", "portable"), "hopper needs a GPU of compute capability 9.0"),
        ({"seq_q": 1, "seq_kv": 8192}, ("portable", "portable"), "pack_gqa: "),
        ({"head_dim": 256}, ("sm90", "sm90_d256"), "two passes: "),
        ({"dtype": "float32"}, ("sm90_fp32", "sm90_fp32"), "fp32 is decomposed beforehand"),
        ({"deterministic": False}, ("sm90", "sm90"), "one pass: "),
        ({"softcap": 50.0}, ("sm90", "sm90"), "one pass: "),
        ({"softcap": 50.0, "dtype": "float32"}, ("portable", "portable"), "fp32 have no softcap"),
        ({"scale": -1.0}, ("portable", "portable"), "not Hopper's: the scale is -1"),
        ({"seq_q": 0}, ("none", "none"), "there is no query"),
        ({"bias": BIAS.bfloat16()}, ("sm90", "sm90"), "one pass: "),
        ({"bias": BIAS}, ("portable", "sm90"), "a bias in fp32 takes long to exchange"),
        ({"bias": BIAS, "causal": True, "head_dim": 192}, ("sm90", "portable"), BEYOND),
        ({"impl": "hopper", "bias": BIAS, "head_dim": 192}, ("sm90", "none"), BEYOND + THEIRS),
        ({"head_dim": 192, "alibi_slopes": SLOPES}, ("sm90", "sm90_d256"), "two passes: "),
    ],
)
def test_why(how, kernels, sentence):
    """Each branch says why it was taken."""
    plan = explain(**how)
    assert (plan.forward.kernel, plan.backward.kernel) == kernels
    assert any(sentence in x for x in (*plan.forward.why, *plan.backward.why))
    assert plan.backward.dq == ("atomic" if "deterministic" in how else plan.backward.dq)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dtype": "float64"}, "triton takes fp32, fp16 and bf16"),
        ({"impl": "hopper", "gpu": "A100"}, "hopper needs a GPU"),
        ({"impl": "hopper", "softcap": 50.0, "dtype": "float32"}, "fp32 have no softcap" + THEIRS),
        ({"gpu": "TPU"}, "gpu: wanted one of A100, H100, H200, B200, interpreter, got 'TPU'"),
        ({"impl": "sdpa"}, "impl: wanted one of auto, triton, hopper, got 'sdpa'"),
        ({"precision": "fp8"}, "precision: wanted one of auto"),
        ({"deterministic": "no"}, "deterministic: wanted one of False, True"),
        ({"mask": "padding"}, "mask: wanted an object of flashattn.masks, got str"),
        ({"mask": prefix(torch.tensor([3])), "causal": True}, "mask: it lets queries see keys"),
        ({"documents": torch.tensor([0, 8]), "causal": "left"}, "causal: wanted False, True"),
        (
            {"documents": torch.tensor([0, 8]), "alibi_slopes": torch.ones(32)},
            "alibi_slopes: not with documents",
        ),
    ],
)
def test_what_cannot_be_explained_is_refused(how, words):
    """What has no plan is refused with attention's own reason, or by the argument's name."""
    with pytest.raises(ValueError, match=words):
        explain(**how)


def test_a_gpu_of_ones_own():
    """A GPU is data, too: half of the SMs need half of the tiles."""
    half = replace(CARDS["h200"], num_sms=66)
    assert explain(heads=4, kv_heads=4).forward.kernel == "portable"
    assert explain(heads=4, kv_heads=4, gpu=half).forward.kernel == "sm90"
    assert explain(gpu=Gpu((9, 0), 132)).forward == explain().forward


@pytest.mark.parametrize("heads", [28, 32, 40])
@pytest.mark.parametrize("seq_q", [4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_sm_idles_behind_the_last_section(head_dim, seq_q, heads):
    """If tiles run in section order, each on the first free SM, all SMs end nearly together.

    A tile costs one step per tile of keys, plus 2.5 (docs/tuning-log.md).
    """
    plan = explain(heads=heads, kv_heads=heads, seq_q=seq_q, head_dim=head_dim, causal=True).forward
    rows, keys = plan.tile.block_q, plan.tile.block_kv
    steps = [-(-min(end, seq_q) // keys) for end in range(rows, seq_q + rows, rows)]
    assert busy(heads, plan.scheduler.section, steps) > 0.97


def test_no_sm_idles_behind_the_last_documents():
    """Tiles of documents are drawn by position, of all heads at once, and keep all SMs busy."""
    q = TensorSpec.of(torch.empty(1, 16, 16384, 128, device="meta", dtype=torch.bfloat16))
    plan = choose_forward((q, q, q), CARDS["h200"], Options(None, 0.1, bounds=1, family="hopper"))
    starts = zip(accumulate(UNEQUAL, initial=0), UNEQUAL, strict=False)
    begins = [start for start, length in starts for _ in range(length)]
    steps = [-(-(row + 128) // 128) - begins[row] // 128 for row in range(0, 16384, 128)]
    assert plan.scheduler.dynamic
    # Sections of four heads would have room for keys that all later queries see.
    assert busy(16, plan.scheduler.section, steps) > 0.98 > busy(16, 4, steps)


@pytest.mark.parametrize(
    ("kv_heads", "reach", "section"), [(8, 2048, 2), (8, 512, 8), (32, 2048, 8)]
)
def test_windows_on_both_sides_fit_in_the_l2_cache(kv_heads, reach, section):
    """A section has so few key heads that q, dO and dQ of their windows take 32 MiB."""
    given = {"kv_heads": kv_heads, "seq_q": 32768}
    plan = explain(window=(reach, reach), **given).backward
    assert plan.scheduler.section == section
    assert explain(window=(2 * reach, 0), **given).backward.scheduler.section == 8


def busy(heads, section, steps):
    """Return the fraction of time that SMs are busy; ``steps`` are those of a head's tiles."""
    sms = [0.0] * 132
    for first in range(0, heads, section):
        for cost in reversed(steps):
            for _ in range(first, min(first + section, heads)):
                heapq.heapreplace(sms, sms[0] + cost + 2.5)
    return sum(sms) / len(sms) / max(sms)


@pytest.mark.parametrize(
    ("heads", "wanted", "section"),
    [(32, 8, 8), (28, 8, 7), (10, 2.67, 2), (21, 5.3, 6), (16, 3, 4), (32, 96, 32), (8, 0.4, 1)],
)
def test_sections_have_as_many_heads(heads, wanted, section):
    """Sections are equal if the number of heads allows it; otherwise the last has fewer."""
    assert equal_sections(heads, wanted) == section


@pytest.mark.parametrize("card", CARDS)
def test_what_is_launched_is_what_was_planned(card):
    """For 60 random problems both passes launch the planned numbers of programs."""
    for case in random.SystemRandom().sample(cases(), 60):
        found = plans(case, CARDS[card])
        if not isinstance(found, str):
            forward, backward = found
            wanted = [forward.programs] * (forward.kernel != "none")
            wanted += [sum(one.programs) for one in backward.passes]
            launched = iter(launches(case, CARDS[card]))
            assert all(n in launched for n in wanted), str(case)  # in this order


def launches(case, gpu):
    """Return how many programs each launch has, forward and backward, and run none."""
    given, programs = dict(zip(NAMES, tensors(case), strict=False)), []
    binds = {execute.bind_forward: NAMES[:3], execute.bind_backward: NAMES}
    with (
        patch.object(execute, "gpu_of", lambda _: gpu),
        patch.object(KernelLaunch, "__call__", lambda self, *_: programs.append(self._grid[0])),
    ):
        for bind, names in binds.items():
            operands = [given.get(name) for name in names]
            known = signature(*(x for x in operands if x is not None))
            bind.__wrapped__(known, asked(case))(*operands)
    return programs


@pytest.mark.parametrize(
    ("how", "padded"),
    [
        ({}, (False, False)),
        ({"value_dim": 64, "window": (300, 20)}, (False, False)),
        ({"heads": 8, "kv_heads": 2, "seq_q": 8192}, (False, False)),
        ({"heads": 16, "kv_heads": 1}, (False, True)),  # GQA splits
        ({"value_dim": 100}, (True, True)),  # a row of 200 bytes, which TMA cannot address
        ({"value_dim": 100, "impl": "hopper"}, (True, True)),
        ({"value_dim": 1, "head_dim": 136, "impl": "hopper"}, (True, True)),
        ({"value_dim": 136}, (True, True)),
        ({"head_dim": 256}, (True, True)),
        ({"head_dim": 128, "value_dim": 64}, (True, True)),
        ({"dtype": "float32"}, (True, True)),
        ({"gpu": "A100"}, (True, True)),
        ({"impl": "triton"}, (True, True)),
        ({"alibi_slopes": torch.empty(8, device="meta")}, (False, False)),
        ({"seq_q": 0}, (False, False)),
    ],
)
def test_narrow_values(how, padded):
    """Hopper's kernels take values of 128 columns where keys have up to 192; others are padded."""
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": 192, "value_dim": 128} | how
    plan = explain(**sizes)
    assert (plan.forward.padded, plan.backward.padded) == padded
    for one in (plan.forward, plan.backward):
        assert one.padded is any("values are padded" in sentence for sentence in one.why)


@pytest.mark.parametrize(("head_dim", "on_an_sm"), [(16, 2), (32, 2), (64, 1), (128, 1), (256, 1)])
def test_decoding_splits_for_as_many_programs_as_share_an_sm(head_dim, on_an_sm):
    """An SM gets two programs, or one whose tiles in flight need over half of shared memory."""

    def decoding(seq_kv):
        how = {"heads": 12, "kv_heads": 4, "seq_q": 1, "causal": False}
        return explain(**how, seq_kv=seq_kv, head_dim=head_dim).forward

    plan = decoding(33 << 12)
    tile = plan.tile
    in_flight = 2 * tile.stages * tile.block_kv * head_dim * 2
    assert (2 * in_flight > 227 << 10) == (on_an_sm == 1)
    assert plan.programs == 132 * on_an_sm
    for keys in range(64, 2048, 64):
        few = decoding(keys)
        tiles, of_split = (-(-n // few.tile.block_kv) for n in (keys, few.split.length))
        assert of_split >= 2 if tiles >= 4 else few.split.num == 1


@pytest.mark.parametrize(("card", "stages"), [("A100", 2), ("H100", 3), ("B200", 3), ("small", 2)])
def test_stages_of_the_gradient_of_a_bias(card, stages):
    """Three stages need the shared memory of a large GPU; those of capability 12 are small."""
    small = replace(CARDS["h200"], capability=(12, 0))
    bias = torch.empty(1, 1, 2048, 2048, device="meta")
    plan = explain(bias=bias, gpu=small if card == "small" else card)
    assert plan.backward.dbias.tile.stages == stages
