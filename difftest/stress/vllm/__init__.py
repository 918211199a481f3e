"""Campaigns on a real vLLM, on the CPU."""
