"""Capture a decode step once, replay it once a token.

A graph records launches with fixed addresses, so everything a step reads or writes across replays is allocated before
the capture; what it allocates itself lives in a memory pool that all graphs of one decoder share, since they never
run together.
"""

from collections.abc import Callable, Hashable

import torch

from tilewright.errors import BackendError
from tilewright.log import logger

_WARM_UPS = 2  # the first run compiles kernels and creates library handles, the second proves that it is steady


class StepGraphs:
    """Captured steps by key, captured on first request."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        self._generator = generator
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: Hashable, step: Callable[[], None], rewind: Callable[[], None]) -> None:
        """Warm `step` up and record it. `rewind` puts the state that a step advances back to a valid start.

        Raises BackendError when the step does what a graph cannot record, such as waiting for the GPU.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                rewind()
                step()
            rewind()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            raise BackendError(
                f"the decode step cannot be captured as a CUDA graph: {error}. "
                "Use StaticDecoder(model, graphs=False), or model.generate()."
            ) from error
        finally:
            current.wait_stream(self._stream)
        self._graphs[key] = graph
        logger.debug("captured decode step %s", key)

    def replay(self, key: Hashable) -> None:
        """Queue one step on the current stream."""
        self._graphs[key].replay()

    def clear(self) -> None:
        """Drop every graph; the pool's memory goes back when the last one is gone."""
        self._graphs.clear()
