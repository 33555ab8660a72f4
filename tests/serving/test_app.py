"""Requests and answers of the server, over HTTP."""

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taser_jax.commands.ask import ServeOptions, serve
from taser_jax.retrieval.passages import Hit
from taser_jax.serving.app import Server
from taser_jax.serving.engine import Engine, Limits, Work, rounded_k
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.records import Passage


@dataclasses.dataclass
class FakeRetriever:
    """Passage i of query q has the title "<version>: q" and score -i.

    Attributes:
        version: appears in titles and embeddings.
        has_hybrid: whether it has BM25.
        tasks: its tasks.
        query_length: maximum tokens of a query.
        seconds: that a call takes.
        batches: number of queries of every call.
    """

    version: int = 1
    has_hybrid: bool = True
    tasks: tuple[str, ...] = ("qa", "facts")
    query_length: int = 32
    seconds: float = 0.0
    batches: list[int] = dataclasses.field(default_factory=list)
    task: str | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def model(self) -> SimpleNamespace:
        """What the server asks of a loaded model."""
        config = SimpleNamespace(embedding_dim=3)
        return SimpleNamespace(model=SimpleNamespace(config=config), fingerprint=f"v{self.version}")

    def __len__(self) -> int:
        return 5

    def for_task(self, task: str | None) -> "FakeRetriever":
        """The same, for a task."""
        if task is not None and task not in self.tasks:
            raise ConfigError(f"no task {task!r}", fix="one of qa, facts")
        return dataclasses.replace(self, task=task) if task else self

    def search(self, questions: Sequence[str], *, k: int, hybrid: bool = False) -> list[list[Hit]]:
        """k passages of each question."""
        assert self.lock.acquire(blocking=False), "two calls at the same time"
        try:
            self.batches.append(len(questions))
            time.sleep(self.seconds)
            if "fail" in questions:
                raise RuntimeError("a bug")
            title = f"{self.version}: {self.task or ''}{' + BM25' if hybrid else ''}"
            return [
                [
                    Hit(Passage(id=f"p{i}", title=f"{title}: {q}", text="<b>text</b>"), -float(i))
                    for i in range(min(k, len(self)))
                ]
                for q in questions
            ]
        finally:
            self.lock.release()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Lengths of the texts."""
        return np.array([[len(text), 0, self.version] for text in texts], np.float32)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Lengths of the texts, with a 1 beside."""
        return np.array([[len(text), 1, self.version] for text in texts], np.float32)


@contextlib.contextmanager
def running(server: Server) -> Iterator[httpx.Client]:
    """A client of the server, which listens on a free port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            server.app, log_level="error", timeout_graceful_shutdown=10, backlog=2048
        )
        instance = uvicorn.Server(config)
        thread = threading.Thread(target=instance.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not instance.started:
                time.sleep(0.005)
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=30) as client:
                yield client
        finally:
            instance.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def serving(retriever: FakeRetriever, **options) -> contextlib.AbstractContextManager[httpx.Client]:
    return running(Server(Engine(lambda: retriever, warm_batches=()), **options))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(FakeRetriever(), limits=Limits(max_body=50_000, body_seconds=1)) as client:
        yield client


def test_queries_of_all_lengths_are_compiled_before_the_first():
    shapes = []

    class Recording(FakeRetriever):
        def search(self, texts, **options):
            shapes.append((len(texts), *{len(text.split()) for text in texts}))
            return super().search(texts, **options)

    Engine(lambda: Recording(query_length=100), warm_batches=(1, 4))
    # Words that take more than half of 16, 32, 64 and 128 tokens, to which queries are padded.
    assert shapes == [(size, words) for words in (12, 24, 48, 96) for size in (1, 4)]


def test_a_hybrid_search_of_a_retriever_that_lost_bm25_builds_no_index():
    """A reload came between the request and its batch."""
    engine = Engine([FakeRetriever(has_hybrid=False), FakeRetriever()].pop, warm_batches=())
    work, titles = Work("search", k=10, hybrid=True), []
    for _ in range(2):
        [hits] = engine.compute(work, ["who?"])
        titles.append(hits[0].passage.title)
        engine.reload()
    assert titles == ["1:  + BM25: who?", "1: : who?"]


def test_one_query_and_several(client):
    answer = client.post("/search", json={"query": "who?", "k": 2}).json()
    [hits] = answer["results"]
    assert [hit["id"] for hit in hits] == ["p0", "p1"]
    assert hits[0] == {
        **{"id": "p0", "score": 0.0, "dense": None, "sparse": None},
        **{"title": "1:  + BM25: who?", "text": "<b>text</b>"},
    }
    assert answer["hybrid"] is True
    both = client.post("/search", json={"query": ["who?", "what?"], "hybrid": False}).json()
    assert [hits[0]["title"] for hits in both["results"]] == ["1: : who?", "1: : what?"]


def test_a_task_is_used(client):
    answer = client.post("/search", json={"query": "who?", "task": "facts"}).json()
    assert answer["results"][0][0]["title"].startswith("1: facts")
    refused = client.post("/search", json={"query": "who?", "task": "poems"})
    assert refused.status_code == 400
    assert "no task 'poems'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "truncated"),
        ('{"query": " "}', "empty"),
        ('{"query": ["a", null]}', "$.query[1]"),
        ('{"query": "a", "depth": 3}', "depth"),
        ('{"query": "' + "a" * 20_001 + '"}', "$.query"),
        ("[" * 40_000, ""),
        (b'{"query": "\xff"}', "utf"),
    ],
)
def test_a_malformed_body_is_refused(client, body, message):
    answer = client.post("/search", content=body)
    assert answer.status_code == 400
    assert message.lower() in answer.json()["error"]["message"].lower()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/search", 405), ("GET", "/x", 404)]
)
def test_what_is_not_there_is_refused_like_a_malformed_body(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


# Also halves of surrogate pairs, which JSON can write and UTF-8 cannot.
_TEXTS = st.text(st.characters(), max_size=9) | st.sampled_from(["who?", "\ud800", "\0", " "])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("query", "k", "task", "hybrid", "input", "model", "encoding_format", "dimensions", "x")
_BODIES = st.binary(max_size=40) | (
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES) | _VALUES
).map(json.dumps)


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(["/search", "/v1/embeddings"]), body=_BODIES)
@example(path="/search", body='{"query": "\\ud800"}')
@example(path="/v1/embeddings", body='{"input": ["\\ud800"]}')
@example(path="/search", body='{"query": "a", "k": 1e400}')
def test_whatever_is_sent_is_answered_or_refused(client, path, body):
    answer = client.post(path, content=body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def test_limits_of_a_body(client):
    assert client.post("/search", content=b" " * 50_001).status_code == 413

    def slowly() -> Iterator[bytes]:
        yield b'{"query": '
        time.sleep(1.5)
        yield b'"late"}'

    assert client.post("/search", content=slowly()).status_code == 408
    assert client.post("/search", json={"query": ["a"] * 65}).status_code == 400


def test_embeddings_as_openai_has_them(client):
    body = {"input": ["ab", "abc"], "model": "taser", "user": "x"}
    answer = client.post("/v1/embeddings", json=body).json()
    assert [line["embedding"] for line in answer["data"]] == [[2, 0, 1], [3, 0, 1]]
    refused = client.post("/v1/embeddings", json={"input": "ab", "dimensions": 2})
    assert "the model has 3" in refused.json()["error"]["message"]


def test_with_openais_client(client):
    """Which asks for base64."""
    import openai

    theirs = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    answer = theirs.embeddings.create(input=["ab", "abc"], model="taser-passage")
    assert [line.embedding for line in answer.data] == [[2, 1, 1], [3, 1, 1]]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (2, 2)


def test_health_metrics_and_about(client):
    assert client.get("/healthz").text == "ok\n"
    assert client.get("/readyz").status_code == 200
    client.post("/search", json={"query": "who?"})
    metrics = client.get("/metrics").text
    assert 'taser_requests_total{path="/search",status="200"}' in metrics
    assert "taser_batch_texts_bucket" in metrics
    about = client.get("/about").json()
    assert about == {"passages": 5, "hybrid": True, "tasks": ["qa", "facts"], "model": "v1"}


def test_the_page_runs_nothing_but_its_own_script(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in answer.text.replace("http-equiv", "")
    assert "innerHTML" not in answer.text


def test_a_bug_is_logged_and_answered(client, caplog):
    answer = client.post("/search", json={"query": "fail"})
    assert answer.status_code == 500
    assert "log" in answer.json()["error"]["message"]
    assert "RuntimeError: a bug" in caplog.text
    # The next one is answered.
    assert client.post("/search", json={"query": "who?"}).status_code == 200


def test_queries_are_logged_only_when_asked_for(caplog):
    for is_logged in (False, True):
        caplog.clear()
        caplog.set_level(logging.INFO, logger=logger.name)
        with serving(FakeRetriever(), log_queries=is_logged) as client:
            client.post("/search", json={"query": "a secret"})
        assert ("a secret" in caplog.text) == is_logged


def test_a_token_is_required_everywhere_but_for_health():
    with serving(FakeRetriever(), token="s3cret") as client:
        assert client.post("/search", json={"query": "who?"}).status_code == 401
        assert client.get("/metrics").status_code == 401
        for wrong in ("s3cret", "Bearer s3cre", "Bearer s3cret2", "bearer S3CRET"):
            assert client.get("/about", headers={"Authorization": wrong}).status_code == 401
        assert client.get("/about", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert client.get("/healthz").status_code == client.get("/").status_code == 200


def test_concurrent_requests_share_batches_and_too_many_are_refused():
    retriever = FakeRetriever(seconds=0.05)
    limits = Limits(max_batch=8, deadline=0.01, max_waiting=16)
    with serving(retriever, limits=limits) as client, ThreadPoolExecutor(48) as pool:

        def ask(number: int) -> httpx.Response:
            return client.post("/search", json={"query": f"q{number}", "k": 1})

        answers = list(pool.map(ask, range(48)))
        assert {answer.status_code for answer in answers} == {200, 429}
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert answer.json()["results"][0][0]["title"].endswith(f": q{number}")
            else:
                assert answer.headers["retry-after"] == "1"
        assert max(retriever.batches) == 8
        # Afterwards everybody is served again.
        assert ask(1).status_code == 200


def test_a_reload_replaces_model_and_index_at_once_and_loses_nothing():
    loaded: list[int] = []

    def load() -> FakeRetriever:
        version = len(loaded) + 1
        loaded.append(version)
        if version == 3:
            raise OSError("half of an index")
        return FakeRetriever(version=version, seconds=0.002)

    server = Server(Engine(load, warm_batches=(1,)))
    with running(server) as client:
        versions_seen = []
        for number in range(60):
            if number in (20, 40):
                server.start_reload()
            answer = client.post("/search", json={"query": ["a", "b", "c"]})
            assert answer.status_code == 200
            # One batch, one version.
            [version] = {int(hits[0]["title"][0]) for hits in answer.json()["results"]}
            versions_seen.append(version)
            time.sleep(0.005)
        assert "taser_reloads_total 1.0" in client.get("/metrics").text
    # The third could not be read: the second goes on.
    assert loaded == [1, 2, 3]
    assert versions_seen == sorted(versions_seen)
    assert set(versions_seen) == {1, 2}


def test_what_was_accepted_is_answered_when_the_server_ends():
    limits = Limits(max_batch=1, deadline=0.001)
    with ThreadPoolExecutor(4) as pool, httpx.Client(timeout=30) as theirs:
        with serving(FakeRetriever(seconds=0.2), limits=limits) as client:
            asked = [
                pool.submit(theirs.post, f"{client.base_url}/search", json={"query": f"q{number}"})
                for number in range(4)
            ]
            # All four have arrived, and one is being computed, when the server is told to end.
            time.sleep(0.1)
        assert [future.result().status_code for future in asked] == [200] * 4


@pytest.mark.parametrize(("k", "rounded"), [(1, 10), (10, 10), (11, 20), (100, 160)])
def test_few_different_depths_are_searched(k, rounded):
    assert rounded_k(k) == rounded


def test_the_port_that_is_free_is_told(monkeypatch, caplog, tmp_path):
    asked = {}
    monkeypatch.setattr(uvicorn, "run", lambda _, **options: asked.update(options))
    for module, name in (("engine", "Engine"), ("app", "Server")):
        made = SimpleNamespace(retriever="passages", app=None)
        monkeypatch.setattr(f"taser_jax.serving.{module}.{name}", lambda *_, made=made, **__: made)
    caplog.set_level(logging.INFO, logger=logger.name)
    serve(directory=str(tmp_path), options=ServeOptions(port=0))
    assert asked["port"] > 0
    assert f"http://127.0.0.1:{asked['port']}" in caplog.text


def test_a_port_that_is_taken_is_named_before_anything_is_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: .*in use"):
            serve(directory=str(tmp_path), options=ServeOptions(port=port))
