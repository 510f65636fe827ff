"""The graph axis: how the same step is executed and where its memory lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lmperf.implementations.allocators import allocator_environment
from lmperf.implementations.execution import Offload, compile_blocks, compile_whole, recompute
from lmperf.implementations.optimizers import adamw
from lmperf.implementations.preallocation import adamw_keeping_gradients, preallocate
from lmperf.recipe import BuildContext, Recipe, Stage, Transform
from lmperf.registry import variant


def _transform(
    recipe: Recipe, stage: Stage, name: str, apply: Callable[[nn.Module, BuildContext], nn.Module]
) -> Recipe:
    return recipe.extend(transforms=(Transform(stage, name, apply),))


@variant("graph", baseline=True)
def eager(recipe: Recipe) -> Recipe:
    """Operation by operation, every activation kept, PyTorch's own choice of AdamW."""
    return recipe


@variant("graph", fidelity="close", rtol=1e-3, atol=1e-5, requires=("cxx",))
def compile(recipe: Recipe) -> Recipe:
    """The whole model through torch.compile."""
    return _transform(recipe, Stage.COMPILE, "compile", compile_whole)


@variant("graph", fidelity="close", rtol=1e-3, atol=1e-5, requires=("cxx",))
def compile_regional(recipe: Recipe) -> Recipe:
    """Each layer through torch.compile by itself: compiled once, used for all layers."""
    return _transform(recipe, Stage.COMPILE, "compile_regional", compile_blocks)


@variant("graph", fidelity="close", rtol=1e-3, atol=1e-5, requires=("cuda", "cxx"))
def compile_reduce_overhead(recipe: Recipe) -> Recipe:
    """torch.compile with CUDA graphs: one launch replays the step's kernels."""
    return _transform(recipe, Stage.COMPILE, "reduce_overhead", partial(compile_whole, mode="reduce-overhead"))


@variant("graph", fidelity="close", rtol=1e-3, atol=1e-5, requires=("cxx",))
def compile_max_autotune(recipe: Recipe) -> Recipe:
    """torch.compile that times several implementations of each matrix product and keeps the fastest."""
    return _transform(recipe, Stage.COMPILE, "max_autotune", partial(compile_whole, mode="max-autotune"))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def recompute_full(recipe: Recipe) -> Recipe:
    """Only each layer's input is kept; the layer runs again in the backward pass (Chen et al. 2016)."""
    return _transform(recipe, Stage.RECOMPUTATION, "recompute_full", partial(recompute, every=1))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def recompute_every_2(recipe: Recipe) -> Recipe:
    """Every second layer is recomputed in the backward pass."""
    return _transform(recipe, Stage.RECOMPUTATION, "recompute_every_2", partial(recompute, every=2))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def adamw_loop(recipe: Recipe) -> Recipe:
    """AdamW one parameter after the other."""
    return recipe.replace(optimizer=partial(adamw))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def adamw_foreach(recipe: Recipe) -> Recipe:
    """AdamW one operation after the other, each over lists of all parameters."""
    return recipe.replace(optimizer=partial(adamw, foreach=True))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def adamw_fused(recipe: Recipe) -> Recipe:
    """AdamW's whole update as one kernel over all parameters."""
    return recipe.replace(optimizer=partial(adamw, fused=True))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def preallocated(recipe: Recipe) -> Recipe:
    """Outputs of linear layers and gradients live in buffers that every step reuses."""
    changed = _transform(recipe, Stage.COMPRESSION, "preallocated", preallocate)
    return changed.replace(optimizer=adamw_keeping_gradients)


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def allocator(recipe: Recipe) -> Recipe:
    """tcmalloc or jemalloc preloaded (without either, glibc's huge pages); expandable segments on CUDA."""
    return recipe.extend(environment=allocator_environment())


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def accumulate_4(recipe: Recipe) -> Recipe:
    """The batch in four micro-batches whose gradients add up before one update."""
    return recipe.replace(accumulate=4)


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5, requires=("cuda",), control=True)
def sync_every_step(recipe: Recipe) -> Recipe:
    """Negative control: the host waits for the device after every step (torch.cuda.synchronize)."""
    return recipe.extend(after_step=(torch.cuda.synchronize,))


@variant("graph", fidelity="exact", rtol=1e-4, atol=1e-5)
def offload_activations(recipe: Recipe) -> Recipe:
    """Saved activations wait in pinned host memory (on a CPU: in a temporary file) until the backward pass."""
    return recipe.extend(step_contexts=(Offload(),))
