"""The graph axis: how the same step is executed and where its memory lives."""

from __future__ import annotations

from functools import partial

from lmperf.implementations.optimizers import adamw
from lmperf.recipe import Recipe
from lmperf.registry import variant


@variant("graph", baseline=True)
def eager(recipe: Recipe) -> Recipe:
    """Operation by operation, every activation kept, PyTorch's own choice of AdamW."""
    return recipe


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def adamw_fused(recipe: Recipe) -> Recipe:
    """AdamW's whole update as one kernel over all parameters."""
    return recipe.replace(optimizer=partial(adamw, fused=True))
