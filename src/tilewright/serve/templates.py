"""A chat as the model's template writes it."""

import inspect
from typing import Any

from tilewright.errors import InputError
from tilewright.serve.protocol import ChatRequest


def tokens_of(tokenizer: Any, name: str, body: ChatRequest) -> list[int]:
    """Tokens of the chat up to where the answer begins.   name: of the model, in errors.

    Raises InputError for a model without a template, for a chat that its template refuses, and for
    `chat_template_kwargs` that are no variables of a template: another template, or another form of the result.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{name} has no chat template; use /v1/completions.")
    variables = body.chat_template_kwargs or {}
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
    if wrong := sorted(arguments & variables.keys()):
        raise InputError(f"chat_template_kwargs has {', '.join(wrong)}; it takes variables of the template alone.")
    try:
        encoded = tokenizer.apply_chat_template(
            [message.model_dump(exclude_none=True) for message in body.messages],
            tools=body.tools if body.tool_choice != "none" else None,
            add_generation_prompt=True,
            return_dict=True,
            **variables,
        )
    except Exception as error:  # a template is a program of the model's: it says what it does not take
        raise InputError(f"the chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])
