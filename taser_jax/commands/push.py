"""`taser push`: an exported model on the Hugging Face hub."""

from __future__ import annotations

import pathlib
import tempfile

from taser_jax.interop.export_source import CARD, METADATA
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase


def push(*, repo: str, export_dir: str, license: str | None = None, private: bool = True) -> str:
    """Uploads a directory of `taser export` to the hub, in one commit.

    The card's front matter has what the hub reads: library, base model, tags and, with
    `export_model.results_dir`, the measures as `model-index`. The token is that of `hf auth login`
    or `HF_TOKEN`; `HF_ENDPOINT` names another hub.

    Args:
        repo: "owner/name"; made if there is none.
        export_dir: directory of one format.
        license: of the weights, such as "apache-2.0", for the card; None names none.
        private: whether a repository that is made here is private.

    Returns:
        URL of the commit.

    Raises:
        ConfigError: no export there.
        DataError: the hub cannot be reached, or refuses.
    """
    import huggingface_hub

    directory = pathlib.Path(export_dir)
    if not (directory / METADATA).is_file() or not (directory / CARD).is_file():
        fix = "`taser export sentence_transformers` writes one, into a folder of that name"
        raise ConfigError("no exported model", where=export_dir, fix=fix)
    api = huggingface_hub.HfApi()
    with tempfile.TemporaryDirectory() as scratch, phase(f"push {repo}"):
        paths = {
            path.relative_to(directory).as_posix(): path
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        if license is not None:
            card = huggingface_hub.ModelCard.load(directory / CARD)
            card.data.license = license
            card.save(pathlib.Path(scratch) / CARD)
            paths[CARD] = pathlib.Path(scratch) / CARD
        try:
            repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
            commit = api.create_commit(
                repo,
                [huggingface_hub.CommitOperationAdd(name, path) for name, path in paths.items()],
                commit_message="Model exported by taser_jax",
            )
        except Exception as error:
            # Offline, name resolution, proxy, HTTP and log-in errors share no base class.
            told = getattr(error, "server_message", None) or str(error)
            reason = (told.strip().splitlines() or [type(error).__name__])[0]
            fix = "check the name, the network and the token (`hf auth login`, or HF_TOKEN)"
            raise DataError(f"the hub did not take it: {reason}", where=repo, fix=fix) from error
    logger.info("%s files: %s", len(paths), commit.commit_url)
    return str(commit.commit_url)
