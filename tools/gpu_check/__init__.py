"""`bash scripts/gpu_check.sh`: what of slimrl works on this machine's GPUs, as one table and one JSON file.

`table.py` says what is checked, `checks_*.py` check it, each in a process of its own (`child.py`), `runner.py` starts
these one after another, `report.py` writes the results down. This process and everything it imports need nothing
outside the standard library. docs/gpu-check.md explains every row.
"""
