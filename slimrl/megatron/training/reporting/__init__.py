"""What a training rank measures and writes down: metrics, memory, profiles, dumps."""
