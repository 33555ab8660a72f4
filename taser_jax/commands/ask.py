"""`taser ask` and `taser serve`: a trained retriever's answers at the terminal, and over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import pkgutil
import socket
import textwrap
from collections.abc import Sequence

from taser_jax.assembly.model_directory import read_facts, read_model_config
from taser_jax.assembly.run_record import task_names
from taser_jax.devices.hosts import keep_compiled_programs
from taser_jax.retrieval.passages import Hit
from taser_jax.retriever import Retriever
from taser_jax.retriever_parts import read_parts
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import logger

TOKEN = "TASER_TOKEN"
# Connections that wait to be accepted, and seconds that a drained server waits for answers.
_BACKLOG, _DRAIN_SECONDS = 2048, 30


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is printed below a question.

    Attributes:
        hits: the best passages.
        note: a line before them; none where empty.
        sources: lines after them.
    """

    hits: Sequence[Hit]
    note: str = ""
    sources: Sequence[str] = ()


# They get the questions and, by name, those arguments of `ask` that concern them.
FUSION = "taser_jax.systems.muf.fuse:ask_fused"
MEMORIES = "taser_jax.systems.moma.augment:ask_augmented"


def ask(
    *,
    questions: Sequence[str],
    directory: str = "results",
    model_dir: str | None = None,
    index_dir: str | None = None,
    data_dir: str | None = None,
    collection: str | None = None,
    fusion_dir: str | None = None,
    memory_dir: str | None = None,
    lookup_dir: str | None = None,
    documents: int = 10,
    query_length: int | None = None,
    task: str | None = None,
    k: int = 3,
    step: int | None = None,
) -> list[list[str]]:
    """Prints the best passages for typed questions.

    Example:
        `taser ask how do I sort a list --from=results`

    Args:
        questions: questions as typed.
        directory: where `taser compare` left its results: model, index and, if it recommended a
            hybrid, BM25; for when no model, fusion or memories are given.
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: folder of collections.
        collection: the collection.
        fusion_dir: from `taser fuse`, in place of the four above: its specialists answer together,
            and the confidence of each is printed below the question.
        memory_dir: a mixture of memories, for a model that fuses documents: the documents fused
            with each question are printed below its answers, with memory, score and attention.
        lookup_dir: the model that looks documents up: the one that the memories were added with.
        documents: documents fused with each question, K.
        query_length: maximum tokens per question; None means as in training.
        task: task whose prompt, length and query encoder are used, where tasks differ.
        k: passages per question.
        step: step of the checkpoint; None means the best one.

    Returns:
        Passage ids, best first, for each question.

    Raises:
        ConfigError: no question, an empty one, or a string instead of a list; neither a model with
            its index and collection nor a fusion.
    """
    if isinstance(questions, str) or not questions or not all(map(str.strip, questions)):
        problem = f"{questions!r} is no list of questions, or one of them is empty"
        fix = "write `taser ask how do I sort a list`"
        raise ConfigError(problem, where="QUESTIONS", fix=fix)
    answers: list[Answer]
    asked = {"task": task, "query_length": query_length, "k": k}
    if fusion_dir is not None:
        answers = pkgutil.resolve_name(FUSION)(questions, fusion_dir=fusion_dir, **asked)
    else:
        if model_dir is None and read_parts(directory) is None:
            problem = "no retriever.json, which `taser compare` writes"
            fix = (
                "give --from=ITS_OUTPUT_DIR, or FUSION_DIR, or MODEL_DIR, INDEX_DIR, DATA_DIR and "
                "COLLECTION"
            )
            raise ConfigError(problem, where=directory, fix=fix)
        retriever = Retriever.load(
            model_dir or directory,
            index_dir=index_dir,
            data_dir=data_dir,
            collection=collection,
            task=task,
            query_length=query_length,
            step=step,
        )
        if memory_dir is not None:
            memories = {"memory_dir": memory_dir, "lookup_dir": lookup_dir, "documents": documents}
            ask_augmented = pkgutil.resolve_name(MEMORIES)
            answers = ask_augmented(questions, retriever, data_dir=data_dir, **memories, **asked)
        else:
            hits = retriever.search(questions, k=k, hybrid=retriever.has_hybrid)
            answers = [Answer(best) for best in hits]
    for question, answer in zip(questions, answers, strict=True):
        print("\n".join([f"\n? {question}", *([answer.note] if answer.note else [])]))
        for rank, hit in enumerate(answer.hits, start=1):
            text = textwrap.shorten(hit.passage.text, 150, placeholder=" ...")
            print(f"  {rank}. {hit.passage.title}  [{hit.score:.2f}]\n     {text}")
        for line in answer.sources:
            print(line)
    return [[hit.passage.id for hit in answer.hits] for answer in answers]


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
        ConfigError: an address that others reach without a token or that is taken, no retriever
            there, or the extra `serve` is not installed.
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
        problem, fix = f"{error.name} is not installed", how_to_install("serve")
        raise ConfigError(problem, where="taser serve", fix=fix) from None
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        with socket.create_server((options.host, options.port), family=family) as free:
            port = free.getsockname()[1]
    except (OSError, OverflowError) as error:
        problem, where = f"{options.host}, port {options.port}: {error}", "taser serve"
        fix = "stop what listens there, or choose another PORT"
        raise ConfigError(problem, where=where, fix=fix) from None
    keep_compiled_programs(directory)
    place = pathlib.Path(directory)
    engine = Engine(lambda: _served(place), warm_batches=powers_of_two(options.max_batch))
    limits = Limits(options.max_batch)
    server = Server(engine, limits=limits, token=token, log_queries=options.log_queries)
    logger.info("%s passages at http://%s:%d", f"{len(engine.retriever):,}", options.host, port)
    uvicorn.run(
        server.app,
        host=options.host,
        port=port,
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        limit_concurrency=options.max_connections,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        server_header=False,
    )


def _served(directory: pathlib.Path) -> Retriever:
    """Its retriever; where tasks differ, as the first's: requests name the others."""
    parts = read_parts(directory)
    model_dir = directory if parts is None else parts.model_dir
    names = task_names(read_facts(model_dir), read_model_config(model_dir))
    return Retriever.load(directory, task=names[0] if names else None)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
