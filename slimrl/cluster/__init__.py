"""Ray: GPUs, train workers, the rollout manager, and the watch over all of them."""
