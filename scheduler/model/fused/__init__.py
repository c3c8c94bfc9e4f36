"""A step of whole decoder layers on a CPU, in one parallel region: see `stack.py`."""
