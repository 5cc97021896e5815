"""Bugs that a fused attention may well have, each as a change to one place of the source.

They are data: ``test_mutants.py`` applies one at a time to a copy of the package, in which the
ordinary test that it names must then fail.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Args:
        name: of its test.
        path: the file below ``flashattn/``.
        found: text that this file has exactly once.
        put: what stands there in the mutant.
        symptom: what a user would see.
        caught: the function among the tests that sees it.
    """

    name: str
    path: str
    found: str
    put: str
    symptom: str
    caught: str = "tests/test_impls.py::test_cases"

    def __str__(self) -> str:
        """Return the name, for the test's id."""
        return self.name

    def applied(self, source: str) -> str:
        """Return the mutated source.

        Raises:
            ValueError: the text is not there exactly once.
        """
        times = source.count(self.found)
        if times != 1:
            raise ValueError(
                f"{self.name} no longer applies: wanted its text once in {self.path}, got {times}"
                f" times:\n{self.found}"
            )
        return source.replace(self.found, self.put)


FAR = "tests/test_impls.py::test_far_below_zero"
SCALES = "tests/test_impls.py::test_scales"
VALUES = "tests/test_impls.py::test_values"
LAYOUTS = "tests/test_impls.py::test_mixed_layouts"
CORNERS = "tests/test_attention.py::test_bottom_right_is_not_top_left"
SOFTCAP = "tests/test_attention.py::test_softcap"
ALIBI = "tests/test_scores.py::test_alibi"
BIAS = "tests/test_scores.py::test_bias"
RELATIVE = "tests/test_scores.py::test_relative_bias"
SINK = "tests/test_attention.py::test_sink"
SINK_BEHIND = "tests/test_scores.py::test_a_sink_behind"
SINK_OF_HOPPER = "tests/test_hopper_emulated.py::test_sinks_of_each_batch"
WINDOWS = "tests/test_attention.py::test_windows_are_inclusive"
BOUNDS = "tests/test_mask.py::test_bounds_are_the_support"
TILES = "tests/test_mask.py::test_tiles"
LSE = "tests/test_attention.py::test_lse_alone_is_differentiable"
LOADING = "tests/test_kernels.py::test_both_ways_of_loading_are_tested"
OFFSETS = "tests/test_kernels.py::test_offsets_are_64_bit"
SPLIT = "tests/test_kernels.py::test_split_keys"
COLUMNS = "tests/test_kernels.py::test_columns_come_together"
TF32 = "tests/test_kernels.py::test_torch_decides_on_tf32"
HALVES = "tests/test_kernels.py::test_tf32_in_two_terms"
PRECISION = "tests/test_kernels.py::test_fp32_precision"
SHARED = "tests/test_parallel_attention.py::test_ranks_share_the_whole"
PLANNED = "tests/test_parallel_plan.py::test_each_visible_pair_is_computed_once"

DOCUMENTS = "tests/test_masks.py::test_bounds_of_documents"
MASKS = "tests/test_masks.py::test_masks"
NO_DOCUMENT = "tests/test_masks.py::test_what_lies_in_no_document_is_hidden"
USED = "tests/test_flash_attn_api.py::test_used"
RECOGNISED = "tests/test_transformers.py::test_masks_are_those_of_transformers"

MUTANTS = [
    # Masks of rows
    Mutant(
        "documents_begin_at_0",
        "bounds.py",
        "at = x + start - own[document]",
        "at = x - own[document]",
        "a causal document sees what it would if it were the first",
        DOCUMENTS,
    ),
    Mutant(
        "documents_in_the_other_corner",
        "bounds.py",
        "    if bottom_right:\n",
        "    if not bottom_right:\n",
        "documents of more keys than queries are aligned at their other ends",
        DOCUMENTS,
    ),
    Mutant(
        "documents_see_less_behind",
        "bounds.py",
        "at + after + 1, low)",
        "at + after, low)",
        "a causal query in a document does not see itself",
        DOCUMENTS,
    ),
    Mutant(
        "documents_see_more_before",
        "bounds.py",
        "at - before, start)",
        "at - before - 1, start)",
        "a window in a document has a key more",
        DOCUMENTS,
    ),
    Mutant(
        "rows_transposed_on_the_wrong_side",
        "bounds.py",
        "x.contiguous(), s, right=True)",
        "x.contiguous(), s, right=False)",
        "keys take what the query beside gives",
        "tests/test_masks.py::test_bounds_of_rows",
    ),
    Mutant(
        "masks_join",
        "masks.py",
        "torch.minimum(one[1], other[1])",
        "torch.maximum(one[1], other[1])",
        "of two masks a query sees what either lets it see",
        MASKS,
    ),
    Mutant(
        "padding_on_the_other_side",
        "masks.py",
        "return sizes.seq_kv - lengths, low + sizes.seq_kv",
        "return low, lengths",
        "left padding hides the last keys",
        MASKS,
    ),
    Mutant(
        "prefix_hides_oneself",
        "masks.py",
        "sizes.queries + 1, lengths)",
        "sizes.queries, lengths)",
        "a query behind the prefix does not see itself",
        MASKS,
    ),
    Mutant(
        "chunk_of_two",
        "masks.py",
        "return low, low + self.length",
        "return low, low + 2 * self.length",
        "a chunk sees the next",
        MASKS,
    ),
    Mutant(
        "lengths_that_changed_are_forgotten",
        "resolve.py",
        "tuple((id(x), x._version) for x in tensors)",
        "tuple(id(x) for x in tensors)",
        "a batch has the documents of the batch before",
        "tests/test_masks.py::test_bounds_are_kept",
    ),
    Mutant(
        "bounds_outlive_lengths",
        "resolve.py",
        "of_owner[key] = made, [ref(x) for x in tensors]",
        "of_owner[key] = made, [lambda x=x: x for x in tensors]",
        "lengths and bounds of every batch fill the memory",
        "tests/test_masks.py::test_nothing_is_kept_alive",
    ),
    Mutant(
        "unused_keys_are_seen",
        "integrations/packed.py",
        "of_k = torch.stack((cu_k[:-1], to_k, to_k), dim=1).flatten()",
        "of_k = torch.stack((cu_k[:-1], cu_k[1:], cu_k[1:]), dim=1).flatten()",
        "seqused_k hides nothing",
        USED,
    ),
    Mutant(
        "unused_queries_see_unused_keys",
        "integrations/packed.py",
        "of_q = torch.stack((cu_q[:-1], to_q, cu_q[1:]), dim=1).flatten()",
        "of_q = torch.stack((cu_q[:-1], to_q, to_q), dim=1).flatten()",
        "a query that is not used has a result",
        USED,
    ),
    Mutant(
        "new_keys_are_not_counted",
        "integrations/kvcache.py",
        "return _rows(ends + new,",
        "return _rows(ends,",
        "a step of decoding does not see its own key",
        "tests/test_kvcache.py::test_numbers",
    ),
    Mutant(
        "holes_are_seen",
        "integrations/transformers.py",
        "return bool(intact)",
        "return True",
        "tokens that an attention_mask hides between others are seen",
        "tests/test_transformers.py::test_padding_is_a_range",
    ),
    Mutant(
        "chunks_are_counted_from_the_first_document",
        "integrations/runs.py",
        "positions = at if self.positions is None else self.positions",
        "positions = at",
        "chunks of a packed document begin elsewhere than its own would",
        RECOGNISED,
    ),
    Mutant(
        "dropped_keys_count",
        "integrations/runs.py",
        "shift = at - positions - first",
        "shift = at - positions",
        "a cache that has dropped keys shows others",
        RECOGNISED,
    ),
    Mutant(
        "bias_of_the_operator_forgotten_backward",
        "integrations/operators.py",
        "attn_bias, bias_grad=wanted",
        "None",
        "the backward of memory-efficient attention forgets its mask",
        "tests/test_sdpa_hook.py::test_a_bias_of_the_operator",
    ),
    Mutant(
        "mask_tensor_in_place_of_a_bias",
        "integrations/transformers.py",
        "return mask if bias is None else mask + bias",
        "return mask",
        "a model's mask tensor hides its position_bias",
        "tests/test_transformers.py::test_without_our_mask",
    ),
    Mutant(
        "row_falls_behind",
        "masks.py",
        "falls = (low.diff(dim=1) < 0) | ",
        "falls = ",
        "a mask that is none of rows is taken for one",
        "tests/test_masks.py::test_bad_masks",
    ),
    Mutant(
        "rows_have_no_first_key",
        "kernels/portable/mask.py",
        "    if band[0] is not None or band[2] is not None:\n        seen",
        "    if band[0] is not None:\n        seen",
        "a document sees those before it",
        "tests/test_masks.py::test_every_mask",
    ),
    Mutant(
        "keys_have_no_first_query",
        "kernels/portable/mask.py",
        "    if band[1] is not None or band[2] is not None:\n        _, hi",
        "    if band[1] is not None:\n        _, hi",
        "keys of a document take what other documents give",
        "tests/test_masks.py::test_every_mask",
    ),
    Mutant(
        "rows_of_the_first_batch",
        "kernels/portable/mask.py",
        "return bounds + tl.cast(batch, tl.int64) * stride",
        "return bounds + tl.cast(batch, tl.int64) * 0",
        "all batches have the padding of the first",
        "tests/test_masks.py::test_every_mask",
    ),
    Mutant(
        "values_behind_the_last_document",
        "kernels/portable/forward.py",
        "v_tile = keep_rows(v_tile, kept, CONFIG.TERMS)",
        "pass",
        "NaN behind the last document reaches all that is in its tile",
        NO_DOCUMENT,
    ),
    Mutant(
        "keys_behind_the_last_document",
        "kernels/portable/gradients.py",
        "ds = tl.where(p > 0.0, ds, 0.0)",
        "pass",
        "so do the gradients of queries",
        NO_DOCUMENT,
    ),
    Mutant(
        "queries_behind_the_last_document",
        "kernels/portable/gradients.py",
        "q_tile = keep_rows(q_tile, kept, CONFIG.TERMS)",
        "pass",
        "so do those of keys",
        NO_DOCUMENT,
    ),
    Mutant(
        "unseen_keys_have_gradients",
        "kernels/portable/gradients.py",
        "dk_acc = tl.where(seen[:, None], dk_acc, 0.0)",
        "pass",
        "keys that no query sees have a gradient of NaN",
        NO_DOCUMENT,
    ),
    Mutant(
        "dead_queries_have_gradients",
        "kernels/portable/gradients.py",
        "acc = tl.where(live[:, None], acc, 0.0)",
        "pass",
        "under a softcap so have queries that see no key",
        NO_DOCUMENT,
    ),
    Mutant(
        "a_row_is_in_the_next_document",
        "kernels/portable/document_bounds.py",
        "document = tl.maximum(behind - 1, 0)",
        "document = behind",
        "queries see the next document",
        "tests/test_masks.py::test_the_kernel_of_documents",
    ),
    Mutant(
        "backward_forgets_the_rows",
        "ops.py",
        "        if torch.is_grad_enabled() or not dispatch_is_trivial(grad_o, grad_lse, *saved",
        "        extras = ()\n        if torch.is_grad_enabled() or not dispatch_is_trivial(*saved",
        "gradients are those without a mask",
        "tests/test_masks.py::test_every_mask",
    ),
    Mutant(
        "batches_of_one_kind",
        "bounds.py",
        "tiles_between(least[start],",
        "tiles_between(most[start],",
        "a tile that one batch sees whole is not masked in the others",
        "tests/test_masks.py::test_tiles_of_intervals",
    ),
    Mutant(
        "autocast_rounds_fp64",
        "arguments.py",
        "if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64",
        "if isinstance(x, torch.Tensor) and x.is_floating_point()",
        "under autocast fp64 becomes half precision",
        "tests/test_attention.py::test_autocast_leaves_fp64",
    ),
    # The online softmax
    Mutant(
        "forward_acc_not_rescaled",
        "kernels/portable/forward.py",
        "acc * alpha[:, None], CONFIG",
        "acc, CONFIG",
        "o is wrong where a later tile of keys raises the maximum",
    ),
    Mutant(
        "forward_sum_not_rescaled",
        "kernels/portable/forward.py",
        "add_compensated(l * alpha, l_error * alpha, tl.sum(p, 1))",
        "add_compensated(l, l_error, tl.sum(p, 1))",
        "rows do not add up to one where a later tile of keys raises the maximum",
    ),
    Mutant(
        "forward_maximum_from_zero",
        "kernels/portable/score.py",
        'm = tl.full([BLOCK_Q], float("-inf"), tl.float32)',
        "m = tl.zeros([BLOCK_Q], tl.float32)",
        "rows whose scores are all far below zero underflow; others are right",
        FAR,
    ),
    Mutant(
        "forward_unseen_rows_exponent",
        "kernels/portable/forward.py",
        "finite = finite_max(m_new)",
        "finite = m_new",
        "NaN in rows that have seen no key yet",
    ),
    Mutant(
        "forward_fully_masked_rows_division",
        "kernels/portable/softmax.py",
        "fully_masked = l == 0.0\n    l = tl.where(fully_masked, 1.0, l)\n",
        "fully_masked = l == 0.0\n",
        "0 / 0 in rows that see no key",
    ),
    Mutant(
        "forward_negative_scale",
        "kernels/portable/score.py",
        "return cls(size, factor, log2 / size, None)",
        "return cls(size, factor, None, None)",
        "a scale below zero takes the least score for the largest; a scale of zero gives NaN",
        SCALES,
    ),
    # The softcap
    Mutant(
        "softcap_forgotten_forward",
        "kernels/portable/forward.py",
        "s = capped(s, scale.cap)",
        "s = s * scale.cap",
        "o and lse of scores that are not capped",
        SOFTCAP,
    ),
    Mutant(
        "softcap_without_its_slope_dkdv",
        "kernels/portable/gradients.py",
        "ds = ds * (1 - s * s)\n        dk",
        "ds = ds\n        dk",
        "dk too large where scores are capped",
    ),
    Mutant(
        "softcap_without_its_slope_dq",
        "kernels/portable/gradients.py",
        "ds = ds * (1 - s * s)\n        dq",
        "ds = ds\n        dq",
        "dq too large where scores are capped",
    ),
    Mutant(
        "softcap_slope_of_the_root",
        "kernels/portable/gradients.py",
        "ds = ds * (1 - s * s)\n        dk",
        "ds = ds * (1 - tl.abs(s))\n        dk",
        "dk by another derivative of tanh",
    ),
    Mutant(
        "softcap_odd_no_more",
        "kernels/portable/score.py",
        "tl.where(x < 0, -far, far)",
        "far",
        "low scores become high ones",
    ),
    Mutant(
        "softcap_coarse_near_zero",
        "kernels/portable/score.py",
        "size < 0.625",
        "size < 0.0",
        "fp32 loses bits of small scores under a softcap",
        "tests/test_laws.py::test_a_softcap_far_above_the_scores",
    ),
    Mutant(
        "softcap_in_natural_units",
        "kernels/portable/score.py",
        "softcap * LOG2E.value, factor",
        "softcap, factor",
        "a capped score is taken for one in base 2",
        SOFTCAP,
    ),
    Mutant(
        "plan_forgets_the_softcap",
        "api.py",
        "causal, softcap, type(softcap), scale,",
        "causal, scale,",
        "a second softcap of the same shapes is answered as the first",
        "tests/test_attention.py::test_softcap_under_transforms",
    ),
    Mutant(
        "backward_forgets_the_softcap",
        "ops.py",
        "plan = _execute().prepare_backward(grads, saved, options)",
        "plan = _execute().prepare_backward(grads, saved, options._replace(softcap=None))",
        "gradients of scores that are not capped",
    ),
    Mutant(
        "tiled_softcap_without_its_slope",
        "tiled.py",
        "ds = ds * score.slope(x, softcap)",
        "pass",
        "tiled's gradients too large where scores are capped",
    ),
    # ALiBi
    Mutant(
        "alibi_rewards_distance",
        "kernels/portable/score.py",
        "x -= slope * tl.abs(",
        "x += slope * tl.abs(",
        "far keys count more than near ones",
        ALIBI,
    ),
    Mutant(
        "alibi_from_the_first_key",
        "kernels/portable/score.py",
        "start_q + lies.diagonal - start_kv",
        "start_q - start_kv",
        "positions are top-left, not flash-attn's",
        ALIBI,
    ),
    Mutant(
        "alibi_one_sided",
        "kernels/portable/score.py",
        "x -= slope * tl.abs(at.to(tl.float32) - keys.to(tl.float32))",
        "x -= slope * (at.to(tl.float32) - keys.to(tl.float32))",
        "keys behind a query's position are preferred",
        ALIBI,
    ),
    Mutant(
        "alibi_in_natural_units",
        "kernels/portable/score.py",
        "batch * lies.slopes + head) * LOG2E",
        "batch * lies.slopes + head)",
        "slopes are taken for such in base 2",
        ALIBI,
    ),
    Mutant(
        "alibi_of_the_first_batch",
        "kernels/portable/score.py",
        "batch * lies.slopes + head",
        "head",
        "all batches have the slopes of the first",
        ALIBI,
    ),
    Mutant(
        "alibi_of_seen_keys",
        "prepare.py",
        "diagonal -= 0 if alibi_slopes is None else seen.start",
        "diagonal = k.shape[2] - q.shape[2] if alibi_slopes is not None else 0",
        "positions move by the keys that no query sees",
        ALIBI,
    ),
    # Biases
    Mutant(
        "bias_in_natural_units",
        "kernels/portable/score.py",
        "x += LOG2E * load_bias(",
        "x += load_bias(",
        "a bias is taken for one in base 2",
        BIAS,
    ),
    Mutant(
        "bias_of_the_first_head",
        "kernels/portable/score.py",
        "bias += tl.cast(head, tl.int64) * multiple(lies.head, VECTOR)",
        "bias += 0",
        "all heads have the bias of the first",
        BIAS,
    ),
    Mutant(
        "bias_of_the_first_batch",
        "kernels/portable/score.py",
        "bias += tl.cast(batch, tl.int64) * multiple(lies.batch, VECTOR)",
        "bias += 0",
        "all batches have the bias of the first",
        BIAS,
    ),
    Mutant(
        "relative_bias_mirrored",
        "kernels/portable/score.py",
        '"origin"] = (seq_q - 1) * key if relative',
        '"origin"] = seq_q * key if relative',
        "a relative bias is that of the next key",
        RELATIVE,
    ),
    Mutant(
        "relative_dbias_of_half_the_diagonals",
        "kernels/portable/score_gradients.py",
        "there = (at < BLOCK) == (shift == 0)",
        "there = (at < BLOCK) & (shift == 0)",
        "the gradient of a relative bias lacks what lies in the next tile of keys",
        RELATIVE,
    ),
    Mutant(
        "dbias_of_the_capped_product",
        "kernels/portable/gradients.py",
        "            store_dbias(ds, score[3]",
        "            store_dbias(ds * (1 - s * s), score[3]",
        "the gradient of a bias has the slope of the softcap, which comes before it",
        BIAS,
    ),
    Mutant(
        "dbias_times_the_scale",
        "kernels/portable/score_gradients.py",
        "        acc += ds\n",
        "        acc += ds * score[0].factor\n",
        "the gradient of a bias is that of the products",
        BIAS,
    ),
    Mutant(
        "dbias_of_the_first_batch",
        "kernels/portable/score_gradients.py",
        "first_batch, end_batch = 0, batches",
        "first_batch, end_batch = 0, 1",
        "the gradient of a bias lacks that of other batches",
        BIAS,
    ),
    Mutant(
        "dbias_of_the_first_head",
        "kernels/portable/score_gradients.py",
        "first_head, end_head, batch = 0, heads, row",
        "first_head, end_head, batch = 0, 1, row",
        "the gradient of a bias lacks that of other heads",
        BIAS,
    ),
    Mutant(
        "dbias_of_tiles_that_nobody_visits",
        "kernels/execute.py",
        "hidden = plan.dbias is None and options.causal",
        "hidden = False",
        "the gradient of a bias is whatever was in memory where a mask hides whole tiles",
        "tests/test_scores.py::test_hidden_scores_give_a_bias_nothing",
    ),
    Mutant(
        "tiled_dbias_times_the_scale",
        "tiled.py",
        "                terms.add_gradient(total, ds, rows, keys)",
        "                terms.add_gradient(total, ds * scale, rows, keys)",
        "tiled's gradient of a bias is that of the products",
        BIAS,
    ),
    # The sink
    Mutant(
        "sink_in_natural_units",
        "kernels/portable/score.py",
        "tl.load(sink + batch * lies.sink + head) * LOG2E",
        "tl.load(sink + batch * lies.sink + head)",
        "a sink is taken for one in base 2",
        SINK,
    ),
    Mutant(
        "sink_in_each_part",
        "kernels/portable/forward.py",
        "batch, head, begin == 0, BLOCK_Q)",
        "batch, head, begin >= 0, BLOCK_Q)",
        "each part of the keys has a sink",
        "tests/test_scores.py::test_a_sink_of_split_keys",
    ),
    Mutant(
        "sink_gradient_ascends",
        "kernels/portable/preprocess.py",
        "// BLOCK) + block, -given)",
        "// BLOCK) + block, given)",
        "the gradient of a sink has the other sign",
        SINK,
    ),
    Mutant(
        "sink_gradient_of_one_batch",
        "kernels/portable/score_gradients.py",
        "batches * heads if SHARED else program + 1",
        "program + 1",
        "the gradient of a sink lacks that of other batches",
        SINK,
    ),
    Mutant(
        "hopper_sink_without_a_gradient",
        "kernels/hopper/steps.py",
        "sums = [portable.sum_sinks(o, options)] if options.sink else []",
        "sums: list[Step] = []",
        "the gradient of a sink is whatever was in memory",
        SINK_OF_HOPPER,
    ),
    Mutant(
        "hopper_sink_of_the_first_batch",
        "kernels/hopper/steps.py",
        "ScoreLayout.of(options, heads, 0).sink",
        "0 if options.sink else None",
        "all batches have the sinks of the first",
        SINK_OF_HOPPER,
    ),
    Mutant(
        "sink_of_minus_infinity_has_a_gradient",
        "score.py",
        "    logits = logits.masked_fill(logits == -torch.inf, -torch.inf)",
        "    logits = logits + 0",
        "where a query sees no key, a sink that is none has lse's gradient",
        SINK_BEHIND,
    ),
    Mutant(
        "tiled_sink_without_delta",
        "tiled.py",
        "others.append(-(share * delta)[..., None]",
        "others.append(-share[..., None]",
        "tiled's gradient of a sink does not depend on that of o",
        SINK,
    ),
    Mutant(
        "sink_takes_the_other_share",
        "score.py",
        "above = seen - logits",
        "above = logits - seen",
        "the sink has what the keys should have",
        SINK_BEHIND,
    ),
    Mutant(
        "sink_not_in_lse",
        "score.py",
        "torch.where(dead, logits, larger + small.log1p())",
        "torch.where(dead, logits, seen)",
        "a merge of parts by lse forgets the sink",
        SINK_BEHIND,
    ),
    Mutant(
        "sink_of_rows_that_see_no_key",
        "score.py",
        "torch.where(dead, logits, larger + small.log1p())",
        "larger + small.log1p()",
        "a query that sees no key has seen one with a score of 0",
        "tests/test_scores.py::test_a_sink_behind_rows_that_see_no_key",
    ),
    # Values of another width
    Mutant(
        "scale_of_the_padded_width",
        "api.py",
        "scale, columns = check_scale(scale, q.shape[-1]), v.shape[-1]",
        "columns = v.shape[-1]",
        "scores are scaled for the width that the padding gives q and k",
        "tests/test_attention.py::test_values_of_another_width",
    ),
    # Columns that a power of two has and a head does not
    Mutant(
        "padding_forgets_columns",
        "plan/tile.py",
        "math.gcd(VECTOR, head_dim, *",
        "math.gcd(VECTOR, *",
        "a head's last columns count for nothing, if rows lie farther apart than they are long",
        COLUMNS,
    ),
    Mutant(
        "padding_forgets_strides",
        "plan/tile.py",
        "head_dim, *itertools.chain(*strides))",
        "head_dim)",
        "rows at odd distances are taken from elsewhere",
        COLUMNS,
    ),
    # Split keys
    Mutant(
        "split_counts_keys_twice",
        "kernels/portable/mask.py",
        "full_end = tl.maximum(tl.minimum(full_end, begin + split_len), begin)",
        "full_end = tl.minimum(full_end, begin + split_len)",
        "a split that lies behind the mask's full tiles counts the keys before it, too",
        SPLIT,
    ),
    Mutant(
        "split_combined_in_base_e",
        "kernels/portable/combine.py",
        "weight = tl.exp2(m_split - finite)",
        "weight = tl.exp(m_split - finite)",
        "splits are weighted by powers of e of a logarithm in base 2",
        SPLIT,
    ),
    Mutant(
        "split_sums_unweighted",
        "kernels/portable/combine.py",
        "l += weight * tl.load(",
        "l += tl.load(",
        "sums of exponentials of splits are added as they are, whatever their largest scores",
        SPLIT,
    ),
    Mutant(
        "split_gradients_forget_a_split",
        "kernels/portable/combine.py",
        "    for split in range(num_splits):\n        origin",
        "    for split in range(1, num_splits):\n        origin",
        "gradients lack what the first split of the queries, or keys, gives",
        SPLIT,
    ),
    Mutant(
        "one_sum_for_all_gradients",
        "kernels/portable/steps.py",
        "(strides, num, num_kv, batch,",
        "(strides, num, num, batch,",
        "as many splits of dq are added up as dk and dv have",
        SPLIT,
    ),
    Mutant(
        "both_passes_split_alike",
        "kernels/portable/steps.py",
        "x.length if x.num > 1 else None for x in one.splits",
        "x.length if one.splits[0].num > 1 else None for x in one.splits",
        "queries loop over all keys where these alone are split, or over splits that are not",
        SPLIT,
    ),
    Mutant(
        "both_passes_overlap",
        "kernels/portable/backward.py",
        "program - dkdv_programs, tl.num_programs(0)",
        "program, tl.num_programs(0)",
        "the programs that own queries begin behind the last of them: rows of dq are not written",
    ),
    Mutant(
        "decomposed_keys_for_values",
        "kernels/portable/bf16x3.py",
        "program - of_keys, v, terms[2], strides[2]",
        "program - of_keys, k, terms[2], strides[1]",
        "fp32 that comes decomposed has the keys for values",
    ),
    Mutant(
        "decomposition_loses_the_last_bits",
        "kernels/portable/mma.py",
        "lo = rest - mid",
        "lo = rest - rest",
        "fp32 that is decomposed has 16 bits",
        PRECISION,
    ),
    Mutant(
        "split_forgets_the_group",
        "plan/portable.py",
        "strides=(along, head * group, head, column)",
        "strides=(along, head, head * kv_heads, column)",
        "one query of grouped heads: heads are dealt to the keys' heads in turns",
        SPLIT,
    ),
    Mutant(
        "plan_forgets_strides",
        "plan/spec.py",
        "(x.shape, x.stride(), x.dtype",
        "(x.shape, x.contiguous().stride(), x.dtype",
        "inputs are read as if they were contiguous",
        LAYOUTS,
    ),
    # Scales and bases
    Mutant(
        "forward_natural_scale",
        "kernels/portable/score.py",
        "log2 = scale * LOG2E.value",
        "log2 = scale",
        "powers of two where powers of e are meant: a softer softmax",
    ),
    Mutant(
        "forward_lse_in_base_2",
        "kernels/portable/softmax.py",
        "(m + tl.log2(l)) * LN2)",
        "m + tl.log2(l))",
        "o is right, the logsumexp is 1.44 times too large",
    ),
    Mutant(
        "dq_scale_in_base_2",
        "kernels/portable/gradients.py",
        "seq_q, acc * scale.factor,",
        "seq_q, acc * scale.log2,",
        "dq is 1.44 times too large",
    ),
    Mutant(
        "dk_not_scaled",
        "kernels/portable/gradients.py",
        "dk_acc * scale.factor,",
        "dk_acc,",
        "dk lacks the factor on the scores",
    ),
    Mutant(
        "default_scale",
        "problem.py",
        "return head_dim**-0.5",
        "return 1 / head_dim",
        "every implementation, the reference too, divides by D instead of its root",
        LSE,
    ),
    # Masks and tiles
    Mutant(
        "keys_tail_dropped",
        "kernels/portable/mask.py",
        "full_end, end = seq_kv // BLOCK_KV * BLOCK_KV, seq_kv",
        "full_end, end = seq_kv // BLOCK_KV * BLOCK_KV, seq_kv // BLOCK_KV * BLOCK_KV",
        "keys after the last whole tile are not seen",
    ),
    Mutant(
        "queries_tail_dropped",
        "plan/portable.py",
        "return cdiv(seq_q, tile.block_q) * batch * heads",
        "return seq_q // tile.block_q * batch * heads",
        "the last tiles of o keep what the memory held",
    ),
    Mutant(
        "padding_keys_counted",
        "kernels/portable/mask.py",
        "keys_of(start_q + tl.arange(0, BLOCK_Q), band, seq_q, seq_kv)\n    last",
        "keys_of(start_q + tl.arange(0, BLOCK_Q), band, seq_q, seq_kv + 1)\n    last",
        "one key that does not exist, of score 0, is in the sum of ragged rows",
    ),
    Mutant(
        "mask_sees_one_ahead",
        "kernels/portable/mask.py",
        "tl.minimum(seq_kv - 1, t + right) + 1",
        "tl.minimum(seq_kv - 1, t + right + 1) + 1",
        "each query sees the key after its last",
    ),
    Mutant(
        "mask_hides_the_diagonal",
        "kernels/portable/mask.py",
        "tl.where(keys <= hi - 1, x, value)",
        "tl.where(keys < hi - 1, x, value)",
        "dk and dv lack what the last key of each query gives",
    ),
    Mutant(
        "causal_tile_taken_for_whole",
        "kernels/portable/mask.py",
        "tl.minimum(full_end, tl.maximum(hi, 0) // BLOCK_KV * BLOCK_KV)",
        "tl.minimum(full_end, tl.cdiv(tl.maximum(hi, 0), BLOCK_KV) * BLOCK_KV)",
        "the tile at the edge of the mask is not masked: the future leaks",
    ),
    Mutant(
        "causal_tile_skipped",
        "kernels/portable/mask.py",
        "keys_of(tl.minimum(start_q + BLOCK_Q, seq_q) - 1, band, seq_q, None)",
        "keys_of(start_q - 1, band, seq_q, None)",
        "the last tile of keys that queries see is left out",
    ),
    Mutant(
        "dkdv_tile_skipped",
        "kernels/portable/mask.py",
        "first = first // BLOCK_Q * BLOCK_Q",
        "first = tl.cdiv(first + 1, BLOCK_Q) * BLOCK_Q",
        "dk and dv lack the first tile of queries that see them",
    ),
    Mutant(
        "alignment_swapped",
        "prepare.py",
        "band, extras = mask.over(q.shape[2], k.shape[2])",
        "band, extras = mask.over(k.shape[2], q.shape[2])",
        "bottom-right masks are shifted the wrong way where T != S",
    ),
    Mutant(
        "window_begins_early",
        "kernels/portable/mask.py",
        "lo = t - left",
        "lo = t - left - 1",
        "each query sees the key before its window",
    ),
    Mutant(
        "window_begins_late_transposed",
        "kernels/portable/mask.py",
        "tl.where(keys >= lo, x, value)",
        "tl.where(keys > lo, x, value)",
        "dk and dv lack what the first key of each window gives",
    ),
    Mutant(
        "kernel_window_tile_skipped",
        "kernels/portable/mask.py",
        "tl.maximum(lo, 0) // BLOCK_KV * BLOCK_KV)",
        "tl.cdiv(tl.maximum(lo, 0), BLOCK_KV) * BLOCK_KV)",
        "the tile of keys in which a window begins is left out",
    ),
    Mutant(
        "kernel_window_tile_taken_for_whole",
        "kernels/portable/mask.py",
        "        full_end = first\n",
        "        full_end = tl.maximum(full_end, first)\n",
        "keys before a window are seen, of tiles that end before the last key",
    ),
    Mutant(
        "dkdv_window_ends_early",
        "kernels/portable/mask.py",
        "tl.minimum(s + left + 1, seq_q)",
        "tl.minimum(s + left - 127, seq_q)",
        "dk and dv lack the last tile of queries whose window reaches them",
    ),
    Mutant(
        "corners_swapped",
        "mask.py",
        'shift = seq_kv - seq_q if self.corner == "bottom_right" else 0',
        'shift = seq_kv - seq_q if self.corner == "top_left" else 0',
        "top-left is bottom-right and the reverse, of the reference too",
        CORNERS,
    ),
    Mutant(
        "window_without_its_first_key",
        "mask.py",
        "seen & (s >= t - self.left)",
        "seen & (s > t - self.left)",
        "the key that is left before a query is not seen, by the reference neither",
        WINDOWS,
    ),
    Mutant(
        "causal_window_sees_ahead",
        "mask.py",
        "cls(left, 0, corner)",
        "cls(left, right, corner)",
        "a causal mask with a window sees right keys ahead",
        WINDOWS,
    ),
    Mutant(
        "bounds_of_keys_off_by_one",
        "mask.py",
        "low = 0 if self.left is None else _clamp(t - self.left, self.seq_kv)",
        "low = 0 if self.left is None else _clamp(t - self.left + 1, self.seq_kv)",
        "a tile of which only the first query of a tile sees the last key is left out",
        BOUNDS,
    ),
    Mutant(
        "bounds_of_queries_off_by_one",
        "mask.py",
        "_clamp(s + self.left + 1, self.seq_q)",
        "_clamp(s + self.left, self.seq_q)",
        "dk and dv lack what the last query that sees a key gives",
        BOUNDS,
    ),
    Mutant(
        "window_tile_taken_for_whole",
        "mask.py",
        "full = min(max(-(-last_low // block), start), end)",
        "full = min(max(-(-low // block), start), end)",
        "the tiles at the left end of a window are not masked",
        TILES,
    ),
    Mutant(
        "last_tile_taken_for_whole",
        "mask.py",
        "whole = end if high == size else high // block",
        "whole = end if high == size else -(-high // block)",
        "the tile at the right end of a window is not masked: the future leaks",
        TILES,
    ),
    Mutant(
        "window_tile_skipped",
        "mask.py",
        "start = low // block",
        "start = -(-low // block)",
        "the first tile of keys that a window touches is left out",
        TILES,
    ),
    Mutant(
        "pairs_without_the_left_bound",
        "mask.py",
        "(0 if self.left is None else self._ramp(-self.left))",
        "0",
        "the flops of a window are those of a causal mask",
        "tests/test_mask.py::test_counts",
    ),
    Mutant(
        "plan_forgets_the_window",
        "api.py",
        "*named, *window, *map(type, window)",
        "*named, *map(type, window)",
        "a second window of the same shapes is answered as the first",
        WINDOWS,
    ),
    # Heads and strides
    Mutant(
        "forward_heads_interleaved",
        "kernels/portable/forward.py",
        "batch, head // group, start_q,\n        begin, stop",
        "batch, head % (heads // group), start_q,\n        begin, stop",
        "query heads read the keys of other groups",
        LAYOUTS,
    ),
    Mutant(
        "dkdv_heads_interleaved",
        "kernels/portable/gradients.py",
        "for head in tl.range(kv_head * group, kv_head * group + group):",
        "for head in tl.range(kv_head, heads, heads // group):",
        "dk and dv are summed over the query heads of other groups",
    ),
    Mutant(
        "dkdv_one_head_of_a_group",
        "kernels/portable/gradients.py",
        "for head in tl.range(kv_head * group, kv_head * group + group):",
        "for head in tl.range(kv_head * group, kv_head * group + 1):",
        "dk and dv are those of the first query head of each group",
    ),
    Mutant(
        "values_at_keys_strides",
        "kernels/portable/forward.py",
        "load_tile(v, layout.v,",
        "load_tile(v, layout.k,",
        "v is read by the strides of k: wrong where they lie differently in memory",
        LAYOUTS,
    ),
    Mutant(
        "grad_o_taken_for_dense",
        "plan/choose.py",
        "if not (x.contiguous if name in ROW_STATISTICS else x.dense)",
        'if name != "grad_o" and not (x.contiguous if name in ROW_STATISTICS else x.dense)',
        "an expanded gradient, as that of a sum, is read beyond its one element",
        OFFSETS,
    ),
    Mutant(
        "offsets_of_32_bits",
        "kernels/portable/memory.py",
        "    rows = start + tl.arange(0, BLOCK)\n    return x + origin",
        "    origin = origin.to(tl.int32)\n"
        "    rows = start + tl.arange(0, BLOCK)\n    return x + origin",
        "heads beyond 2^31 elements are read elsewhere",
        OFFSETS,
    ),
    Mutant(
        "expanded_by_descriptors",
        "plan/spec.py",
        "(stride > 0 and stride * size % ALIGNMENT == 0)",
        "(stride * size % ALIGNMENT == 0)",
        "the bulk copy engine is asked for stride 0, which it does not have",
        LOADING,
    ),
    Mutant(
        "head_dim_rounded_down",
        "plan/tile.py",
        "max(SMALLEST_BLOCK_D, 1 << (head_dim - 1).bit_length())",
        "max(SMALLEST_BLOCK_D, 1 << (head_dim.bit_length() - 1))",
        "head dimensions that are no power of two lose their last columns",
    ),
    Mutant(
        "tf32_unasked",
        "plan/precision.py",
        'fp32_precision == "tf32" else "bf16x6"',
        'fp32_precision == "tf32" else "tf32"',
        "fp32 is multiplied with 10 bits of mantissa though torch does not allow it",
        TF32,
    ),
    Mutant(
        "last_band_as_wide_as_others",
        "kernels/portable/scheduler.py",
        "width = tl.minimum(BAND, programs // blocks - first)",
        "width = BAND",
        "of 35 heads some tiles are not computed, and memory that is none of o's is written",
        "tests/test_kernels.py::test_heads_beyond_a_band",
    ),
    Mutant(
        "second_term_of_two_lost",
        "kernels/portable/mma.py",
        "terms = hi.to(tl.bfloat16), rest.to(tl.bfloat16)",
        "terms = hi.to(tl.bfloat16), (rest * 0.0).to(tl.bfloat16)",
        "where TF32 will do fp32 is multiplied with 8 bits of one of the factors",
        HALVES,
    ),
    Mutant(
        "product_of_two_terms_less",
        "kernels/portable/mma.py",
        's = mma(a[0], b[1], None, "ieee")',
        's = mma(a[1], b[1], None, "ieee")',
        "where TF32 will do fp32 is multiplied with 8 bits of one of the factors",
        HALVES,
    ),
    # The backward pass
    Mutant(
        "delta_forgotten",
        "kernels/portable/preprocess.py",
        "delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)",
        "delta_rows = tl.zeros([BLOCK], tl.float32)",
        "dq and dk miss the term by which rows of dS sum to zero",
    ),
    Mutant(
        "delta_outside_of_p",
        "kernels/portable/gradients.py",
        "ds = p * (dp - delta_rows[None, :])",
        "ds = p * dp - delta_rows[None, :]",
        "dk takes delta whole from every key",
    ),
    Mutant(
        "grad_lse_added",
        "kernels/portable/preprocess.py",
        "delta_rows -= tl.load(grad_lse + offsets",
        "delta_rows += tl.load(grad_lse + offsets",
        "the logsumexp's gradient has the wrong sign",
    ),
    Mutant(
        "o_lies_like_its_gradient",
        "kernels/portable/steps.py",
        "o.strides[:3] if whole else None",
        "grad_o.strides[:3] if whole else None",
        "dq and dk of a tiny problem are wrong where o and its gradient lie differently in memory",
        LAYOUTS,
    ),
    Mutant(
        "lse_is_not_padded",
        "kernels/portable/preprocess.py",
        "offsets = row.to(tl.int64) * seq_q + rows\n    return",
        "offsets = row.to(tl.int64) * tl.cdiv(seq_q, 256) * 256 + rows\n    return",
        "gradients of all heads but the first are those of other rows",
    ),
    Mutant(
        "backward_fully_masked_rows",
        "kernels/portable/preprocess.py",
        'tl.where(fully_masked, float("inf"), lse_rows * LOG2E)',
        "lse_rows * LOG2E",
        "P is inf in rows that see no key or only pad: NaN in dk and dv",
    ),
    Mutant(
        "upstream_nan_below_88",
        "kernels/portable/gradients.py",
        "if MASKED:  # keys that do not exist, too",
        "if MASKED and band[1] is not None:  # keys that do not exist, too",
        "NaN in dq where the logsumexp is below -88.7 and the last tile of keys is ragged: exp(0 -"
        " lse) of a key that does not exist is inf (PyTorch 196678)",
        FAR,
    ),
    Mutant(
        "upstream_dq_of_large_logits",
        "kernels/portable/gradients.py",
        "p = tl.exp2(x - lse_log2_rows[:, None])",
        "p = tl.exp2(tl.minimum(x, 100.0) - lse_log2_rows[:, None])",
        "dq is right on normal inputs and several times too small where logits are large: forward"
        " did not clip them (as in TransformerEngine 3216)",
        VALUES,
    ),
    # The tiled implementation
    Mutant(
        "tiled_acc_not_rescaled",
        "tiled.py",
        "acc = acc * alpha + p @",
        "acc = acc + p @",
        "o is wrong where a later tile of keys raises the maximum",
    ),
    Mutant(
        "tiled_maximum_from_zero",
        "tiled.py",
        "m = torch.full_like(acc[..., :1], -torch.inf)",
        "m = torch.zeros_like(acc[..., :1])",
        "rows whose scores are all far below zero underflow; others are right",
        FAR,
    ),
    Mutant(
        "tiled_last_tile_skipped",
        "tiled.py",
        "for i in range(run.first, run.end):",
        "for i in range(run.first, max(run.full_end, run.end - 1)):",
        "the last tile that needs the mask is left out",
    ),
    Mutant(
        "tiled_future_leaks",
        "tiled.py",
        "not run.full <= i < run.full_end",
        "not run.full <= i <= run.full_end",
        "the first tile behind the whole ones is not masked: the future leaks",
    ),
    Mutant(
        "tiled_heads_interleaved",
        "tiled.py",
        "given = q.unflatten(1, heads), ",
        "given = q.unflatten(1, heads[::-1]).transpose(1, 2), ",
        "query heads read the keys of other groups",
    ),
    Mutant(
        "tiled_grad_lse_ignored",
        "tiled.py",
        "delta = delta - grad_lse",
        "delta = delta.clone()",
        "the logsumexp passes no gradient",
    ),
    Mutant(
        "tiled_fully_masked_rows",
        "tiled.py",
        "row_lse.masked_fill(row_lse == -torch.inf, torch.inf)",
        "row_lse",
        "NaN gradients where a query sees no key",
    ),
    # Several ranks
    Mutant(
        "parallel_corner_forgotten",
        "parallel/plan.py",
        'if mask.corner == "bottom_right":',
        'if mask.corner == "":',
        "a rank's rows are masked from the wrong corner",
        PLANNED,
    ),
    Mutant(
        "parallel_parts_added",
        "parallel/keys.py",
        "o.mul_(before).addcmul_(part[0], added)",
        "o.add_(part[0])",
        "parts of a row are added up without their weights",
        SHARED,
    ),
    Mutant(
        "parallel_lse_of_own_keys",
        "parallel/keys.py",
        "    lse.copy_(total)\n",
        "",
        "lse, and with it all gradients, are those of a rank's own keys",
        SHARED,
    ),
    Mutant(
        "parallel_own_dv_forgotten",
        "parallel/keys.py",
        "dk.add_(of_own[1]), dv.add_(of_own[2])",
        "dk.add_(of_own[1]), dv",
        "the gradient of v lacks what a rank's own rows give it",
        SHARED,
    ),
    Mutant(
        "parallel_documents_elsewhere",
        "parallel/rows.py",
        "limit = task.mask if documents is None or aligned else FULL",
        "limit = task.mask",
        "keys of documents that begin elsewhere than their queries are not fetched",
        SHARED,
    ),
    Mutant(
        "parallel_heads_in_sequence_order",
        "parallel/heads.py",
        "    chunks.sort(key=lambda y: y.rank)  # stable: a rank's stay in order\n",
        "",
        "rows go back to other ranks than they came from",
        SHARED,
    ),
]
