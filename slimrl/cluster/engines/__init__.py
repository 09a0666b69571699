"""Engines and router of a run: start, health checks, recovery, reward servers."""
