"""Benchmarks, and the comparison with peers."""
