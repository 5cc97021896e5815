"""Kernels by name, category and phase: names as the profilers write them, and a CPU's own."""

from __future__ import annotations

import time

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from flashattn.measure import profile as module
from flashattn.measure.profile import category, listening, phase, profile, short, summary

CPU = torch.device("cpu")
LAMBDA = "(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda(float)#1}"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
MUL = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> > >"
    "(at::TensorIteratorBase&, at::native::BinaryFunctor<float, float, float, at::native::"
    "binary_internal::MulFunctor<float> > const&)::{lambda(int)#1}>(int, at::native::lambda)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda"
    f"{LAMBDA}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>>(int)"
)
CAST = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda"
    f"{LAMBDA}, std::array<char*, 2ul> >(int)"
)
SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t"
    "<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::"
    "{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)"
)
MEAN = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, "
    "float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double>(...)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::"
    "BinaryOpListAlphaFunctor<float, 2, 2, 0>, std::plus<float>, float>(...)"
)
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>"
    "(float*, float const*, int, int, int, bool const*, int, bool)"
)
CROSS_ENTROPY = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
    "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
)
FLASH_3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>>>>>(flash::Params)"
)
FLASH_2 = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>, "
    "false, true>(pytorch_flash::Flash_fwd_params)"
)
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<"
    "cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 128, 128>::Params)"
)
SPLIT_K = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
    "true, false, false>(cublasLt::cublasSplitKParams<float>, float const*)"
)
GEMV = (
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, "
    "false, true, false>(cublasGemvParamsEx<int>)"
)
ARANGE = (
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out"
    "(c10::Scalar const&, at::Tensor&)::{lambda()#1}>(int)"
)
INDEX = (
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    "index_kernel_impl<at::native::OpaqueType<4> >(at::TensorIteratorBase&)>>(long)"
)
CAT = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anonymous "
    "namespace)::OpaqueType<4u>, unsigned int, 3, 128, 1, 16, 4>(char*)"
)
ZEROS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
    "std::array<char*, 1ul> >(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
)
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>"
    "(cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4::Params)"
)

CATEGORIES = {
    "ours": ["flashattn_fwd", "flashattn_bwd_dkdv", "flashattn_fwd_0", "flashattn::forward"],
    "attention": [
        FLASH_2,
        FLASH_3,
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int const*)",
        EFFICIENT,
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(...)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_k0",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128>(...)",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(...)",
        "triton_tem_fused_flex_attention_0",  # a template, which is matrix products elsewhere
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "matmul": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_hsh_64x8_64x16_4x1_v_bz_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas",
        "ampere_sgemm_128x64_tn",
        CUTLASS,
        SPLIT_K,  # a reduction that only products have
        GEMV,
        "triton_tem_fused_addmm_relu_0",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "mkldnn::_linear_pointwise",
    ],
    "softmax": [
        SOFTMAX,
        CROSS_ENTROPY,
        "triton_per_fused__softmax_masked_fill_1",
        "aten::_softmax",
        "aten::_log_softmax_backward_data",
    ],
    "reduction": [
        SUM,
        MEAN,
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>()",
        "triton_red_fused_add_mean_mul_pow_rsqrt_3",
        "triton_per_fused_sum_0",
        "aten::sum",
        "aten::mean",
    ],
    "elementwise": [
        ADD,
        MUL,
        ARANGE,  # with an index of its own, but gathering nothing
        "void at::native::triu_tril_kernel<float, int, false, 4, false>(...)",
        "triton_poi_fused__softmax_mul_silu_2",  # one loop over what the softmax left
        "triton_poi_fused__to_copy_embedding_0",
        "aten::add",
        "aten::mul_",
        "aten::silu",
        "aten::tril",
        "aten::silu_backward",
        "aten::masked_fill_",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float>(...)",
    ],
    "copy": [
        COPY,
        CAST,
        CAT,
        ZEROS,
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "aten::copy_",
        "aten::cat",
        "aten::fill_",
    ],
    "indexing": [
        INDEX,
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(...)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>(...)",
        "void at::native::(anonymous namespace)::krn_partials_per_segment<long>(...)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(...)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>(...)",  # of its tokens
        "aten::embedding_dense_backward",
        "aten::gather",
        "aten::scatter_",
        "aten::index",
        "aten::index_select",
    ],
    "optimizer": [ADAM, FOREACH, "aten::_fused_adamw_", "aten::_foreach_add_"],
    "other": ["aten::empty", "ncclDevKernel_AllGather_RING_LL", "my_kernel"],
}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [(name, kind) for kind, names in CATEGORIES.items() for name in names],
    ids=lambda text: short(text)[:60],
)
def test_category_of_a_kernel(kernel, expected):
    """Every kernel that the studies meet is of the category a reader would put it in."""
    assert category(kernel) == expected


def test_every_category_rule_is_needed():
    """Without any one rule some kernel above would be put elsewhere."""
    names = [name for names in CATEGORIES.values() for name in names]
    whole = [category(name) for name in names]
    for rule in module.CATEGORIES:
        with pytest.MonkeyPatch.context() as patch:
            rest = tuple(each for each in module.CATEGORIES if each is not rule)
            patch.setattr(module, "CATEGORIES", rest)
            assert [category(name) for name in names] != whole, rule


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (ADD, "vectorized_elementwise_kernel[CUDAFunctor_add]"),
        (MUL, "elementwise_kernel[MulFunctor]"),
        (COPY, "unrolled_elementwise_kernel[direct_copy_kernel_cuda]"),
        (SUM, "reduce_kernel[sum_functor]"),
        (MEAN, "reduce_kernel[MeanOps]"),
        (ADAM, "multi_tensor_apply_kernel[FusedAdamMathFunctor]"),
        (SOFTMAX, "softmax_warp_forward"),
        (CROSS_ENTROPY, "cunn_SoftMaxForward[LogSoftMaxForwardEpilogue]"),
        (FLASH_3, "device_kernel[FlashAttnFwdSm90]"),
        (EFFICIENT, "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"),
        (GEMV, "gemvx::kernel"),
        (CUTLASS, "Kernel2[cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4]"),
        (ARANGE, "elementwise_kernel_with_index[arange_cuda_out]"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "nvjet_tst_64x8_64x16_4x1_v_bz_TNN"),
        ("aten::mm", "aten::mm"),
        ("## Call CompiledFxGraph fb4c4xhv5s5wc33e ##", "CompiledFxGraph"),
    ],
)
def test_short_name_says_what_a_kernel_does(kernel, expected):
    """A short name has the template and what it computes, and is its own short name."""
    assert short(kernel) == expected
    assert short(expected) == expected


def event(name, start, end, *, device=DeviceType.CUDA, annotation=False):
    """Return an event as torch's profiler hands it on; times in microseconds."""
    return FunctionEvent(0, name, 1, start, end, device_type=device, is_user_annotation=annotation)


def on_host(name, start, end):
    """Return an annotation of the host's."""
    return event(name, start, end, device=DeviceType.CPU, annotation=True)


EVENTS = [
    on_host("forward", 0, 100),
    event("forward", 5, 95, annotation=True),  # the same on the device's timeline
    event("aten::mm", 2, 4, device=DeviceType.CPU),
    event("nvjet_tst_1", 10, 40),
    event(ADD, 40, 50),
    on_host("backward", 100, 300),
    event("backward", 90, 170, annotation=True),  # when it began is the host's to say
    event("nvjet_tst_1", 110, 160),
    event(ADD.replace("float", "c10::BFloat16"), 160, 170),
    on_host("scores", 120, 170),
    on_host("Optimizer.step#AdamW.step", 300, 400),
    event("Optimizer.step#AdamW.step", 310, 350),  # a device's annotation that is not marked as one
    event(ADAM, 310, 350),
]


def test_summary_sums_kernels_longest_first():
    """Launches of a kernel are one entry, and neither annotations nor the host's work are any."""
    result = summary(EVENTS, where=DeviceType.CUDA)
    assert [(k.name, k.category, k.calls) for k in result.kernels] == [
        ("nvjet_tst_1", "matmul", 2),
        ("multi_tensor_apply_kernel[FusedAdamMathFunctor]", "optimizer", 1),
        ("vectorized_elementwise_kernel[CUDAFunctor_add]", "elementwise", 2),
    ]
    assert [k.seconds for k in result.kernels] == pytest.approx([80e-6, 40e-6, 20e-6])
    assert result.device_seconds == pytest.approx(140e-6)
    assert list(result.categories) == ["matmul", "optimizer", "elementwise"]
    assert result.matmul_share == pytest.approx(80 / 140)


def test_summary_is_of_one_call():
    """Two calls are halved: times, counts and phases; a count that does not divide says so."""
    result = summary([*EVENTS, event("once", 0, 1)], where=DeviceType.CUDA, phases=["forward"])
    halves = summary(
        [*EVENTS, event("once", 0, 1)], where=DeviceType.CUDA, phases=["forward"], calls=2
    )
    assert halves.device_seconds == pytest.approx(result.device_seconds / 2)
    assert halves.phases["forward"] == pytest.approx(result.phases["forward"] / 2)
    assert [k.calls for k in halves.kernels] == [1, 0.5, 1, 0.5]
    assert isinstance(halves.kernels[0].calls, int)


def test_phases_hold_the_kernels_that_run_in_them():
    """A kernel is of each phase around it, and one that reaches over an edge of its larger part."""
    late = event("late", 95, 103)  # by the clocks' disagreement
    names = ["forward", "backward", "scores", "nothing"]
    result = summary([*EVENTS, late], where=DeviceType.CUDA, phases=names)
    seconds = [1e6 * each for each in result.phases.values()]
    assert list(result.phases) == names
    assert seconds == pytest.approx([48, 60, 60, 0])


def test_nothing_run_is_no_share():
    """A profile without kernels has a share of 0 and no division by it."""
    assert summary([], where=DeviceType.CUDA).matmul_share == 0.0


def test_profile_on_a_cpu_is_of_operators():
    """On a CPU a product's profile is its operators, per call, and their phases."""
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
    assert 0 < result.matmul_share < 1


def test_profile_wants_calls():
    """Not calling at all is no profile."""
    with pytest.raises(ValueError, match="calls: wanted at least 1, got 0"):
        profile(lambda: None, CPU, calls=0)


def test_listeners_hear_both_ends():
    """A listener hears the start and the end of phases inside its block only, an error or not."""
    heard = []

    def fail():
        with listening(lambda *what: heard.append(what)), phase("outer"):
            with phase("inner"):
                pass
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    with phase("unheard"):
        pass
    edges = [("outer", "start"), ("inner", "start"), ("inner", "end"), ("outer", "end")]
    assert heard == edges


def test_phases_carry_nvtx_ranges(monkeypatch):
    """With a GPU a phase is an NVTX range too, closed on an error and with braces in its name."""
    log = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))

    def fail():
        with phase("step{0}"):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert log == ["step{0}", "pop"]


def test_profile_waits_at_the_ends_of_phases(monkeypatch):
    """On a GPU the device is awaited before a phase begins and before it ends, and at the end."""
    log = []

    class Recorded:
        """What torch's profiler records, with its start and end noted."""

        def __init__(self, activities, **_):
            log.append(sorted(kind.name for kind in activities))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            log.append("stop")

        def events(self):
            return EVENTS

    class Annotation(Recorded):
        """torch's annotation, with its ends noted."""

        def __init__(self, name):
            log.append(name)

    monkeypatch.setattr(torch.profiler, "profile", Recorded)
    monkeypatch.setattr(torch.profiler, "record_function", Annotation)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))

    def call():
        with phase("forward"):
            log.append("work")

    result = profile(call, torch.device("cuda", 0))
    in_phase = ["wait", "forward", "work", "wait", "stop"]
    assert log == ["wait", ["CPU", "CUDA"], *in_phase, "wait", "stop"]
    assert result.phases == {"forward": pytest.approx(40e-6)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
