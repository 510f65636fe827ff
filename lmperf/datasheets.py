"""Dense peaks from vendors' datasheets, by the exact device name that the driver reports (no torch)."""

from __future__ import annotations

_T, _G = 1e12, 1e9


def _hopper_sxm(bandwidth: float) -> dict[str, float]:
    # NVIDIA H100 datasheet, SXM column, halved where it is printed "with sparsity".
    return {"bfloat16": 989.5 * _T, "float16": 989.5 * _T, "tf32": 494.5 * _T, "float8": 1979 * _T, "float32": 67 * _T,
            "int8": 1979 * _T, "bandwidth": bandwidth}  # fmt: skip


def _ampere_100(bandwidth: float) -> dict[str, float]:
    # NVIDIA A100 datasheet, dense column.
    return {"bfloat16": 312 * _T, "float16": 312 * _T, "tf32": 156 * _T, "float32": 19.5 * _T, "int8": 624 * _T,
            "bandwidth": bandwidth}  # fmt: skip


def _volta(float16: float, float32: float) -> dict[str, float]:
    # NVIDIA V100 datasheet; no bfloat16 tensor cores.
    return {"float16": float16, "float32": float32, "bandwidth": 900 * _G}


#: FLOP/s (dense, tensor cores where the dtype has them, fp32 accumulation) and bytes/s, by device name.
DATASHEETS: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": _hopper_sxm(3350 * _G),
    "NVIDIA H200": _hopper_sxm(4800 * _G),  # NVIDIA H200 datasheet
    "NVIDIA GH200 480GB": _hopper_sxm(4000 * _G),  # NVIDIA GH200 datasheet, 96 GB HBM3
    # NVIDIA H100 datasheet, PCIe column, halved where "with sparsity".
    "NVIDIA H100 PCIe": {"bfloat16": 756 * _T, "float16": 756 * _T, "tf32": 378 * _T, "float8": 1513 * _T,
                         "float32": 51 * _T, "int8": 1513 * _T, "bandwidth": 2000 * _G},
    "NVIDIA A100-SXM4-40GB": _ampere_100(1555 * _G),
    "NVIDIA A100-SXM4-80GB": _ampere_100(2039 * _G),
    "NVIDIA A100-PCIE-40GB": _ampere_100(1555 * _G),
    "NVIDIA A100 80GB PCIe": _ampere_100(1935 * _G),
    # NVIDIA A30 datasheet.
    "NVIDIA A30": {"bfloat16": 165 * _T, "float16": 165 * _T, "tf32": 82 * _T, "float32": 10.3 * _T, "int8": 330 * _T,
                   "bandwidth": 933 * _G},
    # NVIDIA A40 datasheet.
    "NVIDIA A40": {"bfloat16": 149.7 * _T, "float16": 149.7 * _T, "tf32": 74.8 * _T, "float32": 37.4 * _T,
                   "int8": 299.3 * _T, "bandwidth": 696 * _G},
    # NVIDIA A10 datasheet.
    "NVIDIA A10": {"bfloat16": 125 * _T, "float16": 125 * _T, "tf32": 62.5 * _T, "float32": 31.2 * _T,
                   "int8": 250 * _T, "bandwidth": 600 * _G},
    # NVIDIA L4 datasheet, halved: its tensor figures are printed with sparsity.
    "NVIDIA L4": {"bfloat16": 121 * _T, "float16": 121 * _T, "tf32": 60 * _T, "float8": 242.5 * _T,
                  "float32": 30.3 * _T, "int8": 242.5 * _T, "bandwidth": 300 * _G},
    # NVIDIA L40S datasheet, dense column.
    "NVIDIA L40S": {"bfloat16": 362 * _T, "float16": 362 * _T, "tf32": 183 * _T, "float8": 733 * _T,
                    "float32": 91.6 * _T, "int8": 733 * _T, "bandwidth": 864 * _G},
    # NVIDIA T4 datasheet; no bfloat16 tensor cores.
    "Tesla T4": {"float16": 65 * _T, "float32": 8.1 * _T, "int8": 130 * _T, "bandwidth": 320 * _G},
    "Tesla V100-SXM2-16GB": _volta(125 * _T, 15.7 * _T),
    "Tesla V100-SXM2-32GB": _volta(125 * _T, 15.7 * _T),
    "Tesla V100-PCIE-16GB": _volta(112 * _T, 14 * _T),
    "Tesla V100-PCIE-32GB": _volta(112 * _T, 14 * _T),
    # NVIDIA GA102 white paper, appendix: FP16/BF16 tensor with FP32 accumulation.
    "NVIDIA GeForce RTX 3090": {"bfloat16": 71 * _T, "float16": 71 * _T, "tf32": 35.6 * _T, "float32": 35.6 * _T,
                                "bandwidth": 936 * _G},
    # NVIDIA Ada white paper, appendix: tensor figures with FP32 accumulation.
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165.2 * _T, "float16": 165.2 * _T, "tf32": 82.6 * _T,
                                "float8": 330.3 * _T, "float32": 82.6 * _T, "bandwidth": 1008 * _G},
    # AMD Instinct MI300X data sheet, dense.
    "AMD Instinct MI300X": {"bfloat16": 1307.4 * _T, "float16": 1307.4 * _T, "tf32": 653.7 * _T,
                            "float8": 2614.9 * _T, "float32": 163.4 * _T, "bandwidth": 5300 * _G},
}  # fmt: skip


def datasheet_peak(device_name: str | None, dtype: str) -> float | None:
    """Dense peak in FLOP/s of exactly this device and dtype ("float32", "bfloat16", "tf32" …), else None."""
    return DATASHEETS.get(device_name or "", {}).get(dtype) if dtype != "bandwidth" else None


def datasheet_bandwidth(device_name: str | None) -> float | None:
    """Memory bandwidth in bytes/s of exactly this device, else None."""
    return DATASHEETS.get(device_name or "", {}).get("bandwidth")
