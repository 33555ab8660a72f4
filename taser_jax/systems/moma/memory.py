"""`taser memory`: adds memories to a mixture, removes and lists them."""

from __future__ import annotations

import dataclasses
import pathlib

from taser_jax.assembly.model_directory import check_vocabulary, load_model
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.moma.memories import (
    PARTS,
    Manifest,
    Memory,
    Mixture,
    read_manifest,
    write_manifest,
)
from taser_jax.systems.moma.shared_embeddings import add_missing, tower_fingerprints


@writes("{memory_dir}")
@first_host_only
def memory_add(
    *,
    name: str,
    token_store: str,
    model_dir: str,
    memory_dir: str,
    shared_embeddings: str | None = None,
    config: EncodeConfig = EncodeConfig(),
    step: int | None = None,
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
        step: step of the checkpoint; None means the best one.

    Returns:
        Documents "encoded", and "kept" from before, in the whole mixture.

    Raises:
        ConfigError: the name is another collection's.
        DataError: the token store has no passages.
        FingerprintError: another vocabulary, or the mixture was encoded by another passage tower.
    """
    store, model = TokenStore.open(token_store), load_model(model_dir, step=step)
    if not name or not len(store):
        raise DataError(
            f"memory {name!r} of {len(store)} documents",
            where=token_store,
            expected="a name, and at least one document",
        )
    check_vocabulary(model, store)
    fingerprints = tower_fingerprints(model, store)
    directory = shared_embeddings or str(pathlib.Path(memory_dir) / PARTS)
    before = read_manifest(memory_dir) or Manifest(fingerprints, (), directory)
    require_equal(
        f"memories {memory_dir}",
        before.fingerprints,
        fingerprints,
        "add this model's memories to a directory of their own",
    )
    own = Memory(
        name,
        str(pathlib.Path(token_store)),
        store.metadata.collection,
        store.metadata.passages_fingerprint,
        len(store),
    )
    taken = {one.name: one.collection for one in before.memories}
    if taken.get(name, own.collection) != own.collection:
        raise ConfigError(
            f"memory {name!r} is collection {taken[name]!r}",
            where=memory_dir,
            expected=f"a name of its own for collection {own.collection!r}",
            fix=f"choose another NAME, or `taser memory remove` {name!r} first",
        )
    with phase(f"memory {name}"):
        encoded = add_missing(before.embeddings_dir, model, store, config=config)
    memories = {one.name: one for one in before.memories} | {name: own}
    manifest = dataclasses.replace(before, memories=tuple(memories.values()))
    write_manifest(memory_dir, manifest)
    kept = len(Mixture(manifest)) - encoded
    logger.info("memory %s: %s encoded, %s kept", name, f"{encoded:,}", f"{kept:,}")
    return {"encoded": encoded, "kept": kept}


@writes("{memory_dir}")
@first_host_only
def memory_remove(*, name: str, memory_dir: str) -> None:
    """Removes a memory from a mixture; its embeddings stay, so that adding it again encodes none.

    Args:
        name: the memory.
        memory_dir: the mixture.

    Raises:
        ConfigError: there is no such memory.
    """
    manifest = read_manifest(memory_dir) or Manifest({}, (), PARTS)
    write_manifest(memory_dir, manifest.without(name))
    logger.info("memory %s: removed", name)


def memory_list(*, memory_dir: str) -> list[str]:
    """Prints a mixture's memories with their sizes.

    Args:
        memory_dir: the mixture.

    Returns:
        Their names.
    """
    mixture = Mixture.open(memory_dir)
    for one in mixture.manifest.memories:
        print(f"{one.name}: {one.documents:,} documents of collection {one.collection}")
    print(f"together {len(mixture):,} different documents")
    return mixture.names


CONFIGURABLES = (EncodeConfig,)
