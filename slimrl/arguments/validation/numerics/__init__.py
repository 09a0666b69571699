"""Rules about how numbers are computed: fused kernels, and equality between trainer and engines."""
