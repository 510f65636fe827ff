"""Floating-point operations, bytes and parameters of a model from its sizes alone, and what is made of them.

Two conventions, both counting matrix products only (two FLOPs a multiply-add), as published utilisations do:
`palm` is 6 N + 12 L d T a token (Chowdhery et al. 2022, appendix B), `exact` counts the pairs of query and key that
the mask lets through, and grouped heads; `full` is `exact` with every pair, which is what a counter of tensor
operations sees.  Recomputed work is never part of `total` (MFU), only of `hardware_total` (HFU).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmperf.catalogue import suggest
from lmperf.records import ModelShape

if TYPE_CHECKING:
    from torch import Tensor, nn

CONVENTIONS = ("palm", "exact", "full")
BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
RECOMPUTED_SHARE = {"recompute_full": 1, "recompute_every_2": 2}


def attention_pairs(queries: int, keys: int, *, causal: bool = True, window: int | None = None) -> int:
    """Pairs of query and key that the mask lets through; the last query is aligned to the last key."""
    if queries < 0 or keys < 0 or (causal and queries > keys):
        raise ValueError(f"queries={queries}, keys={keys}: allowed is 0 ≤ queries ≤ keys for causal attention")
    if not causal:
        return queries * (keys if window is None else min(keys, window))
    first, last = keys - queries + 1, keys  # keys seen by the first and by the last query
    if window is None or window >= last:
        return (first + last) * queries // 2
    if window <= first:
        return window * queries
    growing = window - first  # queries that see fewer keys than the window holds
    return (first + window - 1) * growing // 2 + window * (queries - growing)


def attention_flops(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, *, causal: bool = True,
    window: int | None = None, backward: bool = False,
) -> int:  # fmt: skip
    """Forward (and backward) FLOPs of scores and weighted values; grouped heads share keys but not products.

    Backward is twice forward (dV, dP, dQ, dK); a kernel that recomputes the scores does 2.5 times, which counts for
    HFU only (Dao 2023, section 4).
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple of kv_heads")
    pairs = attention_pairs(queries, keys, causal=causal, window=window)
    forward = 4 * batch * heads * pairs * head_dim
    return forward * 3 if backward else forward


def parameter_count(shape: ModelShape, *, lookup_tables: bool = True) -> int:
    """Parameters of the baseline model of this shape.

    `lookup_tables=False` leaves out what takes part in no product: positions, and the input embedding when the head
    is another matrix.
    """
    d, kv = shape.d_model, shape.kv_heads * shape.head_dim
    vocabulary = shape.vocab_size * d
    norm = d if shape.norm == "rmsnorm" else 2 * d
    attention = 2 * (d * d + d) + 2 * (d * kv + kv)
    wide = 2 if shape.activation == "swiglu" else 1
    feed_forward = wide * (d * shape.d_ff + shape.d_ff) + shape.d_ff * d + d
    total = shape.layers * (attention + feed_forward + 2 * norm) + norm + vocabulary
    if lookup_tables:
        total += 0 if shape.tied_head else vocabulary
        total += shape.context_length * d if shape.position == "learned" else 0
    return total


def parameter_bytes(shape: ModelShape, dtype: str = "float32") -> int:
    """Bytes of all parameters in `dtype`."""
    return parameter_count(shape) * BYTES[dtype]


def kv_cache_bytes(shape: ModelShape, batch: int, length: int, dtype: str = "float32") -> int:
    """Bytes of keys and values of `length` tokens in all layers."""
    return 2 * shape.layers * batch * shape.kv_heads * length * shape.head_dim * BYTES[dtype]


def forward_groups(
    shape: ModelShape, batch: int, length: int, *, causal: bool = True, window: int | None = None, past: int = 0
) -> dict[str, int]:
    """Forward FLOPs by operation group for `length` new tokens after `past` cached ones."""
    tokens, d = batch * length, shape.d_model
    kv = shape.kv_heads * shape.head_dim
    wide = 3 if shape.activation == "swiglu" else 2
    attention = attention_flops(
        batch, shape.heads, shape.kv_heads, length, past + length, shape.head_dim, causal=causal, window=window
    )
    return {
        "qkv_projection": shape.layers * 2 * tokens * d * (d + 2 * kv),
        "attention_scores": shape.layers * attention // 2,
        "attention_values": shape.layers * attention // 2,
        "output_projection": shape.layers * 2 * tokens * d * d,
        "feed_forward": shape.layers * wide * 2 * tokens * d * shape.d_ff,
        "head": 2 * tokens * d * shape.vocab_size,
    }


def step_flops(
    shape: ModelShape, batch: int, length: int, convention: str = "exact", *, window: int | None = None,
    recomputed_layers: int = 0, backward: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """FLOPs of one training step (or forward pass): `groups`, `total` (for MFU) and `hardware_total` (for HFU).

    `recomputed_layers` layers run their forward pass a second time in backward: hardware_total only.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention={convention!r}{suggest(convention, CONVENTIONS)}; allowed: palm, exact, full")
    factor = 3 if backward else 1
    if convention == "palm":
        tokens = batch * length
        groups = {
            "parameters": 2 * factor * parameter_count(shape, lookup_tables=False) * tokens,
            "attention": 4 * factor * shape.layers * shape.d_model * length * tokens,
        }
    else:
        causal = convention == "exact"
        forward = forward_groups(shape, batch, length, causal=causal, window=window if causal else None)
        groups = {name: factor * value for name, value in forward.items()}
    total = sum(groups.values())
    layers = total - groups.get("head", 2 * factor * shape.vocab_size * shape.d_model * batch * length)
    again = layers * recomputed_layers // (factor * shape.layers) if backward else 0
    return {"convention": convention, "groups": groups, "total": total, "hardware_total": total + again}


def recipe_flops(
    recipe: Any, shape: ModelShape, batch: int, length: int, convention: str = "exact", *, window: int | None = None
) -> dict[str, Any]:
    """`step_flops` of a recipe: its changes of shape, its padded vocabulary and the layers that it recomputes."""
    shape = recipe.shape(shape)
    rows = math.ceil(shape.vocab_size / recipe.pad_vocab_to) * recipe.pad_vocab_to
    every = [RECOMPUTED_SHARE[t.name] for t in recipe.transforms if t.name in RECOMPUTED_SHARE]
    again = math.ceil(shape.layers / min(every)) if every else 0
    padded = dataclasses.replace(shape, vocab_size=rows)
    return step_flops(padded, batch, length, convention, window=window, recomputed_layers=again)


def decode_flops(shape: ModelShape, batch: int, past: int) -> int:
    """FLOPs of one decoding step of one new token a sequence with `past` tokens in the cache."""
    return sum(forward_groups(shape, batch, 1, past=past).values())


def decode_bytes(shape: ModelShape, batch: int, past: int, dtype: str = "float32") -> int:
    """Bytes that one decoding step must read: every parameter that takes part, and the cached keys and values."""
    used = parameter_count(shape, lookup_tables=False) * BYTES[dtype]
    return used + kv_cache_bytes(shape, batch, past, dtype)


def utilisation(done: float | None, seconds: float | None, peak: float | None) -> float | None:
    """`done` a second as a share of `peak` a second (MFU, HFU or MBU, by what is put in); None when any is unknown."""
    if done is None or not seconds or not peak:
        return None
    return done / seconds / peak


def mfu(flops: Mapping[str, Any], seconds: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilisation of `step_flops`'s answer: recomputation does not count."""
    return utilisation(flops["total"], seconds, peak)


def hfu(flops: Mapping[str, Any], seconds: float | None, peak: float | None) -> float | None:
    """Hardware FLOPs utilisation: recomputation counts."""
    return utilisation(flops["hardware_total"], seconds, peak)


def mbu(bytes_read: float | None, seconds: float | None, bandwidth: float | None) -> float | None:
    """Memory bandwidth utilisation of a decoding step (`decode_bytes`)."""
    return utilisation(bytes_read, seconds, bandwidth)


def roofline(
    flops: float | None, bytes_moved: float | None, peak_flops: float | None, bandwidth: float | None
) -> dict[str, Any] | None:
    """Where an operator lies under the roofline (Williams et al. 2009); None when a number is not known.

    intensity in FLOPs a byte, `bound` "compute" or "memory", `attainable` in FLOP/s.
    """
    if not flops or not bytes_moved or not peak_flops or not bandwidth:
        return None
    intensity = flops / bytes_moved
    attainable = min(peak_flops, intensity * bandwidth)
    return {
        "intensity": intensity,
        "bound": "compute" if intensity >= peak_flops / bandwidth else "memory",
        "attainable": attainable,
    }


def above_roofline(flops: float | None, seconds: float | None, peak: float | None, slack: float = 1.1) -> str | None:
    """The reason why a result is implausible: more FLOP/s than the machine's peak (by over `slack`), else None."""
    share = utilisation(flops, seconds, peak)
    if share is None or share <= slack:
        return None
    return f"{share:.2f} times the peak of {peak:.3g} FLOP/s"


def constant_time(points: Sequence[tuple[float, float]], growth: float = 1.1) -> str | None:
    """The reason why (FLOPs, seconds) points are implausible: time constant while the FLOPs more than double.

    Only neighbours where the smaller cell already takes 10 ms count: below that a call is mostly overhead.
    """
    ordered = sorted(points)
    for (flops, seconds), (more, longer) in zip(ordered, ordered[1:], strict=False):
        if seconds >= 0.01 and more > 2 * flops and longer < growth * seconds:
            return f"{longer / seconds:.2f} times the time for {more / flops:.1f} times the FLOPs"
    return None


def implausible(
    flops: float | None, seconds: float | None, peak: float | None, points: Sequence[tuple[float, float]] = ()
) -> str | None:
    """Why a result cannot be true (above the roofline, or constant time while the FLOPs grow), or None."""
    return above_roofline(flops, seconds, peak) or constant_time(points)


def count_step(model: nn.Module, x: Tensor, y: Tensor, *, backward: bool = True) -> dict[str, Any]:
    """FLOPs of one real step seen by `FlopCounterMode`: `total` and `by_operator`.

    SDPA runs under the math backend, since the counter sees nothing of the CPU's fused kernel.  Never call it on a
    compiled model: any dispatch mode makes that run eager for the rest of the process.
    """
    from torch import no_grad
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        if backward:
            model(x, y).backward()
        else:
            with no_grad():
                model(x, y)
    model.zero_grad(set_to_none=True)
    by_operator = {str(op): int(n) for op, n in counter.get_flop_counts()["Global"].items()}
    return {"total": int(counter.get_total_flops()), "by_operator": by_operator}


def counter_mismatch(analytic: Mapping[str, Any], counted: Mapping[str, Any], limit: float = 0.05) -> str | None:
    """The reason for the badge `flops_mismatch`: analytic (`full`) and counted FLOPs differ by over `limit`."""
    if not counted["total"]:
        return "the counter saw no FLOPs"
    off = analytic["total"] / counted["total"] - 1
    return f"analytic FLOPs are {off:+.1%} off the counter's" if abs(off) > limit else None
