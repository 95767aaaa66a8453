"""Load on a server with OpenAI's interface: requests drawn from a seed, sent at a rate, and what came back when."""

from tilewright.bench.load.run import Record, measure
from tilewright.bench.load.summary import summarise
from tilewright.bench.load.workload import Range, Workload

__all__ = ["Range", "Record", "Workload", "measure", "summarise"]
