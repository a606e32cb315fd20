"""The one error that ends a benchmark: a figure from a run with a failed request would be worth nothing."""

from __future__ import annotations


class BenchError(RuntimeError):
    """A tool is not to be had, a request failed, or a result does not add up."""
