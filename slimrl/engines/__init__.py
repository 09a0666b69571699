"""The inference engine interface for training and rollouts, and its implementations."""
