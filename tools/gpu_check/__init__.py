"""`bash scripts/gpu_check.sh`: checks slimrl on this machine's GPUs; prints one table and writes one JSON file.

`table.py` lists the checks and the files of `checks/` implement them; `runner.py` runs one after another, each in a
separate process (`child.py`), and `report.py` writes the results. The main process uses the standard library only.
docs/gpu-check.md explains every row.
"""
