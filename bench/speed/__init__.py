"""The speed of the ops, case by case, beside the floors that memory sets and beside a peer: `kv-canary bench`."""
