"""Tests of the runtime on a hand-made engine; a package, so that they share `engine`."""
