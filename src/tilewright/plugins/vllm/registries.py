"""Enters classes into vLLM's registries, once, and never over those of others."""

from typing import Any

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tilewright.log import logger

ATTENTION = "TILEWRIGHT"


def replace_op(own: type, theirs: type) -> None:
    """Have `own`, a subclass of vLLM's op `theirs`, made wherever vLLM makes that one.

    It keeps the name by which `custom_ops` enables the op, as in "+rms_norm".
    """
    known: Any = op_registry_oot.get(theirs.__name__)
    if known is None:
        CustomOp.register_oot(own, name=theirs.__name__)
        own.name = getattr(theirs, "name", theirs.__name__)  # type: ignore[attr-defined]
    elif known is not own:
        logger.info("vLLM's %s is replaced by %s.%s already", theirs.__name__, known.__module__, known.__qualname__)


def register_attention() -> None:
    """Have `--attention-backend TILEWRIGHT`."""
    if ATTENTION not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION, "tilewright.plugins.vllm.attention.TilewrightAttentionBackend")
