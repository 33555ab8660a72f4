"""The HTTP interface: search, embeddings, health, metrics and the search page.

Bodies are checked before anything is computed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import pathlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from taser_jax.retrieval.passages import Hit
from taser_jax.serving.engine import (
    Batcher,
    Engine,
    Limits,
    Metrics,
    QueueFullError,
    Work,
    rounded_k,
)
from taser_jax.storage.errors import TaserError
from taser_jax.storage.progress import logger

PAGE = pathlib.Path(__file__).parent / "search_page.html"
_PASSAGES = "-passage"
_RETRY_SECONDS = 1
# Statuses of requests whose client has gone, and of bodies that arrive too slowly.
_CLIENT_GONE, _TOO_SLOW = 499, 408
MAX_TEXTS, MAX_K, MAX_CHARACTERS = 64, 1000, 20_000

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARACTERS)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]


class SearchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /search`.

    Attributes:
        query: one query, or several.
        k: passages per query.
        task: task whose prompt is used, where tasks differ.
        hybrid: whether BM25's scores are added; None does so where the server has them.
    """

    query: Text | Texts
    k: Annotated[int, msgspec.Meta(ge=1, le=MAX_K)] = 10
    task: str | None = None
    hybrid: bool | None = None


class EmbeddingsRequest(msgspec.Struct):
    """`POST /v1/embeddings`, as OpenAI's clients send it; other fields are ignored.

    Attributes:
        input: one text, or several.
        model: any name; one that ends in "-passage" embeds passages, every other one queries.
        encoding_format: numbers, or their float32 bytes in base64.
        dimensions: must be the model's where given.
    """

    input: Text | Texts
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


_Body = TypeVar("_Body", SearchRequest, EmbeddingsRequest)


class Server:
    """Routes over an engine.

    Args:
        engine: what answers.
        limits: what a request may cost.
        token: bearer token that requests need; None needs none.
        log_queries: whether the texts of queries are logged.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits = Limits(),
        token: str | None = None,
        log_queries: bool = False,
    ) -> None:
        self._engine, self._limits = engine, limits
        self._token, self._log_queries = token, log_queries
        self._metrics = Metrics(lambda: self._batcher.waiting)
        observe = self._metrics.batch_size.observe
        self._batcher = Batcher(engine.compute, limits, observe=observe)
        self._reloading = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop
        page = PAGE.read_text(encoding="utf-8")
        self._page = HTMLResponse(page, headers={"Content-Security-Policy": _policy(page)})
        self.app = Starlette(
            routes=[
                Route("/", self._show_page),
                Route("/search", self._answered(self._search), methods=["POST"]),
                Route("/v1/embeddings", self._answered(self._embed), methods=["POST"]),
                Route("/about", self._answered(self._about)),
                Route("/healthz", self._health),
                Route("/readyz", self._health),
                Route("/metrics", self._answered(self._show_metrics)),
            ],
            lifespan=self._lifespan,
            # Paths and methods that there are not.
            exception_handlers={HTTPException: _refusal},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.start_reload)
        yield
        await self._batcher.stop()

    def start_reload(self) -> None:
        """Reads model and index again beside the requests, then replaces both at once.

        May be called in any thread while the server runs.
        """
        asyncio.run_coroutine_threadsafe(self._reload(), self._loop)

    async def _reload(self) -> None:
        # One after another: each reads what is on disk when its turn comes.
        async with self._reloading:
            if await self._loop.run_in_executor(None, self._engine.reload):
                self._metrics.reloads.inc()

    def _answered(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler with authorisation, metrics, and a JSON message for whatever goes wrong."""

        async def answer(request: Request) -> Response:
            start, path = time.monotonic(), request.url.path
            if not self._is_authorized(request):
                message = "give the server's token: Authorization: Bearer TOKEN"
                response = _error(401, message, headers={"WWW-Authenticate": "Bearer"})
            else:
                response = await self._guarded(handler, request)
            self._metrics.requests.labels(path, str(response.status_code)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - start)
            return response

        return answer

    async def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        try:
            return await handler(request)
        except HTTPException as error:
            return await _refusal(request, error)
        except QueueFullError:
            retry = {"Retry-After": str(_RETRY_SECONDS)}
            return _error(429, "too many requests wait; try again", headers=retry)
        except TimeoutError:
            return _error(_TOO_SLOW, "the body did not arrive in time")
        except ClientDisconnect:
            return _error(_CLIENT_GONE, "the client left")
        except TaserError as error:
            # Of the user's making, such as a task that does not exist.
            return _error(400, str(error))
        except Exception:
            logger.exception("%s failed", request.url.path)
            return _error(500, "the server failed; its log has the cause")

    def _is_authorized(self, request: Request) -> bool:
        if self._token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    async def _body(self, request: Request, kind: type[_Body]) -> _Body:
        """The body as what it should be; refuses one that is not, too large or too slow."""
        body, most = bytearray(), self._limits.max_body
        async with asyncio.timeout(self._limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"a body has at most {most:,} bytes")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, str(error)) from None

    async def _search(self, request: Request) -> Response:
        start = time.monotonic()
        asked = await self._body(request, SearchRequest)
        has_hybrid = self._engine.retriever.has_hybrid
        hybrid = has_hybrid if asked.hybrid is None else asked.hybrid
        if hybrid and not has_hybrid:
            raise HTTPException(400, "no BM25 index beside the model: leave `hybrid` out")
        work = Work("search", asked.task, rounded_k(asked.k), hybrid)
        texts = _texts(asked.query)
        results = await self._batcher.submit(work, texts)
        seconds = time.monotonic() - start
        if self._log_queries:
            logger.info("%.0f ms: %s", 1000 * seconds, texts)
        return _json(
            {
                "results": [
                    [_hit(hit) for hit in hits[: asked.k] if isinstance(hit, Hit)]
                    for hits in results
                ],
                "hybrid": hybrid,
                "milliseconds": round(1000 * seconds, 2),
            }
        )

    async def _embed(self, request: Request) -> Response:
        asked = await self._body(request, EmbeddingsRequest)
        dim = self._engine.retriever.model.model.config.embedding_dim
        if asked.dimensions not in (None, dim):
            raise HTTPException(400, f"`dimensions` is {asked.dimensions}; the model has {dim}")
        texts, work = _texts(asked.input), Work("encode_queries")
        if asked.model.endswith(_PASSAGES):
            work = Work("encode_passages")
        embeddings = await self._batcher.submit(work, texts)
        tokens = sum(len(text.split()) for text in texts)
        return _json(
            {
                "object": "list",
                "model": asked.model,
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _encoded(np.asarray(embedding), asked.encoding_format),
                    }
                    for index, embedding in enumerate(embeddings)
                ],
                # Words, since clients only add them up.
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    async def _about(self, request: Request) -> Response:
        retriever = self._engine.retriever
        return _json(
            {
                "passages": len(retriever),
                "hybrid": retriever.has_hybrid,
                "tasks": list(retriever.tasks),
                "model": retriever.model.fingerprint,
            }
        )

    async def _show_page(self, request: Request) -> Response:
        return self._page

    async def _health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def _texts(given: str | list[str]) -> list[str]:
    """One or several, as a list."""
    texts = [given] if isinstance(given, str) else given
    if not all(map(str.strip, texts)):
        raise HTTPException(400, "a text is empty")
    return texts


def _encoded(embedding: np.ndarray, encoding_format: str) -> str | list[float]:
    """An embedding as the request wants it."""
    numbers = embedding.astype("<f4")
    if encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return numbers.tolist()


def _hit(hit: Hit) -> dict[str, object]:
    return {
        "id": hit.passage.id,
        "score": round(hit.score, 6),
        "dense": hit.dense,
        "sparse": hit.sparse,
        "title": hit.passage.title,
        "text": hit.passage.text,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, error.headers)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


def _policy(page: str) -> str:
    """A policy under which nothing runs but the page's own script and style."""

    def of(tag: str) -> str:
        text = page.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src '{of('script')}'; style-src '{of('style')}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
