"""Eight fake CPU devices for every test, and shapes in signatures checked as tests run."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Tests run most programs once or twice: compiling less hard is a third of the time of it all.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    + " --xla_cpu_parallel_codegen_split_count=1"
)

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)

_CHECKED = (
    "taser_jax.batch",
    "taser_jax.models",
    "taser_jax.optim",
    "taser_jax.training",
    "taser_jax.retrieval",
    "taser_jax.evaluation",
    "taser_jax.data.batches.one_task",
)
install_import_hook(_CHECKED, "beartype.beartype")

pytest_plugins = ("file_times", "worlds")
