"""Longer implementations that the variants of each axis refer to."""
