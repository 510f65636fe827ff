"""The operator workloads: one operator of an axis alone, forward, or forward and backward, with its numerical check."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmperf import registry
from lmperf.checking import Expectation, compare, expectation, finite
from lmperf.implementations.facts import facts_of
from lmperf.recipe import Recipe
from lmperf.workloads.base import CheckOutcome, Prepared, Setting, Unsupported, workload
from lmperf.workloads.operands import Case, Operation, Tensors, dtype_of, operation, whole

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
    """Inputs, step and check of the arm's operator."""
    found = operation(setting, setting.recipe)
    if reason := cannot_run(setting, found, backward):
        raise Unsupported(reason)
    expected = expectation(setting.arm.variants, setting.spec.plugins)
    generator = torch.Generator().manual_seed(setting.seed)
    number = int(setting.param("input_sets", INPUT_SETS))  # one where memory is weighed
    sets = [found.arrange(found.inputs(generator)) for _ in range(number)]
    step = backward_step(found, sets, generator) if backward else forward_step(found, sets)
    factor = 3 if backward else 1
    return Prepared(
        step=step,
        check=lambda seed: check(setting, expected, seed, backward=backward),
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
        outputs = found.call(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(torch.randn(o.shape, generator=generator).to(o) for o in outputs)


def outputs_of(found: Operation, inputs: Tensors) -> Tensors:
    """The operator's outputs as a tuple; gradients are recorded when an input wants them."""
    with torch.set_grad_enabled(any(t.requires_grad for t in inputs)):
        outputs = found.call(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def trained(inputs: Tensors, found: Operation) -> Tensors:
    """Tensors that get a gradient: floating inputs, then parameters."""
    return (*(t for t in inputs if t.requires_grad), *found.parameters)


def check(setting: Setting, expected: Expectation, seed: int, *, backward: bool) -> CheckOutcome:
    """Compare the arm's operator with its oracle (or the reference) in fp32 on fresh inputs of `seed`."""
    arm = operation(setting, setting.recipe)
    truth = None if expected.oracle is None else operation(setting, expected.oracle)
    generator = torch.Generator().manual_seed(seed)
    got: dict[str, Tensor] = {}
    true: dict[str, Tensor] = {}
    for case in arm.cases(generator):
        ours = arm.arrange(case.inputs)
        ours = leaves(ours) if backward else ours
        outputs = outputs_of(arm, ours)
        weights = tuple(torch.randn(o.shape, generator=generator).to(o) for o in outputs) if backward else ()
        got |= named(ours, outputs, weights, case.part)
        if truth is not None:
            theirs = exact_inputs(case, arm, truth)
            cut = tuple(case.part(w).to(theirs[0].dtype) for w in weights)
            true |= named(theirs, outputs_of(truth, theirs), cut, whole)
    if truth is None:
        return finite(got)
    return compare(got, true, expected.rtol + ROUNDING[dtype_of(setting)], expected.atol)


def exact_inputs(case: Case, arm: Operation, truth: Operation) -> Tensors:
    """The case's inputs as the truth sees them: the compared part, in fp32.

    A baseline is its own reference: it is compared with the same formula in double precision.
    """
    exact = torch.float64 if arm.implementation == truth.implementation else torch.float32
    if truth.module is not None:
        truth.module.to(exact)
    return leaves(tuple(case.part(t).to(exact) if t.is_floating_point() else case.part(t) for t in case.inputs))


def named(inputs: Tensors, outputs: Tensors, weights: Tensors, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs and, when upstream gradients `weights` are given, the inputs' gradients, cut by `part`, by name.

    Parameters are laid out differently in merged layers: the inputs' gradients speak for them.
    """
    shape = "x".join(map(str, inputs[0].shape[-2:]))
    if not weights:
        return {f"output {i} at {shape}": part(o).detach() for i, o in enumerate(outputs)}
    wanted = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, weights)
    return named(inputs, outputs, (), part) | {f"gradient {i} at {shape}": part(g) for i, g in enumerate(gradients)}
