"""Counterparts of slime's modules for custom functions written for slime; the table is in `slime`."""
