"""The compression axis: int8 weights, quantisation-aware training and pruning.

Linear layers of the blocks are compressed; embedding and head (often one tensor) stay dense.  `rtol` is the largest
relative error (root mean square) of a decoded token's logits against a dense model with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from lmperf.implementations import pruning, static_quantisation
from lmperf.implementations.execution import blocks_of
from lmperf.implementations.quantisation import Int8Linear, WeightOnlyLinear, replace_linears
from lmperf.recipe import BuildContext, Recipe, Stage, Transform
from lmperf.registry import variant

Change = Callable[[nn.Module, BuildContext], nn.Module]


def _before(recipe: Recipe, name: str, apply: Change) -> Recipe:
    return recipe.extend(transforms=(Transform(Stage.COMPRESSION, name, apply),))


def _after(recipe: Recipe, name: str, apply: Change) -> Recipe:
    return recipe.extend(finish=(Transform(Stage.COMPRESSION, name, apply),))


def _replace(model: nn.Module, context: BuildContext, *, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    replace_linears(blocks_of(model), make)
    return model


def _threshold(recipe: Recipe, share: float) -> Recipe:
    sparse = _before(recipe, "threshold", partial(pruning.train_sparse, share=share))
    return _after(sparse, "threshold", partial(pruning.bake, share=share))


@variant("compression", baseline=True)
def dense(recipe: Recipe) -> Recipe:
    """Every weight kept, in the precision that it was trained in."""
    return recipe


@variant("compression", fidelity="quality", rtol=5e-2, atol=2e-2)
def int8_dynamic(recipe: Recipe) -> Recipe:
    """Weights in int8 with one scale a row, activations quantised anew in each call."""
    return _after(recipe, "int8_dynamic", partial(_replace, make=Int8Linear))


@variant("compression", fidelity="quality", rtol=2e-2, atol=1e-2)
def int8_weight_only(recipe: Recipe) -> Recipe:
    """Weights stored in int8 with one scale a row, products in bf16 (on a CPU)."""
    return _after(recipe, "int8_weight_only", partial(_replace, make=WeightOnlyLinear))


@variant("compression", fidelity="quality", rtol=1e-1, atol=5e-2)
def qat_int8(recipe: Recipe) -> Recipe:
    """Trained with the rounding of int8 weights and activations, then converted with the scales found in training."""
    trained = _before(recipe, "qat_int8", static_quantisation.prepare_training)
    return _after(trained, "qat_int8", static_quantisation.convert_trained)


@variant("compression", fidelity="quality", rtol=1e-1, atol=5e-2)
def ptq_int8(recipe: Recipe) -> Recipe:
    """Trained dense, then int8 weights and activations with fixed scales found on eight batches."""
    return _after(recipe, "ptq_int8", static_quantisation.calibrate)


@variant("compression", fidelity="quality", rtol=1e-4, atol=1e-5)
def threshold_50(recipe: Recipe) -> Recipe:
    """The smallest 50 % of each layer's weights unused: threshold anew in each training step, zeros for good after."""
    return _threshold(recipe, 0.5)


@variant("compression", fidelity="quality", rtol=1e-4, atol=1e-5)
def threshold_80(recipe: Recipe) -> Recipe:
    """The smallest 80 % of each layer's weights unused: threshold anew in each training step, zeros for good after."""
    return _threshold(recipe, 0.8)


@variant("compression", fidelity="quality", rtol=1e-4, atol=1e-5)
def threshold_90(recipe: Recipe) -> Recipe:
    """The smallest 90 % of each layer's weights unused: threshold anew in each training step, zeros for good after."""
    return _threshold(recipe, 0.9)


@variant("compression", fidelity="quality", rtol=2e-2, atol=1e-2, requires=("cuda", "sm80"))
def semi_structured_2_4(recipe: Recipe) -> Recipe:
    """Two of every four neighbouring weights zero, in the layout that sparse tensor cores skip (bf16)."""
    return _after(recipe, "semi_structured_2_4", pruning.to_semi_structured)


@variant("compression", fidelity="quality", rtol=1e-4, atol=1e-5)
def prune_finetune(recipe: Recipe) -> Recipe:
    """Trained dense, the smallest 80 % of each layer's weights set to zero, then 50 more steps with the zeros held."""
    return _after(recipe, "prune_finetune", partial(pruning.prune_and_finetune, share=0.8))
