"""How a step is executed: compilation, recomputation, activations kept in a file or in host memory."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from functools import partial
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmperf.recipe import BuildContext


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model; `NotImplementedError` for a model that does not keep them in `blocks`."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise NotImplementedError(f"{type(model).__name__} has no list `blocks` of layers to work on one by one")
    return blocks


def compile_whole(model: nn.Module, context: BuildContext, *, mode: str | None = None) -> nn.Module:
    """Compile the whole forward pass in place (the backward pass follows), with one of `torch.compile`'s modes."""
    model.compile(mode=mode)
    return model


def compile_blocks(model: nn.Module, context: BuildContext) -> nn.Module:
    """Compile each layer by itself, in place: layers share the compiled code, so that it is made once."""
    for block in blocks_of(model):
        block.compile()
    return model


def recompute(model: nn.Module, context: BuildContext, *, every: int) -> nn.Module:
    """Keep only the inputs of every `every`-th layer and run it again in the backward pass (Chen et al. 2016)."""
    for block in list(blocks_of(model))[::every]:
        # The method of this one object: names of parameters stay as they are.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Offload:
    """Saved activations leave their memory in forward and come back in backward (Ren et al. 2021 move more than that).

    From an accelerator they go to pinned host memory.  On a CPU there is no other memory than a file: one unnamed
    temporary file, written over by every step.  Small tensors and weights stay where they are.
    """

    SMALLEST_BYTES = 64 * 1024

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def pack(self, tensor: Tensor) -> Any:
        """The tensor itself when it stays, else its place: (device, host copy) or (offset, description)."""
        if not offloads(tensor, self.SMALLEST_BYTES):
            return tensor
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return tensor.device, host.copy_(tensor.detach(), non_blocking=True)
        return self._write(tensor.detach().contiguous())

    def _write(self, dense: Tensor) -> tuple[int, Tensor]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lmperf-activations-", buffering=0)
        start, self._end = self._end, self._end + dense.numel() * dense.element_size()
        self._file.seek(start)
        self._file.write(memoryview(dense.flatten().view(torch.uint8).numpy()))
        return start, torch.empty_like(dense, device="meta")

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, in new memory when it was away."""
        if isinstance(packed, Tensor):
            return packed
        place, held = packed
        return self._read(place, held) if held.is_meta else held.to(place, non_blocking=True)

    def _read(self, start: int, like: Tensor) -> Tensor:
        raw = np.empty(like.numel() * like.element_size(), dtype=np.uint8)
        self._file.seek(start)
        if self._file.readinto(memoryview(raw)) != len(raw):
            raise OSError(f"the activation file ends before byte {start + len(raw)}")
        return torch.from_numpy(raw).view(like.dtype).view(like.shape)

    def __call__(self) -> AbstractContextManager[Any]:
        """A context around one forward and backward pass."""
        self._end = 0
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def offloads(tensor: Tensor, smallest_bytes: int) -> bool:
    """Whether a saved tensor is large enough to be moved, and no weight or view of one (autocast's copies move)."""
    base = tensor if tensor._base is None else tensor._base
    return not isinstance(base, nn.Parameter) and tensor.numel() * tensor.element_size() >= smallest_bytes
