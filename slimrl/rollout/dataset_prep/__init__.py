"""Published data sets, from the layouts they are published in to the rows that `--prompt-data` reads."""
