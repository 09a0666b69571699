"""Ray: GPU placement, train workers, the rollout manager, and their supervision."""
