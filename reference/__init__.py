"""One pure-PyTorch implementation per op: the meaning of the op, readable first."""
