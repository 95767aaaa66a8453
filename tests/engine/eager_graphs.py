"""Stands for CUDA graphs of steps on a CPU."""

from tilewright.errors import BackendError


class EagerGraphs(dict):
    """A replay computes the step that was captured, of its padded shape.   captures: whether a step can be."""

    def __init__(self, captures=lambda step: True):
        super().__init__()
        self.captures = captures

    def capture(self, key, step, rewind):
        if not self.captures(key):
            raise BackendError("this step waits")
        step()
        self[key] = step

    def replay(self, key):
        self[key]()
