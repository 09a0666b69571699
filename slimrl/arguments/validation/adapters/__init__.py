"""Rules about weights that are trained beside those of the model."""
