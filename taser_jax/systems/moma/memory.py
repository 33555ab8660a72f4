"""`taser memory`: adds memories to a mixture, removes and lists them."""

from __future__ import annotations

import dataclasses
import enum
import pathlib

from taser_jax.assembly.model_directory import check_vocabulary, load_model
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.artifacts import MEMORIES, require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.moma.embeddings import encode_missing, tower_fingerprints
from taser_jax.systems.moma.memories import (
    PARTS,
    Manifest,
    Memory,
    Mixture,
    read_manifest,
    write_manifest,
)


class MemoryAction(enum.Enum):
    """What `taser memory` does with a mixture: add a memory, remove one, or list all."""

    ADD = "add"
    REMOVE = "remove"
    LIST = "list"


def memory(
    *,
    memory_dir: str,
    action: MemoryAction = MemoryAction.LIST,
    name: str | None = None,
    token_store: str | None = None,
    model_dir: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> list[str]:
    """Adds a memory to a mixture or removes one; prints the memories with their sizes.

    Args:
        memory_dir: the mixture; adding creates it.
        action: add, remove or list.
        name: the memory's name in the mixture; listing needs none.
        token_store: its documents' tokens; only adding needs them.
        model_dir: the model that looks documents up, MoMA's f_a; only adding needs it.
        config: sizes of batches.

    Returns:
        The names of the mixture's memories.

    Raises:
        ConfigError: a name, a token store or a model is missing, or there is no such memory.
        DataError: listing without a mixture.
    """
    required = {
        MemoryAction.ADD: {"NAME": name, "TOKEN_STORE": token_store, "MODEL_DIR": model_dir},
        MemoryAction.REMOVE: {"NAME": name},
        MemoryAction.LIST: {},
    }
    if missing := [macro for macro, value in required[action].items() if not value]:
        fix = f"give --gin.{missing[0]}=..."
        raise ConfigError(f"{missing[0]} is missing", where=f"taser memory {action.value}", fix=fix)
    if action is MemoryAction.ADD:
        assert name is not None
        assert token_store is not None
        assert model_dir is not None
        add_memory(
            name=name,
            token_store=token_store,
            model_dir=model_dir,
            memory_dir=memory_dir,
            config=config,
        )
    elif action is MemoryAction.REMOVE:
        assert name is not None
        if not remove_memory(name=name, memory_dir=memory_dir).memories:
            return []
    mixture = Mixture.open(memory_dir)
    for each in mixture.manifest.memories:
        print(f"{each.name}: {each.documents:,} documents of collection {each.collection}")
    print(f"together {len(mixture):,} different documents")
    return mixture.names


@writes("{memory_dir}", kinds=[MEMORIES])
@first_host_only
def add_memory(
    *,
    name: str,
    token_store: str,
    model_dir: str,
    memory_dir: str,
    shared_embeddings: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> dict[str, int]:
    """Adds a collection to a mixture; encodes only documents that no memory there has had.

    To extend a memory, add the larger collection under the same name. Embeddings depend on the
    passage tower alone: a model with another query tower uses the same ones.

    Args:
        name: the memory's name in the mixture.
        token_store: its documents' tokens.
        model_dir: the model that looks documents up, MoMA's f_a.
        memory_dir: the mixture; created where absent.
        shared_embeddings: a directory of embeddings for all mixtures of one passage tower; None is
            the mixture's own. A mixture keeps the directory that it was created with.
        config: sizes of batches.

    Returns:
        Documents "encoded", and "kept" from before, in the whole mixture.

    Raises:
        ConfigError: the name is another collection's.
        DataError: the token store has no passages.
        FingerprintError: another vocabulary, or the mixture was encoded by another passage tower.
    """
    store, model = TokenStore.open(token_store), load_model(model_dir)
    if not len(store):
        fix = "tokenize a collection with passages"
        raise DataError(f"memory {name!r} has no documents", where=token_store, fix=fix)
    check_vocabulary(model.vocabulary_dir, store)
    fingerprints = tower_fingerprints(model.passage_fingerprint, store)
    directory = shared_embeddings or str(pathlib.Path(memory_dir) / PARTS)
    before = read_manifest(memory_dir) or Manifest(fingerprints, (), directory)
    fix = "add this model's memories to a directory of their own"
    require_equal(f"memories {memory_dir}", before.fingerprints, fingerprints, fix)
    added = Memory(
        name,
        str(pathlib.Path(token_store)),
        store.metadata.collection,
        store.metadata.passages_fingerprint,
        len(store),
    )
    memories = {memory.name: memory for memory in before.memories}
    if name in memories and memories[name].collection != added.collection:
        title = f"memory {name!r} is collection {memories[name].collection!r}"
        fix = f"choose another NAME, or `taser memory remove` {name!r} first"
        raise ConfigError(title, where=memory_dir, fix=fix)
    with phase(f"memory {name}"):
        encoded = encode_missing(before.embeddings_dir, model, store, config=config)
    memories[name] = added
    manifest = dataclasses.replace(before, memories=tuple(memories.values()))
    write_manifest(memory_dir, manifest)
    reused = len(Mixture(manifest)) - encoded
    logger.info("memory %s: %s encoded, %s kept", name, f"{encoded:,}", f"{reused:,}")
    return {"encoded": encoded, "kept": reused}


@writes("{memory_dir}", kinds=[MEMORIES])
@first_host_only
def remove_memory(*, name: str, memory_dir: str) -> Manifest:
    """Removes a memory from a mixture; its embeddings stay, so that adding it again encodes none.

    Args:
        name: the memory.
        memory_dir: the mixture.

    Returns:
        The others.

    Raises:
        ConfigError: there is no such memory.
    """
    manifest = read_manifest(memory_dir) or Manifest({}, (), PARTS)
    others = tuple(memory for memory in manifest.memories if memory.name != name)
    if len(others) == len(manifest.memories):
        fix = f"name one of {', '.join(memory.name for memory in others) or 'those you add'}"
        raise ConfigError(f"there is no memory {name!r}", where="NAME", fix=fix)
    manifest = dataclasses.replace(manifest, memories=others)
    write_manifest(memory_dir, manifest)
    logger.info("memory %s: removed", name)
    return manifest
