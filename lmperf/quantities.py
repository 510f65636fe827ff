"""Quantities as a person reads them: ratios, percents, bytes, seconds, rates; nothing measured is a dash."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> float | None:
    """A table's cell as a finite number, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def show_ratio(value: Any, digits: int = 3) -> str:
    """1.234 as "1.23×"; nothing as a dash."""
    number = finite(value)
    return "–" if number is None else f"{number:.{digits}g}×" if number < 100 else f"{number:,.0f}×"


def show_short(value: Any) -> str:
    """A table's text: numbers to four digits, nothing as a dash, other text as it is."""
    number = finite(value)
    return str(value or "–") if number is None else f"{number:.4g}"


def show_percent(value: Any, digits: int = 1) -> str:
    """0.0123 as "1.2 %"."""
    number = finite(value)
    return "–" if number is None else f"{100 * number:.{digits}f} %"


def show_bytes(value: Any) -> str:
    """Bytes in the binary unit that reads best."""
    number = finite(value)
    if number is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    return "–"


def show_count(value: Any) -> str:
    """A whole number with separators."""
    number = finite(value)
    return "–" if number is None else f"{number:,.0f}"


def show_quantity(value: Any, unit: str | None) -> str:
    """A value in a readable multiple of its unit: seconds, bytes, rates; a share as percent."""
    number = finite(value)
    if number is None:
        return "–"
    if unit == "share":
        return show_percent(number)
    if unit == "bytes":
        return show_bytes(number)
    if unit == "s":
        for scale, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if number * scale >= 0.9995 or name == "µs":  # 999.5 would read 1e+03 with three digits
                return f"{number * scale:.3g} {name}"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale and unit:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit or ''}".strip()


def show_fixed(value: Any, digits: int) -> str:
    """A number with a fixed count of decimals."""
    number = finite(value)
    return "–" if number is None else f"{number:.{digits}f}"
