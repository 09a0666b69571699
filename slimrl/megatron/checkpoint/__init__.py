"""Training checkpoints, written atomically."""
