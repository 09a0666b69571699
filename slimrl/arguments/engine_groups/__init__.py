"""Groups of engines: the file of --sglang-config, and what follows from it for each engine."""
