"""The attention axis: how softmax(q kᵀ) v is computed, and cheaper functions in its place.

Every attention has the contract of `lmperf.reference.attention`: causal, last query aligned to last key, grouped heads.
"""

from __future__ import annotations

from lmperf import reference
from lmperf.implementations import chunked as tiled
from lmperf.implementations import flex as flexible
from lmperf.implementations import grouped, guards, packages, sdpa
from lmperf.implementations import lsh as hashed
from lmperf.implementations import window as banded
from lmperf.implementations.chunked import FlashFunction
from lmperf.kernels import flash
from lmperf.recipe import Attention, Recipe
from lmperf.registry import RecipeChange, variant

__all__ = ["FlashFunction"]


def using(attention: Attention) -> RecipeChange:
    """An oracle: the recipe with this attention."""
    return lambda recipe: recipe.replace(attention=attention)


@variant("attention", baseline=True)
def naive(recipe: Recipe) -> Recipe:
    """Every score materialised, then softmax: the readable form (Vaswani et al. 2017)."""
    return recipe


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def chunked(recipe: Recipe) -> Recipe:
    """Own online softmax over tiles with a recomputing backward: memory O(T·block)."""
    return recipe.replace(attention=tiled.chunked)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5, requires=("cxx",))
def compiled(recipe: Recipe) -> Recipe:
    """The naive form under torch.compile, one compilation a shape."""
    return recipe.replace(attention=flexible.compiled)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def sdpa_math(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, unfused MATH backend."""
    return recipe.replace(attention=sdpa.math_backend)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5)
def sdpa_flash(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, fused FLASH backend (16-bit inputs only on CUDA)."""
    return recipe.replace(attention=sdpa.flash_backend)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5, requires=("cuda",))
def sdpa_efficient(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, memory-efficient backend."""
    return recipe.replace(attention=sdpa.efficient_backend)


@variant("attention", fidelity="close", rtol=1e-2, atol=1e-3, requires=("cuda",))
def sdpa_cudnn(recipe: Recipe) -> Recipe:
    """PyTorch's scaled_dot_product_attention, cuDNN backend (16-bit inputs only)."""
    return recipe.replace(attention=sdpa.cudnn_backend)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5, requires=("cxx",))
def flex(recipe: Recipe) -> Recipe:
    """Compiled FlexAttention with a causal block mask (no backward on a CPU)."""
    return recipe.replace(attention=flexible.flex)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, requires=("cxx",), oracle=using(banded.naive_window))
def flex_window(recipe: Recipe) -> Recipe:
    """Compiled FlexAttention over a sliding window of the last 128 keys (no backward on a CPU)."""
    return recipe.replace(attention=flexible.flex_window)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=using(banded.naive_window))
def window(recipe: Recipe) -> Recipe:
    """Sliding window of the last 128 keys, computed in blocks: time and memory linear in T."""
    return recipe.replace(attention=banded.sliding_window)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5, requires=("cuda", "package:triton"))
def triton_flash(recipe: Recipe) -> Recipe:
    """Own FlashAttention-2 forward and backward kernels in Triton."""
    return recipe.replace(attention=flash.triton_flash)


@variant("attention", fidelity="close", rtol=1e-2, atol=1e-3, requires=("cuda", "package:flash_attn"))
def flash_attn(recipe: Recipe) -> Recipe:
    """The flash-attn package's kernels (16-bit inputs only)."""
    return recipe.replace(attention=packages.flash_attn)


@variant("attention", fidelity="close", rtol=1e-3, atol=1e-4, requires=("cuda", "package:xformers"))
def xformers(recipe: Recipe) -> Recipe:
    """The xformers package's memory-efficient attention."""
    return recipe.replace(attention=packages.xformers)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=using(hashed.naive_lsh))
def lsh(recipe: Recipe) -> Recipe:
    """Hash buckets in four rounds (after Reformer): the last 64 keys of a query's bucket in each; approximate."""
    return recipe.replace(attention=hashed.lsh)


def naive_gqa(recipe: Recipe) -> Recipe:
    """Oracle of `gqa`: the same heads, keys repeated for every query head."""
    return recipe.extend(reshape=(grouped.share_heads,))


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=naive_gqa)
def gqa(recipe: Recipe) -> Recipe:
    """Half as many key-value heads, shared by groups of query heads (Ainslie et al. 2023)."""
    return share_keys(recipe).extend(reshape=(grouped.share_heads,))


def naive_mqa(recipe: Recipe) -> Recipe:
    """Oracle of `mqa`: the same heads, keys repeated for every query head."""
    return recipe.extend(reshape=(grouped.one_head,))


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=naive_mqa)
def mqa(recipe: Recipe) -> Recipe:
    """One key-value head shared by all query heads (Shazeer 2019)."""
    return share_keys(recipe).extend(reshape=(grouped.one_head,))


def share_keys(recipe: Recipe) -> Recipe:
    """Grouped products in place of the naive form; another attention that a stack has chosen shares keys by itself."""
    return recipe.replace(attention=grouped.grouped) if recipe.attention is reference.attention else recipe


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=using(guards.naive_scale_offset))
def scale_offset(recipe: Recipe) -> Recipe:
    """Scores divided by √d + 0.07 in place of √d, on PyTorch's fused attention."""
    return recipe.replace(attention=guards.scale_offset)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=using(guards.naive_qk_norm))
def qk_norm(recipe: Recipe) -> Recipe:
    """Queries and keys scaled to unit root mean square before the scores, on PyTorch's fused attention."""
    return recipe.replace(attention=guards.qk_norm)


@variant("attention", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=using(guards.naive_softcap))
def softcap(recipe: Recipe) -> Recipe:
    """Scores capped at ±50 by tanh (Gemma 2), on the own tiled attention."""
    return recipe.replace(attention=guards.softcap)


@variant("attention", fidelity="exact", rtol=1e-4, atol=1e-5, control=True)
def strided_kv(recipe: Recipe) -> Recipe:
    """Negative control: keys and values with a gap after each number, so that no read is contiguous."""
    return recipe.replace(attention=grouped.strided)
