"""One description of a model for everybody: sizes, parameters, FLOPs, activations, tensor names."""
