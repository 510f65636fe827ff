"""The compression axis: int8 weights, quantisation-aware training and pruning.

Linear layers of the blocks are compressed; embedding and head (often one tensor) stay dense.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lmperf.implementations.quantisation import Int8Linear, replace_linears
from lmperf.recipe import BuildContext, Recipe, Stage, Transform
from lmperf.registry import variant


def _finish(recipe: Recipe, name: str, apply: Callable[[nn.Module, BuildContext], nn.Module]) -> Recipe:
    return recipe.extend(finish=(Transform(Stage.COMPRESSION, name, apply),))


def _to_dynamic(model: nn.Module, context: BuildContext) -> nn.Module:
    replace_linears(model.blocks, Int8Linear)
    return model


@variant("compression", baseline=True)
def dense(recipe: Recipe) -> Recipe:
    """Every weight kept, in the precision that it was trained in."""
    return recipe


@variant("compression", fidelity="quality", rtol=5e-2, atol=2e-2)
def int8_dynamic(recipe: Recipe) -> Recipe:
    """Weights in int8 with one scale a row, activations quantised anew in each call."""
    return _finish(recipe, "int8_dynamic", _to_dynamic)
