"""A backend of Triton's for the CPU that compiles nothing: its kernels run in Triton's interpreter.

vLLM's model runner V2 asks for an active backend, and would run without a GPU; Triton has none for CPUs. This one is
active where TRITON_INTERPRET is 1, in which case nothing is ever compiled.
"""
