"""Kernels by name, category and phase, with names as the profilers write them."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from flashattn.measure import profile as module
from flashattn.measure.profile import category, listening, phase, profile, short, summary

CPU = torch.device("cpu")
NATIVE, ANONYMOUS = "void at::native::", "(anonymous namespace)::"
LAMBDA = "(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda(float)#1}"
VECTORIZED, REDUCE = f"{NATIVE}vectorized_elementwise_kernel<4, ", f"{NATIVE}reduce_kernel<512, 1, "
MULTI_TENSOR = f"{NATIVE}{ANONYMOUS}multi_tensor_apply_kernel<at::native::{ANONYMOUS}"
ADD = f"{VECTORIZED}at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"
# Kernel names as the profilers write them, by category.
CATEGORIES = {
    "ours": ["flashattn_fwd", "flashattn_bwd_dkdv", "flashattn_fwd_0", "flashattn::forward"],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 4>>(int)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<2>>>(int)",
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int const*)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<64>)",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(...)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_k0",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128>(...)",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(...)",
        "triton_tem_fused_flex_attention_0",  # a template; other templates are matrix products
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "matmul": [
        *[
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
            "ampere_sgemm_128x64_tn",
        ],
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)",  # only products have it
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(cublasGemvParamsEx)",
        "triton_tem_fused_addmm_relu_0",
        *["aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise"],
    ],
    "softmax": [
        f"void {ANONYMOUS}softmax_warp_forward<float, float, float, 10, false, false>(int)",
        f"{NATIVE}{ANONYMOUS}cunn_SoftMaxForward<4, at::native::LogSoftMaxForwardEpilogue>(int)",
        "triton_per_fused__softmax_masked_fill_1",
        *["aten::_softmax", "aten::_log_softmax_backward_data"],
    ],
    "reduction": [
        f"{REDUCE}at::native::ReduceOp<float, func_wrapper_t<at::native::sum_functor<int>>(int)",
        f"{REDUCE}at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(int)",
        f"{NATIVE}{ANONYMOUS}vectorized_layer_norm_kernel<float, float>(int)",
        f"{NATIVE}{ANONYMOUS}nll_loss_forward_reduce_cuda_kernel_2d<float>()",
        *["triton_red_fused_add_mean_mul_pow_rsqrt_3", "triton_per_fused_sum_0"],
        *["aten::sum", "aten::mean"],
    ],
    "elementwise": [
        ADD,
        f"{NATIVE}elementwise_kernel<128, at::native::gpu_kernel_impl<BinaryFunctor<MulFunctor>>",
        f"void {ANONYMOUS}elementwise_kernel_with_index<at::native::arange_cuda_out(int)>(int)",
        f"{NATIVE}triu_tril_kernel<float, int, false, 4, false>(...)",
        "triton_poi_fused__softmax_mul_silu_2",  # one loop over what the softmax left
        "triton_poi_fused__to_copy_embedding_0",
        f"{NATIVE}{ANONYMOUS}fused_dropout_kernel_vec<float, float>(...)",
        *["aten::add", "aten::mul_", "aten::silu", "aten::tril", "aten::silu_backward"],
        "aten::masked_fill_",
    ],
    "copy": [
        f"{NATIVE}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda{LAMBDA}>(int)",
        f"{VECTORIZED}at::native::bfloat16_copy_kernel_cuda{LAMBDA} >(int)",
        f"{NATIVE}{ANONYMOUS}CatArrayBatchedCopy_vectorized<OpaqueType<4u>, 3, 128>(char*)",
        f"{VECTORIZED}at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        *["aten::copy_", "aten::cat", "aten::fill_"],
    ],
    "indexing": [
        f"{NATIVE}index_elementwise_kernel<128, 4, at::native::index_kernel_impl<Opaque>>(long)",
        f"{NATIVE}{ANONYMOUS}indexSelectLargeIndex<float, long>(...)",
        f"{NATIVE}vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
        f"{NATIVE}_scatter_gather_elementwise_kernel<128, 8>(int)",
        f"{NATIVE}{ANONYMOUS}embedding_backward_feature_kernel<float>(...)",
        f"{NATIVE}{ANONYMOUS}krn_partials_per_segment<long>(...)",
        f"{NATIVE}{ANONYMOUS}compute_grad_weight<float, long>(...)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>(...)",  # sorts tokens
        *["aten::embedding_dense_backward", "aten::gather", "aten::scatter_", "aten::index"],
    ],
    "optimizer": [
        f"{MULTI_TENSOR}FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(...)",
        f"{MULTI_TENSOR}TensorListMetadata<2>, BinaryOpListAlphaFunctor<float, 2, 2, 0>>(...)",
        *["aten::_fused_adamw_", "aten::_foreach_add_"],
    ],
    "other": ["aten::empty", "ncclDevKernel_AllGather_RING_LL", "my_kernel"],
}
ADAM = CATEGORIES["optimizer"][0]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [(name, kind) for kind, names in CATEGORIES.items() for name in names],
    ids=lambda text: short(text)[:60],
)
def test_category_of_a_kernel(kernel, expected):
    """Every kernel that the studies meet has the category that a reader would expect."""
    assert category(kernel) == expected


def test_every_category_rule_is_needed():
    """Without any one rule some kernel above would have another category."""
    names = [name for names in CATEGORIES.values() for name in names]
    whole = [category(name) for name in names]
    for rule in module.CATEGORIES:
        with pytest.MonkeyPatch.context() as patch:
            rest = tuple(each for each in module.CATEGORIES if each is not rule)
            patch.setattr(module, "CATEGORIES", rest)
            assert [category(name) for name in names] != whole, rule


SHORT = {
    ADD: "vectorized_elementwise_kernel[CUDAFunctor_add]",
    CATEGORIES["elementwise"][1]: "elementwise_kernel[MulFunctor]",
    CATEGORIES["elementwise"][2]: "elementwise_kernel_with_index[arange_cuda_out]",
    CATEGORIES["copy"][0]: "unrolled_elementwise_kernel[direct_copy_kernel_cuda]",
    CATEGORIES["reduction"][0]: "reduce_kernel[sum_functor]",
    CATEGORIES["reduction"][1]: "reduce_kernel[MeanOps]",
    ADAM: "multi_tensor_apply_kernel[FusedAdamMathFunctor]",
    CATEGORIES["softmax"][0]: "softmax_warp_forward",
    CATEGORIES["softmax"][1]: "cunn_SoftMaxForward[LogSoftMaxForwardEpilogue]",
    CATEGORIES["attention"][1]: "device_kernel[FlashAttnFwdSm90]",
    CATEGORIES["attention"][3]: "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
    CATEGORIES["matmul"][3]: "Kernel2[cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4]",
    CATEGORIES["matmul"][5]: "gemvx::kernel",
    "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNN": "nvjet_tst_64x8_64x16_4x1_v_bz_TNN",
    "aten::mm": "aten::mm",
    "## Call CompiledFxGraph fb4c4xhv5s5wc33e ##": "CompiledFxGraph",
}


@pytest.mark.parametrize(("kernel", "expected"), SHORT.items(), ids=SHORT.values())
def test_short_name_says_what_a_kernel_does(kernel, expected):
    """A short name has the template and what it computes, and does not get any shorter."""
    assert short(kernel) == short(expected) == expected


def event(name, start, end, *, device=DeviceType.CUDA, annotation=False):
    """Return an event of torch's profiler; times are in microseconds."""
    return FunctionEvent(0, name, 1, start, end, device_type=device, is_user_annotation=annotation)


def on_host(name, start, end):
    """Return an annotation on the host."""
    return event(name, start, end, device=DeviceType.CPU, annotation=True)


EVENTS = [
    on_host("forward", 0, 100),
    event("forward", 5, 95, annotation=True),  # the same on the device's timeline
    event("aten::mm", 2, 4, device=DeviceType.CPU),
    event("nvjet_tst_1", 10, 40),
    event(ADD, 40, 50),
    on_host("backward", 100, 300),
    event("backward", 90, 170, annotation=True),  # the host decides when it began
    event("nvjet_tst_1", 110, 160),
    event(ADD.replace("float", "c10::BFloat16"), 160, 170),
    on_host("scores", 120, 170),
    on_host("Optimizer.step#AdamW.step", 300, 400),
    event("Optimizer.step#AdamW.step", 310, 350),  # a device's annotation that is not marked as one
    event(ADAM, 310, 350),
]


def test_summary_sums_kernels_longest_first():
    """All launches of a kernel are one entry; annotations and host work are none."""
    result = summary(EVENTS, where=DeviceType.CUDA)
    assert [(k.name, k.category, k.calls) for k in result.kernels] == [
        ("nvjet_tst_1", "matmul", 2),
        ("multi_tensor_apply_kernel[FusedAdamMathFunctor]", "optimizer", 1),
        ("vectorized_elementwise_kernel[CUDAFunctor_add]", "elementwise", 2),
    ]
    assert [k.seconds for k in result.kernels] == pytest.approx([80e-6, 40e-6, 20e-6])
    assert result.device_seconds == pytest.approx(140e-6)
    assert list(result.categories) == ["matmul", "optimizer", "elementwise"]
    assert result.categories["matmul"] == pytest.approx(80e-6)


def test_summary_is_of_one_call():
    """Times, counts and phases are per call, even if a count does not divide.

    Zero calls are refused.
    """
    with pytest.raises(ValueError, match="calls: wanted at least 1, got 0"):
        profile(lambda: None, CPU, calls=0)
    events = [*EVENTS, event("once", 0, 1)]
    result, halves = (
        summary(events, where=DeviceType.CUDA, phases=["forward"], calls=n) for n in (1, 2)
    )
    assert halves.device_seconds == pytest.approx(result.device_seconds / 2)
    assert halves.phases["forward"] == pytest.approx(result.phases["forward"] / 2)
    assert [k.calls for k in halves.kernels] == [1, 0.5, 1, 0.5]
    assert isinstance(halves.kernels[0].calls, int)


def test_phases_hold_the_kernels_that_run_in_them():
    """A kernel counts in each phase around it; across an edge, in the phase of its larger part."""
    late = event("late", 95, 103)  # since the clocks disagree
    names = ["forward", "backward", "scores", "nothing"]
    result = summary([*EVENTS, late], where=DeviceType.CUDA, phases=names)
    seconds = [1e6 * each for each in result.phases.values()]
    assert list(result.phases) == names
    assert seconds == pytest.approx([48, 60, 60, 0])


@pytest.mark.alone
def test_profile_on_a_cpu_is_of_operators():
    """On a CPU the profile of a call is its operators and their phases, per call."""
    a = torch.randn(256, 256)

    def call():
        with phase("products"):
            torch.matmul(a, a)  # an operator that calls another
            torch.mm(a, a)
        with phase("rest"):
            torch.softmax(a, -1)

    call()
    result = profile(call, CPU, calls=3)
    kernels = {kernel.name: kernel for kernel in result.kernels}
    assert (kernels["aten::mm"].calls, kernels["aten::mm"].category) == (2, "matmul")
    assert kernels["aten::_softmax"].category == "softmax"
    assert kernels["aten::matmul"].seconds < kernels["aten::mm"].seconds / 2
    assert "products" not in kernels
    assert result.device_seconds == pytest.approx(sum(result.categories.values()))
    assert sum(result.phases.values()) == pytest.approx(result.device_seconds)
    assert result.phases["products"] >= kernels["aten::mm"].seconds
    assert 0 < result.categories["matmul"] < result.device_seconds


def test_phases_are_heard_and_carry_nvtx_ranges(monkeypatch):
    """A listener hears both ends of phases, only inside its block; with a GPU so does NVTX.

    Phases are closed on an error, too, and a name may have braces.
    """
    heard, ranges = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("pop"))

    def fail():
        with listening(lambda *what: heard.append(what)), phase("outer"):
            with phase("step{0}"):
                pass
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    edges = [("outer", "start"), ("step{0}", "start"), ("step{0}", "end"), ("outer", "end")]
    assert ranges == ["outer", "step{0}", "pop", "pop"]
    with phase("unheard"):
        pass
    assert heard == edges


def test_profile_waits_at_the_ends_of_phases(monkeypatch):
    """On a GPU the device is synchronized around the call, and before a phase begins and ends."""
    log = []

    @contextmanager
    def noted(*names, activities=(), **_):
        log.append([*names, *sorted(kind.name for kind in activities)])
        yield SimpleNamespace(events=lambda: EVENTS)
        log.append("stop")

    monkeypatch.setattr(torch.profiler, "profile", noted)
    monkeypatch.setattr(torch.profiler, "record_function", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))

    def call():
        with phase("forward"):
            log.append("work")

    result = profile(call, torch.device("cuda", 0))
    in_phase = ["wait", ["forward"], "work", "wait", "stop"]
    assert log == ["wait", ["CPU", "CUDA"], *in_phase, "wait", "stop"]
    assert result.phases == {"forward": pytest.approx(40e-6)}


@pytest.mark.gpu
def test_profile_on_a_gpu_is_of_its_kernels():
    """On a GPU a product is one matmul kernel, and all kernels are in the phases they ran in."""
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def call():
        with phase("product"):
            torch.mm(a, a)
        with phase("sum"):
            (a + a).sum()
        time.sleep(1e-3)

    for _ in range(3):
        call()
    result = profile(call, device, calls=3)
    assert result.kernels[0].category == "matmul"
    assert result.kernels[0].calls == 1
    assert result.phases["product"] == pytest.approx(result.categories["matmul"], rel=0.05)
    assert sum(result.phases.values()) == pytest.approx(result.device_seconds)
    assert not {"product", "sum"} & {kernel.name for kernel in result.kernels}
    assert result.categories["reduction"] > 0
