"""One Triton implementation per op, equal to the reference to the byte."""
