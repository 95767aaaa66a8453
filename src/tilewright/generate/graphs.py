"""Capture a decode step once, replay it once a token.

A graph records launches with fixed addresses, so everything a step reads or writes across replays is allocated before
the capture; what it allocates itself lives in a memory pool that all graphs of one decoder share, since they never
run together.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from tilewright.errors import BackendError
from tilewright.hardware.graph_capture import captured
from tilewright.log import logger


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
        """Warm `step` up and record it. `rewind` resets the state that a step advances to a valid start.

        Raises BackendError if the step fails, or synchronises or does anything else that a graph cannot record; an
        OutOfMemoryError stays one.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                rewind()
                step()  # compiles kernels, creates library handles, fills the allocator
                rewind()
                with _no_waiting():
                    step()
                rewind()
            with captured(
                graph,
                self._device,
                stream=self._stream,
                pool=self._pool,
                error_mode="thread_local",
                generators=[self._generator],
            ):
                step()
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
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
        """Drop every graph, and with the last one its memory; a freed pool must not be used again."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make waiting for the GPU an error inside the block.

    A step that waits is detected before a capture that it would end. The switch is global: during one step it also
    affects other threads.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # torch: "a prototype", said once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
