"""Another memory allocator, chosen by environment variables that are set before Python starts."""

from __future__ import annotations

import ctypes.util
import os
from functools import lru_cache

#: In this order: the first one that is installed is preloaded.
LIBRARIES = ("tcmalloc", "tcmalloc_minimal", "jemalloc")


@lru_cache(maxsize=1)
def installed_allocator() -> str | None:
    """The shared library of tcmalloc or jemalloc that the loader knows (e.g. "libtcmalloc.so.4"), or None."""
    return next((found for name in LIBRARIES if (found := ctypes.util.find_library(name))), None)


def allocator_environment() -> dict[str, str]:
    """Variables that change the allocator and nothing else.

    CPU: LD_PRELOAD of tcmalloc or jemalloc, else glibc's transparent huge pages (all arms already share the same
    MALLOC_* settings).  CUDA: segments that grow in place, against fragmentation.
    """
    library = installed_allocator()
    if library is None:
        chosen = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    else:
        chosen = {"LD_PRELOAD": ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))}
    return {**chosen, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
