"""Checkpoints of training: complete or absent."""
