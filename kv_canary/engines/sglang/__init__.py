"""The adapter for SGLang: install kv-canary beside it, set KV_CANARY_MODE, and every scheduler process guards itself.

Nothing of SGLang is patched on disk. `plugin` is what SGLang calls, `hooks` says where the canary is called from,
`session` is the canary of one scheduler process; docs/sglang.md is the guide.
"""
