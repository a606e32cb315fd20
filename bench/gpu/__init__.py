"""The parts of `bench.h200`: random checkpoints of real shapes, and what measures the server and its peers on a GPU."""
