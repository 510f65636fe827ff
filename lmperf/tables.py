"""Tables on disk: CSV with empty cells for what was not measured, parquet with fixed types, schema versions."""

from __future__ import annotations

import csv
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lmperf.records import RESULT_COLUMNS, SCHEMA_VERSION, InputError, atomic_write, read_json, write_json

TABLES = tuple(
    f"{name}.csv"
    for name in (
        "results",
        "ablation",
        "attention",
        "claims",
        "hotspots",
        "ladder",
        "precision",
        "quality",
        "utilisation",
        "warmup",
    )
)
NUMBERS = ("value", "baseline_value", "ratio", "ci_low", "ci_high", "noise_floor", "mde")
RESULT_TYPES = {
    name: pa.float64() if name in NUMBERS else pa.int64() if name == "rounds" else pa.string()
    for name in RESULT_COLUMNS
}


def clean(value: Any) -> Any:
    """A cell's value as Python: None for what was not measured, since NaN and infinity are never written."""
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Integral)):
        return float(value) if math.isfinite(value) else None
    return value


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A data frame of just these columns in this order, object typed, so that None stays None."""
    cleaned = [[clean(row.get(column)) for column in columns] for row in rows]
    return pd.DataFrame(cleaned, columns=list(columns), dtype=object)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a data frame as dicts with None for missing cells, whatever its types."""
    return [{key: clean(value) for key, value in row.items()} for row in table.to_dict("records")]


def write_csv(table: pd.DataFrame, path: Path | str) -> pd.DataFrame:
    """Write a table as CSV (None is an empty cell), note its schema version beside it, and hand it back."""
    path = Path(path)
    with atomic_write(path) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([["" if clean(v) is None else v for v in row] for row in table.itertuples(index=False)])
    _note_schema(path)
    return table


def _note_schema(path: Path) -> None:
    """Keep schemas.json beside the tables; all known names at once, so that parallel jobs write the same."""
    versions = path.parent / "schemas.json"
    known = read_json(versions) if versions.exists() else {}
    wanted = {**dict.fromkeys(TABLES, SCHEMA_VERSION), **known, path.name: SCHEMA_VERSION}
    if known != wanted:
        write_json(versions, wanted)


def write_results(rows: Sequence[Mapping[str, Any]], out_tables: Path, results_parquet: Path) -> pd.DataFrame:
    """Write results.csv and results.parquet with exactly RESULT_COLUMNS and fixed types."""
    table = frame(rows, RESULT_COLUMNS)
    fields = [pa.field(name, kind) for name, kind in RESULT_TYPES.items()]
    schema = pa.schema(fields, metadata={"lmperf.schema": str(SCHEMA_VERSION)})
    columns = {name: pa.array(table[name].tolist(), kind) for name, kind in RESULT_TYPES.items()}
    with atomic_write(results_parquet, "wb") as stream:
        pq.write_table(pa.table(columns, schema=schema), stream)
    return write_csv(table, Path(out_tables) / "results.csv")


def read_results(path: Path | str) -> pd.DataFrame:
    """Read results.parquet back as the frame that `compare` handed out; a foreign schema is an `InputError`."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not readable as parquet ({error})") from None
    version = (table.schema.metadata or {}).get(b"lmperf.schema", b"none").decode()
    if version != str(SCHEMA_VERSION) or tuple(table.column_names) != RESULT_COLUMNS:
        raise InputError(
            f"{path}: schema {version} with columns {table.column_names}; allowed: schema {SCHEMA_VERSION}"
        )
    return frame(table.to_pylist(), RESULT_COLUMNS)


def read_csv(path: Path | str) -> list[dict[str, str | None]]:
    """The rows of a table as text, None for empty cells; a missing file gives no rows."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        return [{key: value or None for key, value in row.items()} for row in csv.DictReader(stream)]
