"""Measuring: paired timing, calibrated ceilings, and benchmark suites made from the ops' contracts.

`timing` and `graph` time callables, `calibrate` measures what this machine can do, `suite` runs every implementation
of an op against every available peer and `report` renders committed results. No op is named in this package.
"""
