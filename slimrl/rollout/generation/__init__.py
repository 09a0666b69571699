"""Generates and scores samples."""
