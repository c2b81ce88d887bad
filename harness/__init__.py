"""Accuracy regression gate for served language models: config, server, questions, verdict, record."""

__all__ = ["__version__"]
__version__ = "0.1.0"
