"""The matmul axis: merged linear layers, aligned sizes, a blocked loop, and a loss without the full logits."""

from __future__ import annotations

from lmperf.implementations.projections import FusedGateUp, FusedQKV
from lmperf.recipe import Recipe
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
