"""One Triton implementation per op, equal to the reference to the byte.

Masks are negated by `== 0`: the interpreter of Triton 3.2, the oldest that is supported, has no `~`.
"""
