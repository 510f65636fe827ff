"""The distributed axis: one step over several processes, each with its share of the batch's rows."""

from __future__ import annotations

from lmperf.implementations import collectives
from lmperf.recipe import Parallel, Recipe
from lmperf.registry import variant

RANKS = 2  # a cell's `world_size` overrides it


@variant("distributed", baseline=True)
def single(recipe: Recipe) -> Recipe:
    """One process computes the joined batch with all threads."""
    return recipe


@variant("distributed", requires=("fork",))
def ddp_per_parameter(recipe: Recipe) -> Recipe:
    """Data parallel: one all-reduce for each parameter after backward."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, collectives.average_per_parameter))


@variant("distributed", requires=("fork",))
def ddp_flat(recipe: Recipe) -> Recipe:
    """Data parallel: all gradients in one all-reduce after backward."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, collectives.average_flat))


@variant("distributed", requires=("fork",))
def ddp_overlap(recipe: Recipe) -> Recipe:
    """Data parallel: buckets of gradients are sent while backward still computes."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.overlap, collectives.finish_overlap))
