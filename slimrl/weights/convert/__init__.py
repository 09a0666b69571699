"""Hugging Face folders and torch_dist checkpoints, both ways."""
