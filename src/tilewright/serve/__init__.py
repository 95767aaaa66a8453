"""An HTTP server in front of the generation engine, with OpenAI's interface for completions and chats."""

from tilewright.serve.app import create_app
from tilewright.serve.server import serve

__all__ = ["create_app", "serve"]
