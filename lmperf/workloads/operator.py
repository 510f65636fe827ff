"""The operator workloads: one operator of an axis alone, forward, or forward and backward, with its numerical check."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmperf import registry
from lmperf.implementations.facts import facts_of
from lmperf.recipe import Recipe
from lmperf.workloads.base import CheckOutcome, Prepared, Setting, Unsupported, workload
from lmperf.workloads.operands import Case, Operation, Tensors, operation

#: Different input sets that rotate, so that no cache sees the same data twice in a row.
INPUT_SETS = 4
#: Relative error that rounding to a 16-bit dtype alone explains.
ROUNDING = {torch.float32: 0.0, torch.float64: 0.0, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@workload("operator_forward")
def operator_forward(setting: Setting) -> Prepared:
    """The operator's forward pass without gradients."""
    return prepare(setting, backward=False)


@workload("operator_forward_backward")
def operator_forward_backward(setting: Setting) -> Prepared:
    """The operator's forward and backward pass; gradients are made anew each step and dropped."""
    return prepare(setting, backward=True)


def prepare(setting: Setting, *, backward: bool) -> Prepared:
    """Inputs, step and check of the arm's operator; a quality variant without a naive form has no check."""
    found = operation(setting, setting.recipe)
    if reason := cannot_run(setting, found, backward):
        raise Unsupported(reason)
    generator = torch.Generator().manual_seed(setting.seed)
    sets = [found.arrange(found.inputs(generator)) for _ in range(INPUT_SETS)]
    step = backward_step(found, sets, generator) if backward else forward_step(found, sets)
    factor = 3 if backward else 1
    return Prepared(
        step=step,
        check=None if truth_of(setting)[0] is None else lambda seed: check(setting, seed, backward=backward),
        tokens_per_step=found.tokens,
        flops_per_step=None if found.forward_flops is None else factor * found.forward_flops,
        once=found.once,
    )


def cannot_run(setting: Setting, found: Operation, backward: bool) -> str | None:
    """Why this arm has nothing to measure here, or None."""
    if backward and setting.spec.axis == "attention" and setting.device == "cpu":
        return facts_of(setting.recipe.attention).no_cpu_backward
    if setting.arm.variants and setting.spec.axis == "matmul":
        same = found.implementation == operation(setting, Recipe()).implementation
        entries = [registry.get(key, setting.spec.plugins) for key in setting.arm.variants]
        if same and not all(entry.baseline for entry in entries):
            return f"{setting.arm.name} does not change the operand {setting.param('operand', 'matmul')}"
    return None


def forward_step(found: Operation, sets: list[Tensors]) -> Callable[[], Any]:
    """One forward pass over the next inputs."""
    rotation = itertools.cycle(sets)

    def step() -> Any:
        with torch.no_grad():
            return found.call(*next(rotation))

    return step


def backward_step(found: Operation, sets: list[Tensors], generator: torch.Generator) -> Callable[[], Any]:
    """One forward and backward pass over the next inputs, with upstream gradients that were drawn beforehand."""
    rotation = itertools.cycle([(leaves(inputs), upstream(found, inputs, generator)) for inputs in sets])

    def step() -> Any:
        inputs, gradients = next(rotation)
        outputs = outputs_of(found, inputs)
        return torch.autograd.grad(outputs, trained(inputs, found), gradients)

    return step


def leaves(inputs: Tensors) -> Tensors:
    """Inputs detached, floating ones with gradients wanted; strides are kept."""
    return tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs)


def upstream(found: Operation, inputs: Tensors, generator: torch.Generator) -> Tensors:
    """Random gradients of the outputs' shapes."""
    with torch.no_grad():
        outputs = outputs_of(found, inputs)
    return tuple(torch.randn(o.shape, generator=generator).to(o) for o in outputs)


def outputs_of(found: Operation, inputs: Tensors) -> Tensors:
    """The operator's outputs as a tuple."""
    outputs = found.call(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def trained(inputs: Tensors, found: Operation) -> Tensors:
    """Tensors that get a gradient: floating inputs, then parameters."""
    return (*(t for t in inputs if t.requires_grad), *found.parameters)


def check(setting: Setting, seed: int, *, backward: bool) -> CheckOutcome:
    """Compare the arm's operator with its oracle (or the reference) in fp32 on fresh inputs of `seed`."""
    truth_recipe, rtol, atol = truth_of(setting)
    arm, truth = operation(setting, setting.recipe), operation(setting, truth_recipe)
    # A baseline is its own reference: it is compared with the same formula in double precision.
    exact = torch.float64 if arm.implementation == truth.implementation else torch.float32
    if truth.module is not None:
        truth.module.to(exact)
    generator = torch.Generator().manual_seed(seed)
    worst, worst_name = 0.0, ""
    for case in arm.cases(generator):
        for name, error in case_errors(arm, truth, case, exact, generator, backward, (rtol, atol)):
            if not error <= worst:  # NaN counts as the worst
                worst, worst_name = error, f"{name} at {tuple(case.inputs[0].shape)}"
    message = f"largest error is {worst:.2%} of what is allowed ({worst_name or 'all equal'})"
    return CheckOutcome(worst <= 1, message, worst)


def truth_of(setting: Setting) -> tuple[Recipe | None, float, float]:
    """The recipe to compare with (oracles for other functions), rtol and atol; None: there is no naive form."""
    recipe, rtol, atol = Recipe(), 1e-4, 1e-5
    entries = [registry.get(key, setting.spec.plugins) for key in setting.arm.variants]
    for entry in entries:
        rtol, atol = max(rtol, entry.rtol), max(atol, entry.atol)
        if entry.oracle is not None:
            recipe = entry.oracle(recipe)
        elif entry.fidelity == "quality" and entry.axis == setting.spec.axis:
            return None, rtol, atol
    return recipe, rtol, atol


def case_errors(
    arm: Operation, truth: Operation, case: Case, exact: torch.dtype, generator: torch.Generator, backward: bool,
    tolerance: tuple[float, float],
) -> Iterator[tuple[str, float]]:  # fmt: skip
    """Error of each output and gradient as a multiple of what is allowed."""
    ours = leaves(arm.arrange(case.inputs))
    theirs = leaves(tuple(case.part(t).to(exact) if t.is_floating_point() else case.part(t) for t in case.inputs))
    with torch.set_grad_enabled(backward):
        mine, right = outputs_of(arm, ours), outputs_of(truth, theirs)
    rtol, atol = tolerance[0] + ROUNDING[ours[0].dtype], tolerance[1]
    for index, (a, b) in enumerate(zip(mine, right, strict=True)):
        yield f"output {index}", excess(case.part(a), b, rtol, atol)
    if not backward:
        return
    gradients = tuple(torch.randn(o.shape, generator=generator).to(o) for o in mine)
    # Parameters are laid out differently in merged layers: the inputs' gradients speak for them.
    got = torch.autograd.grad(mine, [t for t in ours if t.requires_grad], gradients)
    cut = tuple(case.part(g).to(exact) for g in gradients)
    wanted = torch.autograd.grad(right, [t for t in theirs if t.requires_grad], cut)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        yield f"gradient {index}", excess(case.part(a), b, rtol, atol)


def excess(got: Tensor, wanted: Tensor, rtol: float, atol: float) -> float:
    """Largest |got − wanted| over atol + rtol · largest |wanted|; a NaN in only one of them is infinite."""
    got, wanted = got.detach().double(), wanted.detach().double()
    if not torch.equal(got.isfinite(), wanted.isfinite()):
        return float("inf")
    finite = wanted.isfinite()
    if not finite.any():
        return 0.0
    error = (got - wanted)[finite].abs().max()
    return float(error / (atol + rtol * wanted[finite].abs().max()))
