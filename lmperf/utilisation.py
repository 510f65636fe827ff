"""How much of the machine a timed step uses: its FLOP/s against a peak probed in the same process and a datasheet's."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmperf import flops
from lmperf.machine import affordable_size, datasheet_peak, device_name, matmul_rate
from lmperf.recipe import Recipe
from lmperf.records import Metric

PROBE_S = 0.1
PROBE_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True)
class Utilisation:
    """`metrics` by name, and the reason why the numbers cannot be true (None when they can)."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    implausible: str | None = None


def dtype_of(recipe: Recipe) -> str:
    """The number format of the recipe's matrix products: "float32", "tf32", "bfloat16" or "float16"."""
    chosen = recipe.precision.autocast or recipe.precision.parameters
    name = str(chosen).removeprefix("torch.")
    return "tf32" if name == "float32" and recipe.precision.tf32 else name


def probed_peak(dtype: str, seconds: float, device: str) -> float:
    """FLOP/s of this process's best product in `dtype`; on a CPU that emulates `dtype`, what float32 does.

    A CPU without instructions for a half precision has kernels that compute it in float32, far above the rate of its
    plain product: the ceiling is the machine's, not that product's.
    """
    kind = device.split(":")[0]
    formats = dict.fromkeys((dtype, "float32") if kind == "cpu" else (dtype,))
    rates = []
    for name in formats:
        size = affordable_size(name, PROBE_SIZE[kind], seconds, kind) if kind == "cpu" else PROBE_SIZE[kind]
        rates.append(matmul_rate(name, size, seconds, device))
    return max(rates)


def utilisation(
    flops_per_step: float | None, step_time_s: float | None, recipe: Recipe, device: str, *, probe_s: float = PROBE_S
) -> Utilisation:
    """flops_per_s, mfu (against `probed_peak`, right now with this process's threads) and mfu_datasheet where known.

    Call it after the timed blocks: a peak is only comparable when it was measured in the same minute.
    """
    if not flops_per_step or not step_time_s:
        return Utilisation()
    dtype = dtype_of(recipe)
    probed = probed_peak(dtype, probe_s, device)
    printed = datasheet_peak(device_name(device), dtype)
    shares = {"mfu": probed, "mfu_datasheet": printed}
    metrics = {"flops_per_s": Metric("FLOP/s", flops_per_step / step_time_s)}
    for name, peak in shares.items():
        if peak is not None:
            metrics[name] = Metric("share", flops.utilisation(flops_per_step, step_time_s, peak))
    return Utilisation(metrics, flops.above_roofline(flops_per_step, step_time_s, printed or 2 * probed))
