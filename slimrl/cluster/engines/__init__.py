"""Engines and router of a run: start, health, recovery, reward servers."""
