"""Training on one rank: takes batches, runs optimizer steps, returns metrics."""
