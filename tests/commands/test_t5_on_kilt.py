"""T5 with task prompts from KILT's files to KILT's measures: one encoder, and one for each task."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random

import pytest
from sentence_models import t5_model
from small_tasks import KILT_TASKS
from small_world import gin, succeed

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import TokenStore

pytestmark = pytest.mark.slow

PAGES = 20
SHARES = {"train": 0.6, "validation": 0.1, "test": 0.4}
MEASURES = ["PageRprec", "Rprec", "Recall@20"]


@dataclasses.dataclass(frozen=True)
class SmallKilt:
    """A collection in KILT's formats, prepared and tokenised for T5.

    Attributes:
        root: holds data/, vocabulary/, tokens/, and of each model its directory, runs and results.
    """

    root: pathlib.Path

    def make(self) -> None:
        rng = random.Random(0)
        words = [f"{a}{b}" for a in ("ba", "ko", "mi", "ru") for b in ("len", "tar", "sov", "dim")]
        texts = {page: [rng.choices(words, k=12) for _ in range(2)] for page in range(PAGES)}
        rows = ["id\ttext\ttitle\twikipedia_id\tparagraph_id"]
        rows += [
            f"{page}.{number}\t{' '.join(text)}.\tPage {page}\t{page}\t{number}"
            for page, found in texts.items()
            for number, text in enumerate(found)
        ]
        (self.root / "passages.tsv").write_text("".join(f"{row}\n" for row in rows))
        for task in KILT_TASKS:
            lines = []
            for number in range(2 * PAGES):
                page, place = number % PAGES, number // PAGES
                gold = {"wikipedia_id": str(page), "title": "", "start_paragraph_id": place}
                text = " ".join(rng.sample(texts[page][place], 5))
                output = [{"answer": "x", "provenance": [gold]}]
                lines.append(json.dumps({"id": f"q{number}", "input": text, "output": output}))
            (self.root / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
        collection = gin(DATA_DIR=self.root / "data", COLLECTION="small_kilt")
        succeed(
            *("prepare", *collection),
            *gin(PASSAGES="passages.tsv", SOURCE_DIR=self.root),
            *gin("PrepareOptions", validation_last=8),
            *gin("PrepareOptions", task_shares={task: SHARES for task in KILT_TASKS}),
            *gin(QUERIES={task: f"{task}.jsonl" for task in KILT_TASKS}),
        )
        words = [" ".join(text) for found in texts.values() for text in found]
        (self.root / "spiece.model").write_bytes(t5_model(words, 64))
        succeed(
            *("tokenize", *gin(DATA_DIR=self.root / "data", TOKEN_STORE=self.root / "tokens")),
            *gin(VOCABULARY=self.root / "spiece.model"),
            *gin("tokenize", extra_ids=100),
            *gin(MIXTURE_OR_TASK_NAME="small_kilt", MIXTURE_OR_TASK_MODULE="small_tasks"),
            *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 24}),
        )

    def train(self, name: str, *arguments: str) -> None:
        succeed(
            "train",
            *("--gin_file=runs/train.gin", "--gin_file=models/t5_base.gin"),
            "--gin_file=optim/naive.gin",
            *gin(
                "T5Config",
                embed_dim=16,
                num_layers=1,
                num_decoder_layers=1,
                num_heads=2,
                head_dim=8,
            ),
            *gin("T5Config", mlp_dim=32, vocab_size=1, dtype="float32", dropout_rate=0.0),
            *gin(WARMUP_STEPS=0),
            *gin("TaskBatchingConfig", total=16),
            *gin(TOKEN_STORE=self.root / "tokens", MODEL_DIR=self.root / name),
            "--gin.TaskBatchingConfig.num_negatives=1",
            # Compiles sooner; test_query_towers_training.py validates such models.
            "--gin.TrainingConfig.validation=None",
            *arguments,
        )

    def retrieve(self, name: str) -> None:
        """Encodes, indexes, searches and evaluates with one model."""
        model = gin(MODEL_DIR=self.root / name, TOKEN_STORE=self.root / "tokens")
        embeddings = gin(EMBEDDINGS_DIR=self.root / f"{name}_embeddings")
        index = gin(INDEX_DIR=self.root / f"{name}_index")
        runs = gin(DATA_DIR=self.root / "data", RUNS_DIR=self.root / f"{name}_runs")
        runs += gin(COLLECTION="small_kilt")
        succeed("encode", *model, *embeddings)
        succeed("search", *embeddings, *index, *runs, *gin(TOP_K=20))
        succeed(
            *("evaluate", *runs, *gin("EvaluationConfig", judge="kilt", measures=MEASURES)),
            *gin(SYSTEM=name, EVAL_OUTPUT_DIR=self.root / "results"),
        )

    def results(self, name: str) -> dict:
        text = (self.root / "results" / "results" / f"{name}.json").read_text()
        return json.loads(text)["tasks"]


@pytest.fixture(scope="module")
def small_kilt(tmp_path_factory):
    made = SmallKilt(tmp_path_factory.mktemp("small_kilt"))
    made.make()
    made.train("tied", *gin(TRAIN_STEPS=6, LEARNING_RATE=3e-3))
    made.retrieve("tied")
    return made


def test_the_prompt_is_the_tasks_name_and_an_extra_id(small_kilt):
    store = TokenStore.open(small_kilt.root / "tokens")
    vocabulary = load_vocabulary(store.vocabulary_directory)
    assert vocabulary.size == store.metadata.vocabulary_size
    for task, (name, length) in KILT_TASKS.items():
        found = store.queries(task, "train").tokens([0])
        assert found.ids.shape == (1, length)
        # T5's vocabularies have no [CLS] that would be first.
        prompt = [*vocabulary.encode([name])[0], vocabulary.size - 2]
        assert found.ids[0][: len(prompt)].tolist() == prompt
    model = json.loads((small_kilt.root / "tied" / "model.json").read_text())
    assert model["t5"]["vocab_size"] == vocabulary.size


def test_one_encoder_for_all_tasks_learns_and_is_judged(small_kilt):
    lines = (small_kilt.root / "tied" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 6
    found = small_kilt.results("tied")
    assert found.keys() == set(KILT_TASKS)
    for result in found.values():
        # 40 queries per file, the last 8 of them validation, the rest parted by shares.
        assert 0 < result["num_queries"] < 32
        assert result["metrics"].keys() == set(MEASURES)
        assert 0 < result["metrics"]["Recall@20"] <= 1
