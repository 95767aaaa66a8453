"""Several engines behind one port, each a copy of the model on a GPU of its own, on one machine or many: Ray Serve.

    pip install 'tilewright[serve]' 'ray[serve]'
    python examples/ray_serve.py path/to/model --replicas 8            # all on this machine
    RAY_ADDRESS=head:6379 python examples/ray_serve.py ... --replicas 32   # on the machines of a Ray cluster

Every replica is the application of `tilewright serve`. Ray's proxy sends a request to the one of two replicas that has
fewer open, replaces a replica whose engine has stopped, and asks each to finish its requests before it ends.
SIGINT or SIGTERM ends them all.
"""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

APPLICATION = "tilewright"
MOST_OPEN = 1024  # requests of a replica; Ray's default of 5 would leave an engine without a batch
SECONDS = 30.0  # for running requests, at the end


def builder(model: str, name: str, device: str, api_key: str | None) -> Callable[[], Any]:
    """A function that makes the application, in the process of a replica."""

    def build() -> Any:
        from tilewright import Engine, patch
        from tilewright.assistant import load
        from tilewright.serve import create_app

        loaded = load.load(model, device=device)
        if device != "cpu":
            patch(loaded.model)
        engine = Engine(loaded.model, loaded.tokenizer, max_batch=64)
        engine.warmup()
        app = create_app(engine, name, api_key=api_key, max_waiting=MOST_OPEN)
        app.state.engine = engine
        return app

    return build


class Replica:
    """What Ray asks of a replica beside requests."""

    app: Any  # the application, which `serve.ingress` builds

    def check_health(self) -> None:
        """Raise if the engine has stopped: Ray starts another replica then."""
        if not self.app.state.engine.is_alive:
            raise RuntimeError("the engine stopped")


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face model folder, at the same path on every machine")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--name", help="the model's name for clients; default: the folder's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--api-key-file", type=Path)
    given = parser.parse_args()

    import ray
    from ray import serve

    key = given.api_key_file.read_text().strip() if given.api_key_file else None
    model = str(Path(given.model).resolve())
    build = builder(model, given.name or Path(model).name, given.device, key)
    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        num_replicas=given.replicas,
        ray_actor_options={"num_gpus": 0 if given.device == "cpu" else 1},
        max_ongoing_requests=MOST_OPEN,
        graceful_shutdown_timeout_s=SECONDS,
    )
    ended = signal.SIGINT, signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)  # also for Ray's own processes and threads: they end with us
    ray.init()
    serve.start(http_options={"host": given.host, "port": given.port})
    serve.run(deployment.bind(), name=APPLICATION, route_prefix="/")
    print(f"{given.replicas} replicas are ready: http://{given.host}:{given.port}", flush=True)
    signal.sigwait(ended)
    serve.delete(APPLICATION)  # while the proxy still carries what replicas finish
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
