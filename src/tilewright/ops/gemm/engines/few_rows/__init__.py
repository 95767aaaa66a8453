"""The parts of `few_rows_cuda.py`: what a config costs, and the launches with scales and with groups."""
