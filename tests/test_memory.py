"""Memory: closed forms for naive attention, anchored sums, what is kept for backward, CUDA counters, live tensors."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lmperf import memory, reference
from lmperf.devices import CpuDevice, CudaDevice
from lmperf.workloads.base import Prepared

HERE = Path(__file__).parent


def naive_attention_step(batch: int, heads: int, length: int, d: int):
    gc.collect()  # what other tests of this process left is not part of the step
    q, k, v = (torch.randn(batch, heads, length, d, requires_grad=True) for _ in range(3))

    def step() -> None:
        for tensor in (q, k, v):
            tensor.grad = None
        reference.attention(q, k, v).sum().backward()

    return step


SIZES = [(1, 4, 256, 32), (2, 8, 512, 64), (1, 4, 1024, 64)]


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[int, ...], list[float]]:
    """(step peak, forward peak) of naive attention by size, weighed in a fresh process as every memory sample is."""
    code = (
        "import json, test_memory as t; from lmperf import memory; from lmperf.devices import CpuDevice\n"
        "found = [memory.peaks(t.naive_attention_step(*size), CpuDevice()) for size in t.SIZES]\n"
        "print(json.dumps([[peak.step, peak.forward] for peak in found]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    return dict(zip(SIZES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_the_peak_of_naive_attention_is_the_closed_form(size: tuple[int, ...], peaks: dict) -> None:
    """At the peak of backward: three score matrices (probabilities, their gradient, the scores' gradient), q, k, v, one
    more of their size, and the mask."""
    batch, heads, length, d = size
    scores, inputs = 4 * batch * heads * length**2, 4 * batch * heads * length * d
    step, forward = peaks[size]
    assert step == pytest.approx(3 * scores + 4 * inputs + length**2, rel=0.05)
    assert 2 * scores < forward < step


def test_the_peak_repeats_to_the_byte_and_a_materialised_matrix_shows() -> None:
    naive = naive_attention_step(1, 4, 256, 32)
    q, k, v = (torch.randn(1, 4, 256, 32, requires_grad=True) for _ in range(3))

    def fused() -> None:
        for tensor in (q, k, v):
            tensor.grad = None
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    first = memory.peaks(naive, CpuDevice())
    assert memory.peaks(naive, CpuDevice()) == first
    assert first.step - memory.peaks(fused, CpuDevice()).step > 4 * 4 * 256 * 256


def test_changes_are_anchored_at_what_is_alive_at_the_end() -> None:
    changes = [(1, 100), (2, 50), (3, -50), (10, 30), (11, 40), (12, -30), (13, -40)]
    found = memory.anchored_peaks(changes, begin=5, backward=11, alive=500)
    assert (found.before, found.forward, found.step) == (500, 530, 570)


def test_a_step_without_allocations_has_what_is_alive_as_its_peak() -> None:
    assert memory.anchored_peaks([], begin=5, backward=None, alive=42).step == 42


def test_kept_for_backward_is_counted_once_a_storage_and_without_parameters() -> None:
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(16, 64, requires_grad=True)

    def step() -> None:
        hidden = layer(x)  # keeps x and the weight
        (hidden * hidden).sum().backward()  # keeps hidden, twice

    assert memory.saved_bytes(step, list(layer.parameters())) == x.nbytes + 16 * 64 * 4


def test_micro_batches_keep_one_after_the_other() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(16, 64)

    def step() -> None:
        for part in x.chunk(4):
            layer(part.clone()).pow(2).sum().backward()

    whole = 2 * x.nbytes
    assert memory.saved_bytes(step, list(layer.parameters())) == whole // 4


def test_the_table_knows_parameters_gradients_and_moments() -> None:
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()

    step()
    table = memory.analytic_table(Prepared(step=step, model=model, once={"kv_cache_bytes": ("bytes", 9.0)}))
    size = 32 * 32 * 4
    assert (table["parameters"], table["gradients"], table["kv_cache"]) == (size, size, 9)
    assert table["moments"] is not None
    assert table["moments"] >= 2 * size


def test_a_workload_without_a_model_has_no_parameters_rather_than_zero() -> None:
    table = memory.analytic_table(Prepared(step=lambda: None))
    assert table["parameters"] is None
    assert table["kv_cache"] is None


def test_living_tensors_are_counted_once_a_storage() -> None:
    before = memory.live_tensor_bytes()
    block = torch.zeros(1 << 20)
    views = [block[:10], block.view(1024, 1024)]
    assert memory.live_tensor_bytes() - before == block.nbytes
    del block, views
    assert memory.live_tensor_bytes() == before


def test_the_resident_peak_is_of_these_steps_and_not_inherited() -> None:
    def step() -> None:
        torch.ones(16 << 20).sum()

    idle = memory.resident_peak(lambda: None)
    if idle is None:
        pytest.skip("/proc/self/clear_refs cannot be written here")
    found = memory.resident_peak(step)
    assert found is not None
    assert found >= idle


def test_cuda_peaks_come_from_its_counters() -> None:
    from test_timing import FakeCuda

    ran: list[int] = []
    found = memory.peaks(lambda: ran.append(1), CudaDevice(FakeCuda()))
    assert (found.before, found.step, found.forward, ran) == (7, 30, None, [1])
    assert found.counters["device_in_use"] == 40
