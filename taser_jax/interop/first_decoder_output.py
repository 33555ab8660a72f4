"""ST5-EncDec's pooling for sentence-transformers: T5's decoder at its first position.

This file travels with exported models, whose modules.json names it. It needs nothing of taser_jax:

    SentenceTransformer("exports/sentence_transformers", trust_remote_code=True)
"""

from __future__ import annotations

import pathlib
import shutil

import torch
from safetensors import safe_open
from sentence_transformers.base.modules import Module
from transformers import AutoConfig, AutoModel

WEIGHTS = "model.safetensors"
_TABLE = "decoder.embed_tokens.weight"
# The start token's row, and that of the end, which transformers wants to be in the table.
_ROWS = 2


class FirstDecoderOutput(Module):
    """embedding = Dec(start, Enc(tokens)): the decoder attends to all states of the encoder.

    Its weights are those of the T5 in the folder above, or, in a model that sentence-transformers
    has saved, in its own folder.

    Args:
        settings: config.json of the T5.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.settings = settings
        # The encoder and the token table are the first module's; a small one of each goes here.
        config = AutoConfig.for_model(**{**settings, "num_layers": 1, "vocab_size": _ROWS})
        self.decoder = AutoModel.from_config(config).get_decoder()

    def forward(
        self, features: dict[str, torch.Tensor], **options: object
    ) -> dict[str, torch.Tensor]:
        """Adds `sentence_embedding` [batch, dim] to the encoder's output.

        Args:
            features: "token_embeddings" [batch, length, dim] and "attention_mask" [batch, length].
            options: not used.
        """
        states = features["token_embeddings"].to(self.decoder.dtype)
        output = self.decoder(
            input_ids=torch.zeros(len(states), 1, dtype=torch.long, device=states.device),
            encoder_hidden_states=states,
            encoder_attention_mask=features["attention_mask"],
            use_cache=False,
        )
        features["sentence_embedding"] = output.last_hidden_state[:, 0]
        return features

    def get_embedding_dimension(self) -> int:
        """Width of an embedding."""
        return int(self.decoder.config.d_model)

    def get_config_dict(self) -> dict[str, object]:
        """What `save` writes into config.json."""
        return self.settings

    def save(self, output_path: str, *_: object, **options: object) -> None:
        """Writes configuration and weights into the module's folder, and this file above it.

        Args:
            output_path: the folder.
            options: `safe_serialization`, as sentence-transformers gives it.
        """
        self.save_config(output_path)
        self.save_torch_weights(output_path)
        # Where modules.json is, and sentence-transformers looks for it.
        shutil.copy(__file__, pathlib.Path(output_path).parent)

    @classmethod
    def load(
        cls, model_name_or_path: str, subfolder: str = "", **options: object
    ) -> FirstDecoderOutput:
        """Reads the decoder and the first rows of the token table.

        Args:
            model_name_or_path: directory or hub id of the model.
            subfolder: the module's folder in it.
            options: where and how the hub's files are kept; others are not used.
        """
        names = ("token", "cache_folder", "revision", "local_files_only")
        of_hub = {name: options[name] for name in names if name in options}
        module = cls(**cls.load_config(model_name_or_path, subfolder=subfolder, **of_hub))
        folders = (subfolder, subfolder.rpartition("/")[0])
        files = (
            cls.load_file_path(model_name_or_path, WEIGHTS, subfolder=folder, **of_hub)
            for folder in folders
        )
        path = next((pathlib.Path(file) for file in files if file), None)
        if path is None:
            raise FileNotFoundError(f"no {WEIGHTS} in {model_name_or_path}/{subfolder} or above it")
        with safe_open(path, framework="pt") as weights:
            tensors = {
                name: weights.get_tensor(name)
                for name in weights.keys()  # noqa: SIM118, since it is no dictionary
                if name.startswith("decoder.")
            }
            if _TABLE not in tensors:
                tensors[_TABLE] = weights.get_slice("shared.weight")[:_ROWS]
        module.load_state_dict(tensors)
        return module
