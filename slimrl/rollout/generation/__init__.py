"""From a pending sample to a finished, scored one."""
