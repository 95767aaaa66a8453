"""Enters classes into vLLM's registries, once, and never over those of others."""

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tilewright.log import logger

ATTENTION = "TILEWRIGHT"


def replace_op(replacement: type, original: type) -> None:
    """Have `replacement`, a subclass of vLLM's op `original`, made wherever vLLM makes that one.

    It keeps the name by which `custom_ops` enables the op, as in "+rms_norm".
    """
    name, holder = original.__name__, op_registry_oot.get(original.__name__)
    if holder is None:
        CustomOp.register_oot(replacement, name=name)
        replacement.name = getattr(original, "name", name)  # type: ignore[attr-defined]
    elif holder is not replacement:
        logger.info("vLLM's %s is replaced by %s.%s already", name, holder.__module__, holder.__qualname__)


def register_attention() -> None:
    """Have `--attention-backend TILEWRIGHT`."""
    if ATTENTION not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION, "tilewright.plugins.vllm.attention.TilewrightAttentionBackend")
