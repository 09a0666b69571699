"""All training ranks of a run as one group."""
