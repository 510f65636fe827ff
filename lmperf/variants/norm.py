"""The norm axis: ε of LayerNorm, RMSNorm, fused against unfused, and what goes wrong without ε.

The variants are forms of LayerNorm (but `rmsnorm`); in a model whose shape says `norm: rmsnorm` they replace that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from lmperf import reference
from lmperf.implementations.norms import (
    DynamicLayerNorm,
    ManualDynamicLayerNorm,
    ManualLayerNorm,
    ManualRMSNorm,
    VarMeanLayerNorm,
)
from lmperf.recipe import Recipe
from lmperf.registry import variant

#: The smallest ε of `dynamic_eps`: positive, and still far below the variance of any row worth normalising.
FLOOR = 1e-6


def _naive(**options: float) -> Callable[[Recipe], Recipe]:
    return lambda recipe: recipe.replace(norm=partial(VarMeanLayerNorm, **options))


@variant("norm", baseline=True)
def layernorm(recipe: Recipe) -> Recipe:
    """PyTorch's fused LayerNorm with ε = 1e-5 (Ba et al. 2016)."""
    return recipe


@variant("norm", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=_naive(eps=1e-4))
def eps_1e4(recipe: Recipe) -> Recipe:
    """LayerNorm with ε = 1e-4."""
    return recipe.replace(norm=partial(nn.LayerNorm, eps=1e-4))


@variant("norm", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=_naive(eps=1e-6))
def eps_1e6(recipe: Recipe) -> Recipe:
    """LayerNorm with ε = 1e-6."""
    return recipe.replace(norm=partial(nn.LayerNorm, eps=1e-6))


@variant(
    "norm", fidelity="quality", rtol=1e-4, atol=1e-5,
    oracle=lambda recipe: recipe.replace(norm=partial(ManualDynamicLayerNorm, floor=FLOOR)),
)  # fmt: skip
def dynamic_eps(recipe: Recipe) -> Recipe:
    """LayerNorm with ε = 1e-5 · (1 + ln(batch / 512)), clamped to at least 1e-6."""
    return recipe.replace(norm=partial(DynamicLayerNorm, floor=FLOOR))


@variant(
    "norm", fidelity="quality", rtol=1e-3, atol=1e-4, control=True,
    oracle=lambda recipe: recipe.replace(norm=partial(ManualDynamicLayerNorm, floor=None)),
)  # fmt: skip
def dynamic_eps_as_written(recipe: Recipe) -> Recipe:
    """Negative control: ε = 1e-5 · (1 + ln(batch / 512)) without a clamp, negative below a batch of 189."""
    return recipe.replace(norm=partial(DynamicLayerNorm, floor=None))


@variant("norm", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=lambda recipe: recipe.replace(norm=ManualRMSNorm))
def rmsnorm(recipe: Recipe) -> Recipe:
    """RMSNorm with ε = 1e-6: no mean is subtracted and there is no bias (Zhang and Sennrich 2019)."""
    return recipe.replace(norm=reference.rms_norm)


@variant("norm", fidelity="exact", rtol=1e-4, atol=1e-5, oracle=_naive(eps=1e-5))
def manual(recipe: Recipe) -> Recipe:
    """The same LayerNorm as separate operations: mean, square, rsqrt, multiply, each one pass over memory."""
    return recipe.replace(norm=ManualLayerNorm)


@variant("norm", fidelity="quality", rtol=1e-4, atol=1e-5, oracle=_naive(correction=1))
def unbiased_var(recipe: Recipe) -> Recipe:
    """Variance with Bessel's correction, divided by n − 1: infinite for rows of one element."""
    return recipe.replace(norm=partial(ManualLayerNorm, correction=1))


@variant("norm", fidelity="quality", rtol=1e-4, atol=1e-5, control=True, oracle=_naive(eps=0.0))
def no_eps(recipe: Recipe) -> Recipe:
    """Negative control: ε left out, so that a constant row divides by zero."""
    return recipe.replace(norm=partial(ManualLayerNorm, eps=0.0))
