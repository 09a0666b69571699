"""From rows of data sets to groups of samples, resumable."""
