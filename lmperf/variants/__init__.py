"""The variants, one file an axis; each variant is one decorated function from recipe to recipe."""
