"""A plugin of variants that fail in every way a session must survive."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor

from lmperf import reference
from lmperf.recipe import Recipe
from lmperf.registry import variant
from lmperf.workloads.base import Prepared, Setting, workload


@workload("counting")
def counting(setting: Setting) -> Prepared:
    """Half a millisecond of sleep: a session that costs nothing but its processes."""
    return Prepared(step=lambda: time.sleep(0.0005), tokens_per_step=1.0)


@variant("attention", fidelity="exact")
def wrong_values(recipe: Recipe) -> Recipe:
    """Attention whose output is 1 % too large."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return 1.01 * reference.attention(q, k, v, scale=scale)

    return recipe.replace(attention=attention)


@variant("attention", fidelity="exact")
def raises(recipe: Recipe) -> Recipe:
    """Attention that raises."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        raise RuntimeError("this kernel was never finished")

    return recipe.replace(attention=attention)


@variant("attention", fidelity="exact")
def cannot_compose(recipe: Recipe) -> Recipe:
    """A variant that raises before there is a recipe."""
    raise OSError("its library is not there")


@variant("attention", fidelity="exact")
def null_read(recipe: Recipe) -> Recipe:
    """Attention that reads address 0."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        ctypes.string_at(0)
        return q

    return recipe.replace(attention=attention)


@variant("attention", fidelity="exact")
def hangs(recipe: Recipe) -> Recipe:
    """Attention that never returns, with a helper process beside it."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        time.sleep(600)
        return q

    return recipe.replace(attention=attention)


@variant("attention", fidelity="exact")
def eats_memory(recipe: Recipe) -> Recipe:
    """Attention with a workspace of 64 GiB."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return reference.attention(q, k, v, scale=scale) + torch.ones(1 << 34)[0]

    return recipe.replace(attention=attention)


@variant("attention", fidelity="exact", requires=("package:no_such_package_anywhere",))
def needs_a_package(recipe: Recipe) -> Recipe:
    """A variant whose package is not installed."""
    return recipe


@variant("graph", fidelity="exact")
def own_environment(recipe: Recipe) -> Recipe:
    """A variant that sets a variable before Python starts."""
    return recipe.extend(environment={"GOMP_SPINCOUNT": "7"})


@variant("attention", fidelity="exact")
def same_thing(recipe: Recipe) -> Recipe:
    """The reference under another name."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return reference.attention(q, k, v, scale=scale)

    return recipe.replace(attention=attention)
