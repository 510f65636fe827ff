"""The attention axis: how softmax(q kᵀ) v is computed, and cheaper functions in its place."""

from __future__ import annotations

from lmperf.implementations import chunked as tiled
from lmperf.implementations import sdpa
from lmperf.implementations import window as banded
from lmperf.implementations.chunked import FlashFunction
from lmperf.recipe import Recipe
from lmperf.registry import variant

__all__ = ["FlashFunction"]


@variant("attention", baseline=True)
def naive(recipe: Recipe) -> Recipe:
    """Every score materialised, then softmax: the readable form (Vaswani et al. 2017)."""
    return recipe


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def chunked(recipe: Recipe) -> Recipe:
    """Own online softmax over tiles with a recomputing backward: memory O(T·block)."""
    return recipe.replace(attention=tiled.chunked)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def sdpa_math(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, unfused MATH backend."""
    return recipe.replace(attention=sdpa.math_backend)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def sdpa_flash(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, fused FLASH backend (16-bit inputs only on CUDA)."""
    return recipe.replace(attention=sdpa.flash_backend)


def naive_window(recipe: Recipe) -> Recipe:
    """Oracle of `window`: dense scores with a band mask."""
    return recipe.replace(attention=banded.naive_window)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=naive_window)
def window(recipe: Recipe) -> Recipe:
    """Sliding window of the last 128 keys, computed in blocks: time and memory linear in T."""
    return recipe.replace(attention=banded.sliding_window)
