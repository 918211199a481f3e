"""What a canary costs vLLM."""
