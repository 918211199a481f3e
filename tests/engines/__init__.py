"""Tests of the engine adapters; a package, so that they share `scenarios`."""
