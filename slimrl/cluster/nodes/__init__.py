"""The nodes of a run: what they must have in common (`comparison`), whether they answer (`watch`), and their `logs`."""
