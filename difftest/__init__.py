"""Differential tests: generated batches, byte comparison, and what proves kernels/ equal to reference/."""
