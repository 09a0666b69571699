"""Filters that a rollout can be given by import path."""
