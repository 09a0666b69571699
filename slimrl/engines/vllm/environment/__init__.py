"""Modules that run inside vLLM's environment, as top-level modules; slimrl itself imports none of them."""
