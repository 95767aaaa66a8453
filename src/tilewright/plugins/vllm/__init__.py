"""Our ops in vLLM: the entry point `vllm.general_plugins`, which vLLM calls in every process that it starts.

    norms, activations, rotary embeddings   in place of vLLM's classes of the same name, wherever its option
                                            `custom_ops` has these ops enabled
    attention                               --attention-backend TILEWRIGHT
    linear layers                           --quantization tilewright, or tilewright_fp8

So nothing changes where none of these options is given and vLLM compiles its models, which is its default:
`custom_ops` is "none" then.  `functions` computes, and knows nothing of vLLM; the other modules import it.
"""

from tilewright.log import logger

VERSION = "0.33"
"""The release of vLLM whose interfaces the modules beside this one are written for."""


def register() -> None:
    """Enter our classes into vLLM's registries; a second call changes nothing.

    A name that another plug-in has taken stays that plug-in's, with a line in the log.  Where vLLM has other interfaces
    nothing is entered, with a warning: vLLM would not start if this raised.
    """
    try:
        from tilewright.plugins.vllm import attention as attention  # vLLM imports it by name, later
        from tilewright.plugins.vllm import layers, linear, registries
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("vLLM runs without tilewright's kernels, which are written for vLLM %s: %s", VERSION, error)
        return
    layers.register()
    linear.register()
    registries.register_attention()
