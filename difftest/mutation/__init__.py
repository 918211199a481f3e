"""Does anybody notice? Mutants of kernels and references, and bugs planted on purpose, against the generated calls."""
