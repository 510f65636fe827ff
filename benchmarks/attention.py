"""Own attention against PyTorch's, in one run with the allocator fixed; prints ratios, the last line is JSON.

1. `chunked` forward + backward against `naive` at T = 4096 (batch 2, heads 8, d 64, fp32): the peak of tensor memory
   (wanted: 1/12 or less; inputs and gradients count) and the median time of interleaved calls (wanted: 1.0 or less).
2. Going through our contract (`sdpa_flash`) against a direct call of `F.scaled_dot_product_attention` at T = 1024:
   median of paired, alternating calls (wanted: 1.03 or less), with the same code against itself as the noise floor.

`--quick` uses T = 1024 for the first part and fewer rounds: it shows that the script runs, not the figures wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

FIXED = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "67108864",
    "GOMP_SPINCOUNT": "1000",
}  # fmt: skip

if any(os.environ.get(name) != value for name, value in FIXED.items()):
    # The allocator reads its settings when the process starts.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **FIXED})

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lmperf import reference, registry  # noqa: E402
from lmperf.memory import cpu_peaks  # noqa: E402
from lmperf.recipe import Recipe  # noqa: E402

Call = Callable[[], object]
NAMES = ("naive", "chunked", "sdpa_flash")


def inputs(length: int) -> list[Tensor]:
    """q, k, v (2, 8, length, 64) in fp32."""
    return [torch.randn(2, 8, length, 64, requires_grad=True) for _ in range(3)]


def forward_backward(name: str, tensors: list[Tensor], upstream: Tensor) -> Call:
    """One forward and backward pass of an attention variant."""
    function = registry.get(f"attention/{name}").apply(Recipe()).attention
    q, k, v = tensors
    return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), upstream)


def seconds(call: Call) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Times of each call, taken in turns after one warm-up; the order turns round from round to round."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        order = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in order:
            times[name].append(seconds(calls[name]))
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the paired ratios one / other."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def against_naive(length: int, rounds: int) -> dict[str, float]:
    """Peak tensor memory and time of each variant over naive's."""
    tensors, upstream = inputs(length), torch.randn(2, 8, length, 64)
    calls = {name: forward_backward(name, tensors, upstream) for name in NAMES}
    peaks = {name: cpu_peaks(call).step for name, call in calls.items()}
    times = interleaved(calls, rounds)
    answer = {}
    for name in NAMES[1:]:
        answer[f"{name}_memory_ratio"] = peaks[name] / peaks["naive"]
        answer[f"{name}_time_ratio"] = ratio(times, name, "naive")
        print(
            f"{name}: {peaks[name] / 2**20:.1f} MiB, 1/{peaks['naive'] / peaks[name]:.1f} of naive's peak; "
            f"{answer[f'{name}_time_ratio']:.3f} times naive's time"
        )
    return answer


def contract_overhead(length: int, rounds: int) -> dict[str, float]:
    """Our contract over a direct call, forward only, and the direct call over itself."""
    contract = registry.get("attention/sdpa_flash").apply(Recipe()).attention
    with torch.no_grad():
        q, k, v = inputs(length)
        out = contract(q, k, v)
        torch.testing.assert_close(out, reference.attention(q, k, v), rtol=1e-4, atol=1e-5)
        direct = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        calls: dict[str, Call] = {"direct": direct, "contract": lambda: contract(q, k, v), "again": lambda: direct()}
        times = interleaved(calls, rounds)
    answer = {"contract_ratio": ratio(times, "contract", "direct"), "noise_ratio": ratio(times, "again", "direct")}
    noise = answer["noise_ratio"]
    print(f"contract / direct at T = {length}: {answer['contract_ratio']:.4f} (direct / direct {noise:.4f})")
    return answer


def main() -> None:
    """Run both parts and print one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small length and few rounds")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    length, rounds = (1024, 3) if quick else (4096, 5)
    answer: dict[str, float] = {"length": length, "threads": torch.get_num_threads()}
    answer |= against_naive(length, rounds)
    answer |= contract_overhead(1024, 50 if quick else 400)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
