"""Runs the application until a signal asks it to end."""

import logging
from typing import Any

from tilewright.engine import Engine
from tilewright.serve.app import create_app


def serve(engine: Engine, name: str, *, host: str = "127.0.0.1", port: int = 8000, **options: Any) -> None:
    """Serve until SIGINT or SIGTERM; then take no new connections, finish what runs for up to 30 s, close the engine.

    options: those of `create_app`.   Raises InputError as it does.
    """
    import uvicorn

    app = create_app(engine, name, **options)
    logging.getLogger("tilewright").info("serving %s on http://%s:%d", name, host, port)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
