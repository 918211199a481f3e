"""The canary's cost in a fast engine: SGLang's own scheduler, with no canary, ours and SGLang's, by turns."""
