"""T5 with task prompts from KILT's files to KILT's measures."""

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


def write_kilt(root: pathlib.Path) -> list[str]:
    """A collection in KILT's formats; texts of its passages."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ba", "ko", "mi", "ru") for b in ("len", "tar", "sov", "dim")]
    texts = [[" ".join(rng.choices(words, k=12)) for _ in range(2)] for _ in range(PAGES)]
    rows = ["id\ttext\ttitle\twikipedia_id\tparagraph_id"]
    rows += [
        f"{page}.{number}\t{text}.\tPage {page}\t{page}\t{number}"
        for page, of_page in enumerate(texts)
        for number, text in enumerate(of_page)
    ]
    (root / "passages.tsv").write_text("".join(f"{row}\n" for row in rows))
    for task in KILT_TASKS:
        lines = []
        for number in range(2 * PAGES):
            page, place = number % PAGES, number // PAGES
            gold = {"wikipedia_id": str(page), "title": "", "start_paragraph_id": place}
            text = " ".join(rng.sample(texts[page][place].split(), 5))
            output = [{"answer": "x", "provenance": [gold]}]
            lines.append(json.dumps({"id": f"q{number}", "input": text, "output": output}))
        (root / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return [text for of_page in texts for text in of_page]


def test_one_encoder_with_task_prompts_learns_and_is_judged(tmp_path: pathlib.Path):
    (tmp_path / "spiece.model").write_bytes(t5_model(write_kilt(tmp_path), 64))
    data = gin(DATA_DIR=tmp_path / "data", COLLECTION="small_kilt")
    store, model = gin(TOKEN_STORE=tmp_path / "tokens"), gin(MODEL_DIR=tmp_path / "model")
    embeddings, runs = gin(EMBEDDINGS_DIR=tmp_path / "e"), gin(RUNS_DIR=tmp_path / "runs")
    succeed(
        *("prepare", *data, *gin(PASSAGES="passages.tsv", SOURCE_DIR=tmp_path)),
        *gin("PrepareOptions", validation_last=8),
        *gin("PrepareOptions", task_shares={task: SHARES for task in KILT_TASKS}),
        *gin(QUERIES={task: f"{task}.jsonl" for task in KILT_TASKS}),
    )
    succeed(
        *("tokenize", *gin(DATA_DIR=tmp_path / "data"), *store),
        *(*gin(VOCABULARY=tmp_path / "spiece.model"), *gin("tokenize", extra_ids=100)),
        *gin(MIXTURE_OR_TASK_NAME="small_kilt", MIXTURE_OR_TASK_MODULE="small_tasks"),
        *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 24}),
    )
    succeed(
        *("train", "--gin_file=runs/train.gin", "--gin_file=models/t5_base.gin"),
        *("--gin_file=optim/naive.gin", *store, *model),
        *gin("T5Config", embed_dim=16, num_layers=1, num_decoder_layers=1, num_heads=2),
        *gin("T5Config", head_dim=8, mlp_dim=32, vocab_size=1, dtype="float32", dropout_rate=0.0),
        *gin(TRAIN_STEPS=6, LEARNING_RATE=3e-3, WARMUP_STEPS=0),
        *gin("TaskBatchingConfig", total=16, num_negatives=1),
        # Compiles sooner; test_query_towers_training.py validates such models.
        *gin("TrainingConfig", validation=None),
    )
    succeed("encode", *model, *store, *embeddings)
    succeed("search", *data, *embeddings, *gin(INDEX_DIR=tmp_path / "index", TOP_K=20), *runs)
    succeed(
        *("evaluate", *data, *runs, *gin(SYSTEM="t5", EVAL_OUTPUT_DIR=tmp_path / "results")),
        *gin("EvaluationConfig", judge="kilt", measures=MEASURES),
    )

    tokens = TokenStore.open(tmp_path / "tokens")
    vocabulary = load_vocabulary(tokens.vocabulary_directory)
    for task, (name, length) in KILT_TASKS.items():
        query = tokens.queries(task, "train").tokens([0])
        assert query.ids.shape == (1, length)
        # T5's vocabularies have no [CLS] that would be first.
        prompt = [*vocabulary.encode([name])[0], vocabulary.size - 2]
        assert query.ids[0][: len(prompt)].tolist() == prompt
    config = json.loads((tmp_path / "model" / "model.json").read_text())
    assert config["t5"]["vocab_size"] == vocabulary.size
    results = json.loads((tmp_path / "results" / "results" / "t5.json").read_text())["tasks"]
    assert results.keys() == set(KILT_TASKS)
    for result in results.values():
        # 40 queries per file, the last 8 of them validation, the rest parted by shares.
        assert 0 < result["num_queries"] < 32
        assert result["metrics"].keys() == set(MEASURES)
        assert 0 < result["metrics"]["Recall@20"] <= 1
