"""The losses of training: sums over a micro-batch that do not depend on how the batch is split."""
