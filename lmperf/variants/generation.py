"""The generation axis: how tokens are decoded, greedily.  All but `int8_weights` give the tokens of `no_cache`."""

from __future__ import annotations

from lmperf.implementations import decoding
from lmperf.recipe import Recipe
from lmperf.registry import variant


@variant("generation", baseline=True)
def no_cache(recipe: Recipe) -> Recipe:
    """Everything is computed again for each token."""
    return recipe


@variant("generation")
def dynamic_cache(recipe: Recipe) -> Recipe:
    """Keys and values of earlier tokens are kept in a cache that grows by concatenation."""
    return recipe.replace(generate=decoding.with_dynamic_cache)


@variant("generation")
def static_cache(recipe: Recipe) -> Recipe:
    """Keys and values are written into a cache allocated for the whole answer."""
    return recipe.replace(generate=decoding.with_static_cache)
