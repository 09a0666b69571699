"""Model descriptions: sizes, parameter counts, FLOPs, activation memory, tensor names."""
