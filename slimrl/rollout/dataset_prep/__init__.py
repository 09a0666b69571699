"""Converts published datasets to the rows that `--prompt-data` reads."""
