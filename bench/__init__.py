"""Measurements of a running server: `bench.perf` with the usual load generators, `bench.cpu` beside transformers."""
