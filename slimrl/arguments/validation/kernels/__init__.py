"""Rules about kernels of training on GPUs."""
