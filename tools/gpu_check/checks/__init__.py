"""The checks, one file per part of a machine or of slimrl; `tools.gpu_check.table` lists them."""
