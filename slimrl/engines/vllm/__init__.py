"""vLLM's server in an environment of its own, with slimrl's calls added to it (`environment/`)."""
