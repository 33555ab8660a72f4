"""`taser serve`: a trained retriever over HTTP."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import pathlib

from taser_jax.retriever import Retriever
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import logger

TOKEN = "TASER_TOKEN"
# Connections that wait to be accepted, and seconds that a drained server waits for answers.
_BACKLOG, _DRAIN_SECONDS = 2048, 30


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, and how it computes.

    Attributes:
        host: address; one that other machines reach needs a token in the variable TASER_TOKEN.
        port: port; 0 takes a free one.
        max_batch: queries in one call of the model.
        max_connections: connections at the same time; more are answered by 503.
        log_queries: whether queries are logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    max_connections: int = 12_000
    log_queries: bool = False


def serve(*, directory: str, options: ServeOptions = ServeOptions()) -> None:
    """Answers searches over HTTP until it gets SIGTERM or Ctrl-C; reads its files again on SIGHUP.

    `POST /search`, `POST /v1/embeddings` (OpenAI's), `GET /healthz`, `/readyz`, `/metrics`, and a
    search page at `/`: docs/serving.md.

    Args:
        directory: of a finished `taser compare` or `taser quickstart`: one with retriever.json.
        options: where it listens, and how it computes.

    Raises:
        ConfigError: an address that others reach without a token, no retriever there, or the extra
            `serve` is not installed.
    """
    token = os.environ.get(TOKEN) or None
    if token is None and not _is_loopback(options.host):
        problem = f"{options.host} can be reached from other machines, and no token is set"
        fix = f"set {TOKEN} to a secret, which clients send as a bearer token; or use 127.0.0.1"
        raise ConfigError(problem, where="ServeOptions.host", fix=fix)
    try:
        import uvicorn

        from taser_jax.serving.app import Server
        from taser_jax.serving.engine import Engine, Limits, powers_of_two
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed", where="taser serve", fix=how_to_install("serve")
        ) from None
    place = pathlib.Path(directory)
    engine = Engine(lambda: Retriever.load(place), warm_batches=powers_of_two(options.max_batch))
    limits = Limits(options.max_batch)
    server = Server(engine, limits=limits, token=token, log_queries=options.log_queries)
    logger.info(
        "%s passages at http://%s:%d", f"{len(engine.retriever):,}", options.host, options.port
    )
    uvicorn.run(
        server.app,
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        limit_concurrency=options.max_connections,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        server_header=False,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
