"""The precision axis: number formats of parameters, matrix products and the optimizer's copy of the weights.

Which order is fast depends on the instruction set: with AMX bf16 is many times faster than fp32 and fp16 slower, on a
CPU without it the order turns round.  The machine record says which one a figure comes from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lmperf.implementations import float8
from lmperf.recipe import Recipe
from lmperf.registry import variant


def _with(recipe: Recipe, **formats: Any) -> Recipe:
    return recipe.replace(precision=dataclasses.replace(recipe.precision, **formats))


def _in_fp32(recipe: Recipe) -> Recipe:
    """The truth of every number format is the same recipe in fp32."""
    return recipe


@variant("precision", baseline=True)
def fp32(recipe: Recipe) -> Recipe:
    """IEEE single precision everywhere."""
    return recipe


@variant("precision", fidelity="close", rtol=1e-2, atol=2e-4, requires=("cuda", "sm80"), quality_run=True)
def tf32(recipe: Recipe) -> Recipe:
    """TensorFloat-32 matrix products: 10 bits of mantissa in, fp32 sums."""
    return _with(recipe, tf32=True, matmul="high")


@variant("precision", fidelity="close", rtol=2e-2, atol=5e-4, quality_run=True)
def matmul_medium(recipe: Recipe) -> Recipe:
    """Matrix products of fp32 tensors through bf16 where the device has it (`set_float32_matmul_precision`)."""
    return _with(recipe, matmul="medium")


@variant("precision", fidelity="close", rtol=5e-2, atol=1e-3, quality_run=True)
def bf16_autocast(recipe: Recipe) -> Recipe:
    """Matrix products in bfloat16 by autocast; parameters, sums and the update in fp32."""
    return _with(recipe, autocast=torch.bfloat16)


@variant("precision", fidelity="close", rtol=2e-2, atol=2e-4, quality_run=True)
def fp16_autocast_scaler(recipe: Recipe) -> Recipe:
    """Matrix products in float16 by autocast, with a dynamic loss scale (Micikevicius et al. 2018, section 3.2)."""
    return _with(recipe, autocast=torch.float16, scaler="dynamic")


@variant("precision", fidelity="close", rtol=2e-1, atol=5e-4, control=True, quality_run=True)
def fp16_unscaled(recipe: Recipe) -> Recipe:
    """Negative control: float16 autocast without a loss scale, so that small gradients underflow."""
    return _with(recipe, autocast=torch.float16, scaler=None)


@variant("precision", fidelity="close", rtol=2e-2, atol=2e-4, control=True, quality_run=True)
def fp16_no_update(recipe: Recipe) -> Recipe:
    """Negative control: `scaler.update()` left out, so that the loss scale never moves from 65536."""
    return _with(recipe, autocast=torch.float16, scaler="frozen")


@variant("precision", fidelity="quality", rtol=1e-1, atol=2e-3, oracle=_in_fp32)
def bf16_pure(recipe: Recipe) -> Recipe:
    """Everything in bfloat16, the weights and the optimizer's moments too: small updates are rounded away."""
    return _with(recipe, parameters=torch.bfloat16)


@variant("precision", fidelity="quality", rtol=1e-1, atol=2e-3, oracle=_in_fp32)
def bf16_fp32_master(recipe: Recipe) -> Recipe:
    """Model in bfloat16, updates applied to an fp32 copy of the weights that is rounded back after each step."""
    return _with(recipe, parameters=torch.bfloat16, master_weights=True)


@variant("precision", fidelity="quality", rtol=2e-1, atol=5e-3, requires=("cuda", "sm89"), oracle=_in_fp32)
def fp8(recipe: Recipe) -> Recipe:
    """Linear layers of the blocks in 8-bit floats: e4m3 forward, e5m2 gradients (Micikevicius et al. 2022)."""
    return _with(recipe, autocast=torch.bfloat16, convert=float8.convert)
