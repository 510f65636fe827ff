"""The distributed axis: one step over several processes, each with its share of the batch's rows."""

from __future__ import annotations

from lmperf.implementations import collectives, compressors, experts, sharding
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


@variant("distributed", requires=("fork",))
def torch_ddp(recipe: Recipe) -> Recipe:
    """PyTorch's DistributedDataParallel with its default buckets of 25 MB."""
    return recipe.replace(parallel=Parallel(RANKS, sharding.TorchDDP()))


@variant("distributed", requires=("fork",))
def torch_ddp_1mb(recipe: Recipe) -> Recipe:
    """PyTorch's DistributedDataParallel with buckets of 1 MB."""
    return recipe.replace(parallel=Parallel(RANKS, sharding.TorchDDP(bucket_mb=1.0)))


@variant("distributed", requires=("fork",))
def zero1(recipe: Recipe) -> Recipe:
    """Data parallel with AdamW's moments divided among the ranks."""
    parallel = Parallel(RANKS, collectives.keep, collectives.average_flat)
    return recipe.replace(parallel=parallel, optimizer=sharding.ZeroOptimizer())


@variant("distributed", requires=("fork",))
def fsdp2(recipe: Recipe) -> Recipe:
    """Parameters, gradients and moments divided among the ranks, gathered block by block."""
    return recipe.replace(parallel=Parallel(RANKS, sharding.FullyShard()))


@variant("distributed", fidelity="quality", requires=("fork",))
def bf16_hook(recipe: Recipe) -> Recipe:
    """Gradients travel as bfloat16."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, compressors.BFloat16()))


@variant("distributed", fidelity="quality", requires=("fork",))
def powersgd(recipe: Recipe) -> Recipe:
    """Each gradient matrix travels as two factors of rank 2, with error feedback."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, compressors.PowerSGD()))


@variant("distributed", fidelity="quality", requires=("fork",))
def onebit(recipe: Recipe) -> Recipe:
    """Gradients travel as packed signs with one magnitude a tensor, with error feedback."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, compressors.OneBit()))


@variant("distributed", fidelity="quality", requires=("fork",))
def topk(recipe: Recipe) -> Recipe:
    """The largest 1 % of the gradient's entries travel, with error feedback."""
    return recipe.replace(parallel=Parallel(RANKS, collectives.keep, compressors.TopK()))


@variant("distributed", fidelity="quality", requires=("fork",))
def moe_topk(recipe: Recipe) -> Recipe:
    """A small mixture of experts whose experts' gradients are cut to their largest 10 %."""
    return recipe.replace(parallel=Parallel(RANKS, experts.InstallExperts(), compressors.ExpertTopK()))
