"""The Triton FlashAttention-2 kernels: run by Triton's interpreter on the CPU, compiled for CUDA without a device."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install 'lmperf[triton]')"
)

#: dtype and the largest relative error that its rounding explains.
BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
#: batch, heads, kv_heads, queries, keys, d, causal; heads 0 = (batch, length, d) tensors.
SHAPES = [
    (1, 2, 2, 70, 70, 16, True), (1, 4, 2, 33, 33, 24, True), (1, 2, 1, 5, 90, 32, True), (1, 2, 2, 50, 37, 80, False),
    (2, 0, 0, 65, 65, 64, True), (2, 0, 0, 40, 40, 16, False), (1, 1, 1, 1, 1, 8, True), (1, 1, 1, 1, 70, 128, True),
    (1, 1, 1, 67, 67, 3, True),
]  # fmt: skip

# TRITON_INTERPRET must be set before the kernels are decorated, hence a process of their own.
INTERPRET = """
import json, sys
import torch
from lmperf.kernels.flash import FlashFunctionTriton

def dense(q, k, v, causal):
    if q.dim() == 4:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)

def error(a, b):
    return float((a.float() - b).abs().max() / b.abs().max().clamp_min(1e-3))

torch.manual_seed(0)
answers = []
for name, (batch, heads, kv_heads, queries, keys, d, causal) in json.loads(sys.argv[1]):
    dtype = getattr(torch, name)
    sizes = [[batch, *([h] if h else []), n, d] for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
    q, k, v = (torch.randn(size).to(dtype).requires_grad_() for size in sizes)
    upstream = torch.randn(q.shape).to(dtype)
    out = FlashFunctionTriton.apply(q, k, v, causal)
    got = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == q.shape[:-1]]
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    truth, lse = dense(*wide, causal)
    wanted = torch.autograd.grad(truth, wide, upstream.float())
    errors = [error(a, b) for a, b in zip((out, *got, saved[0]), (truth.detach(), *wanted, lse.detach()))]
    answers.append({"errors": errors, "lse": len(saved), "dtypes": len({t.dtype for t in (out, *got, q)})})
print(json.dumps(answers))
"""


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


CASES = [("float32", shape) for shape in SHAPES]
CASES += [(dtype, shape) for dtype in ("float16", "bfloat16") for shape in SHAPES[1::2]]


@pytest.fixture(scope="module")
def answers():
    return run(INTERPRET, json.dumps(CASES), TRITON_INTERPRET="1")


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{dtype}-{shape}" for dtype, shape in CASES])
def test_interpreted_kernels_agree_with_the_dense_form(index, answers):
    answer, (dtype, _) = answers[index], CASES[index]
    assert answer["lse"] == 1
    assert answer["dtypes"] == 1
    assert all(error < BOUNDS[dtype] for error in answer["errors"]), answer["errors"]


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmperf.kernels import flash_kernels as kernels

shared = []
for kernel in (kernels.forward_kernel, kernels.keys_backward_kernel, kernels.queries_backward_kernel):
    kinds = {"L": "*fp32", "D": "*fp32", "scale": "fp32", "queries": "i32", "keys": "i32", "d": "i32", "group": "i32"}
    pointers = dict.fromkeys(("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV"), "*fp16")
    signature = {name: {**pointers, **kinds}.get(name, "constexpr") for name in kernel.arg_names}
    constants = dict(CAUSAL=True, UPCAST=False, PRECISION="tf32", ROWS=64, COLUMNS=64, WIDTH=32)
    built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32))
    assert built.asm["cubin"]
    shared.append(built.metadata.shared)
print(json.dumps(shared))
"""


def test_kernels_compile_for_a_device_that_is_not_here():
    shared = run(COMPILE, TRITON_INTERPRET="0")
    assert len(shared) == 3
    assert max(shared) <= 99 * 1024  # what the smallest supported device gives a block


def test_the_variant_says_what_it_lacks():
    import torch

    from lmperf import registry

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: the variant is available")
    assert "CUDA" in registry.get("attention/triton_flash").unavailable()


def test_too_wide_heads_are_refused():
    import torch

    from lmperf.kernels.flash import FlashFunctionTriton

    with pytest.raises(ValueError, match="128"):
        FlashFunctionTriton.apply(*(torch.ones(1, 2, 130) for _ in range(3)), True)


def test_kernels_on_a_device():
    import torch

    from lmperf import reference
    from lmperf.kernels.flash import triton_flash

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: only the interpreter's results are checked here")
    q, k, v = (torch.randn(2, 4, 333, 64, device="cuda", requires_grad=True) for _ in range(3))
    out, truth = triton_flash(q, k, v), reference.attention(q, k, v)
    torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-4)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(truth, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
