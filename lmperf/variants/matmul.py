"""The matmul axis: merged linear layers, aligned sizes, a blocked loop, and a loss without the full logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from lmperf.implementations.blocked import blocked_matmul
from lmperf.implementations.losses import chunked_cross_entropy, padded_reference
from lmperf.implementations.projections import FusedGateUp, FusedQKV, without_biases
from lmperf.recipe import Recipe, Stage, Transform
from lmperf.records import ModelShape
from lmperf.registry import variant


@variant("matmul", baseline=True)
def separate_qkv(recipe: Recipe) -> Recipe:
    """Three linear layers for queries, keys and values, the vendor's matrix product, the loss from full logits."""
    return recipe


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-5)
def fused_qkv(recipe: Recipe) -> Recipe:
    """Queries, keys and values from one matrix product instead of three."""
    return recipe.replace(projection=FusedQKV)


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-5)
def fused_gate_up(recipe: Recipe) -> Recipe:
    """SwiGLU's gate and up projections from one matrix product instead of two (needs activation: swiglu)."""
    return recipe.replace(feed_forward=FusedGateUp)


def _aligned(shape: ModelShape) -> ModelShape:
    return dataclasses.replace(shape, d_ff=-(-shape.d_ff // 64) * 64)


def _unaligned(shape: ModelShape) -> ModelShape:
    # A few columns less than the aligned size: the work stays the same within a percent or two, the size is odd.
    return dataclasses.replace(shape, d_ff=_aligned(shape).d_ff - 3)


def _reshape(recipe: Recipe, change: Callable[[ModelShape], ModelShape]) -> Recipe:
    return recipe.extend(reshape=(change,))


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-5, oracle=partial(_reshape, change=_aligned))
def aligned_64(recipe: Recipe) -> Recipe:
    """Feed-forward width rounded up to a multiple of 64."""
    return _reshape(recipe, _aligned)


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-5, oracle=partial(_reshape, change=_unaligned))
def unaligned(recipe: Recipe) -> Recipe:
    """Feed-forward width 3 below a multiple of 64: an odd size."""
    return _reshape(recipe, _unaligned)


@variant(
    "matmul", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=lambda recipe: recipe.replace(loss=padded_reference)
)
def padded_vocab(recipe: Recipe) -> Recipe:
    """Vocabulary padded to a multiple of 64 with tokens that never occur."""
    return recipe.replace(pad_vocab_to=64)


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-4)
def blocked_loop(recipe: Recipe) -> Recipe:
    """Matrix product as a Python loop over 64 × 64 blocks (operator workload only)."""
    return recipe.replace(matmul=blocked_matmul)


@variant("matmul", fidelity="exact", rtol=1e-4, atol=1e-5)
def chunked_loss(recipe: Recipe) -> Recipe:
    """Cross-entropy over 512 tokens at a time, so that the full logits never exist."""
    return recipe.replace(loss=chunked_cross_entropy)


@variant("matmul", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=lambda recipe: recipe)  # biases start at zero
def bias_free(recipe: Recipe) -> Recipe:
    """No bias in any linear layer of the blocks."""
    return recipe.extend(transforms=(Transform(Stage.COMPRESSION, "bias_free", without_biases),))
