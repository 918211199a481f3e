"""The adapter for vLLM: a plugin that its workers load, see `plugin`."""
