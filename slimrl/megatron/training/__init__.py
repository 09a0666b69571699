"""One rank of training: batches in, optimizer steps and metrics out."""
