"""Arguments of transformers' attention functions that change the result and that ours do not take."""

from typing import Any

from tilewright.errors import InputError

REFUSED = {
    "position_bias": "a position bias",
    "head_mask": "a mask of heads",
    "indices": "indices of keys",
    "block_indices": "indices of blocks",
}


def refuse(kwargs: dict[str, Any]) -> None:
    """Raise InputError for what a call passes and "tilewright" does not apply."""
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise InputError(
                f'attention: the model passes {name}, {what}, which "tilewright" does not apply. Use '
                'set_attn_implementation("sdpa") or "eager".'
            )
    if kwargs.get("output_attentions"):
        raise InputError('attention: weights are never stored. Use set_attn_implementation("eager") for them.')
