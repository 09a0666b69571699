"""Rules about the inference engines of the rollout."""
