"""Triton kernels, guarded: importing this package needs no Triton."""
