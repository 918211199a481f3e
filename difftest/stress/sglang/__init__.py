"""A real SGLang scheduler in this process: its faults before two canaries, and the adapter on a GPU."""
