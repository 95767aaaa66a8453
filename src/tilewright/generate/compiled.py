"""A decoding step compiled by Inductor: on a CPU, what CUDA graphs are on a GPU.

A small model's step spends most of its time between operations: three hundred calls of PyTorch from Python. Compiled
as one graph it is some forty matrix products and a fused kernel between each two.

The shapes of a step never change: it attends to all `max_length` slots, of which the mask hides the unwritten ones. So
one compilation serves every prompt and every position. Dynamo's guards, which would cost a third of the step, are left
out; the decoder compares `fingerprint`s once a call instead and compiles again where the model changed.
"""

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from tilewright.generate import checks
from tilewright.generate.attention import attention_of
from tilewright.generate.hook import Attachment, attach_generate
from tilewright.generate.sampling import Sampling
from tilewright.generate.static import StaticDecoder
from tilewright.log import logger

_LONGEST = 2048  # slots of a decoder, unless a call needs more: each step reads all of them
_OPTIONS: dict[str, Any] = {
    "guard_filter_fn": lambda guards: [False] * len(guards),
    "compile_threads": 1,  # a pool of workers takes longer to start than these few kernels to compile
    "cpp.vec_isa_ok": True,  # torch has asked the CPU itself; a test program compiled for it says no more
}


class CompiledDecoder(StaticDecoder):
    """A `StaticDecoder` for a CPU whose step is compiled at its first use, in some 20 s."""

    def __init__(self, model: Any, *, max_length: int, batch_size: int = 1) -> None:
        super().__init__(model, max_length=max_length, batch_size=batch_size, graphs=False)
        self._compiled: Callable[[CompiledDecoder], Tensor] | None = None
        self._compiled_for: tuple[object, ...] = ()

    def reset(self) -> None:
        """Forget the compiled step; the next call compiles again."""
        self._compiled = None

    def _prepare(self, prompt_length: int, max_new_tokens: int, sampling: Sampling | None) -> None:
        super()._prepare(prompt_length, max_new_tokens, sampling)
        now = (*checks.fingerprint(self.model), torch.is_autocast_enabled(self.device.type))
        if self._compiled is None or now != self._compiled_for:
            if self._compiled is not None:
                logger.info("the model changed since its decode step was compiled; compiling again")
            self._compiled, self._compiled_for = _compiled_logits(), now

    def _step(self) -> None:
        assert self._compiled is not None  # `_prepare` ran before
        self._cache.cursor.prefilling = False
        with attention_of(self.model, self.attention), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, of code that is not ours
            logits = self._compiled(self)
        self._state.commit(self._choose(logits))

    def _visible(self, position: int) -> int:
        return self.max_length


def attach_compiled(model: Any) -> Attachment:
    """`attach_generate` with a compiled step: the same tokens, one compilation for each batch size."""
    return attach_generate(model, _decoder)


def _decoder(model: Any, batch_size: int, max_length: int) -> CompiledDecoder:
    longest = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    return CompiledDecoder(model, batch_size=batch_size, max_length=max(max_length, min(longest, _LONGEST)))


def _logits(decoder: StaticDecoder) -> Tensor:
    decoder._cache.cursor.locate()
    return decoder._forward(decoder._state.tokens, decoder._masks(), decoder._state.position_ids)


def _compiled_logits() -> Callable[[StaticDecoder], Tensor]:
    """`_logits`, compiled at its first call. Dynamo keys compiled code on the code object, and without guards it would
    run one decoder's code for another: each decoder gets a code object for itself.
    """
    function = FunctionType(_logits.__code__.replace(), globals(), _logits.__name__)
    return torch.compile(function, fullgraph=True, dynamic=False, options=_OPTIONS)
