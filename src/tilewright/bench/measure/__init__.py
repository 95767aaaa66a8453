"""One case: check all contestants, time them and the floor in the same rounds, check again, make the row."""

from tilewright.bench.measure.case import Measured, compile_all, measure
from tilewright.bench.measure.shared import Effort, Shared

__all__ = ["Effort", "Measured", "Shared", "compile_all", "measure"]
