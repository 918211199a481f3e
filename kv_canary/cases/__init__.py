"""Calls of ops as data: packed, compared, saved in files and loaded from them."""
