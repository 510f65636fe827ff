"""The data loading axis: where batches come from and who fetches them.

All but `padded` give the same batches in the same order as the baseline for a seed, whatever the workers, the
prefetching or the step at which a run resumes.  The variants combine (small_files with workers_4, say).
"""

from __future__ import annotations

from lmperf.implementations.loaders import with_loader
from lmperf.recipe import Recipe
from lmperf.registry import variant


@variant("dataloader", baseline=True)
def arrow_mmap(recipe: Recipe) -> Recipe:
    """Merged Arrow token shards, memory-mapped, read by the training process itself."""
    return recipe


@variant("dataloader")
def small_files(recipe: Recipe) -> Recipe:
    """Thousands of small text files, opened and tokenised on the fly: the state before merging."""
    return with_loader(recipe, store="small_files")


@variant("dataloader")
def memmap_bin(recipe: Recipe) -> Recipe:
    """One headerless binary file of tokens, mapped by numpy."""
    return with_loader(recipe, store="flat")


@variant("dataloader")
def in_memory(recipe: Recipe) -> Recipe:
    """All tokens copied into the process's memory at the start."""
    return with_loader(recipe, store="memory")


@variant("dataloader", requires=("fork",))
def workers_1(recipe: Recipe) -> Recipe:
    """One worker process fetches the batches."""
    return with_loader(recipe, workers=1)


@variant("dataloader", requires=("fork",))
def workers_2(recipe: Recipe) -> Recipe:
    """Two worker processes fetch the batches."""
    return with_loader(recipe, workers=2)


@variant("dataloader", requires=("fork",))
def workers_4(recipe: Recipe) -> Recipe:
    """Four worker processes fetch the batches."""
    return with_loader(recipe, workers=4)


@variant("dataloader", requires=("fork",))
def prefetch_2(recipe: Recipe) -> Recipe:
    """Two workers, each holding 2 batches ready (PyTorch's own default)."""
    return with_loader(recipe, workers=2, prefetch=2)


@variant("dataloader", requires=("fork",))
def prefetch_8(recipe: Recipe) -> Recipe:
    """Two workers, each holding 8 batches ready."""
    return with_loader(recipe, workers=2, prefetch=8)


@variant("dataloader", requires=("cuda",))
def pin_memory(recipe: Recipe) -> Recipe:
    """Batches land in page-locked memory, from which a device copies asynchronously."""
    return with_loader(recipe, pin=True)


@variant("dataloader", requires=("fork",))
def persistent_workers(recipe: Recipe) -> Recipe:
    """Two workers that live on from epoch to epoch instead of being started again."""
    return with_loader(recipe, workers=2, persistent=True)


@variant("dataloader", fidelity="quality")
def padded(recipe: Recipe) -> Recipe:
    """One stretch of one document a row, filled up with padding, instead of packed windows."""
    return with_loader(recipe, store="padded")


@variant("dataloader")
def shuffle_blocks(recipe: Recipe) -> Recipe:
    """The windows of 32 coming batches are read together in file order, then given out in the seed's order."""
    return with_loader(recipe, read_ahead=32)
