"""Turns dataset rows into groups of samples, resumable."""
