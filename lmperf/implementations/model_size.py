"""What a compressed model takes: bytes in memory, bytes on disk in a plain format, dense and effective FLOPs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmperf.records import InputError, atomic_write

#: bfloat16 has no NumPy type: it is written as its bits.
_BITS = {torch.bfloat16: torch.int16}
_NAMES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    + (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a model consists of, once (tied ones under their first name), packed layers by `tensors()`."""
    seen: dict[int, Tensor] = {}  # the tensors are held, so that no number is given twice
    for path, module in model.named_modules():
        own: dict[str, Any] = (
            module.tensors() if hasattr(module, "tensors") else {**module._parameters, **module._buffers}
        )
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in seen:
                seen[id(tensor)] = tensor
                yield f"{path}.{name}".lstrip("."), tensor.detach()


def memory_bytes(model: nn.Module) -> int:
    """Bytes of all weights, scales and buffers in memory."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in stored_tensors(model))


def write_weights(model: nn.Module, path: Path) -> int:
    """Write all tensors to `path` and return its size in bytes.

    One JSON line (name, dtype, shape, encoding of each tensor), then the raw little-endian values.  A tensor with
    enough zeros is written as one bit an element and its other values ("bitmap"), so that a mask saves on disk.
    """
    header, chunks = [], []
    for name, tensor in stored_tensors(model):
        encoding, data = _encode(tensor.cpu())
        kind = str(tensor.dtype).removeprefix("torch.")
        entry = {"name": name, "dtype": kind, "shape": list(tensor.shape), "encoding": encoding, "bytes": len(data)}
        header.append(entry)
        chunks.append(data)
    with atomic_write(path, "wb") as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        stream.writelines(chunks)
    return path.stat().st_size


def _encode(tensor: Tensor) -> tuple[str, bytes]:
    values = tensor.contiguous().view(_BITS.get(tensor.dtype, tensor.dtype)).numpy().ravel()
    kept = values != 0
    if values.size / 8 + kept.sum() * values.itemsize < 0.95 * values.nbytes:
        return "bitmap", np.packbits(kept).tobytes() + values[kept].tobytes()
    return "dense", values.tobytes()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `write_weights` wrote, by name."""
    head, _, body = path.read_bytes().partition(b"\n")
    found, offset = {}, 0
    for entry in json.loads(head):
        if entry["dtype"] not in _NAMES:
            raise InputError(f"{path}: dtype {entry['dtype']!r} is unknown; allowed: {', '.join(_NAMES)}")
        data = body[offset : offset + entry["bytes"]]
        found[entry["name"]] = _decode(entry, data)
        offset += entry["bytes"]
    return found


def _decode(entry: dict[str, Any], data: bytes) -> Tensor:
    dtype = _NAMES[entry["dtype"]]
    plain = torch.empty(0, dtype=_BITS.get(dtype, dtype)).numpy().dtype
    if entry["encoding"] == "dense":
        values = np.frombuffer(data, dtype=plain).copy()
    else:
        size = int(np.prod(entry["shape"]))
        split = (size + 7) // 8
        kept = np.unpackbits(np.frombuffer(data[:split], dtype=np.uint8), count=size).astype(bool)
        values = np.zeros(size, dtype=plain)
        values[kept] = np.frombuffer(data[split:], dtype=plain)
    return torch.from_numpy(values).view(dtype).reshape(entry["shape"])


def linear_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The (n, k) weights of all linear layers as plain tensors, int8 ones expanded."""
    for path, module in model.named_modules():
        if hasattr(module, "dense_weight"):
            yield path, module.dense_weight()
        elif isinstance(module, nn.Linear):
            yield path, module.weight.detach()


def token_flops(model: nn.Module, *, past: int, effective: bool) -> float:
    """FLOPs to decode one token after `past` others: 2 a weight of blocks and head, 4·d_model a cached token and layer.

    `effective` counts only weights that are not zero: what a kernel that skips zeros would do; the dense count is
    what a masked matrix product really does.
    """
    head = model.head_weight[: model.shape.vocab_size]
    weights = [weight for path, weight in linear_weights(model) if path != "head"] + [head]
    counted = sum(int(weight.count_nonzero()) if effective else weight.numel() for weight in weights)
    return 2.0 * counted + 4.0 * model.shape.layers * model.shape.d_model * (past + 1)
