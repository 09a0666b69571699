"""Fully asynchronous generation, bounded by staleness."""
