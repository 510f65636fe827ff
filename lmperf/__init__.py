"""A reproducible laboratory for language-model performance."""

__version__ = "0.1.0"
