"""Job files of cluster schedulers for a recipe; `tools/launch.py` is the command."""
