"""The small files of a model, each read when it is needed, and its registry entry. Reads no weights, loads no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.json_files import read_object
from vectormill.models.model_entry import ModelEntry
from vectormill.models.model_shape import ModelShape
from vectormill.models.tensor_headers import TensorHeader, fingerprint_directory, read_header
from vectormill.models.weights import find_weights, list_weights

TRANSFORMER_CONFIGS: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The pooling that a registry entry may name for a plain masked language model.
SPLADE: Final = "splade"
# A tokenizer without a limit reports 10^30.
LARGEST_MAX_TOKENS: Final = 1 << 20


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model in `directory`, and its registry `entry`, whose options override them.

    Weights may be missing unless `needs_weights`. A model that need not encode is only planned for, and can do
    without a tokenizer and a pooling.
    """

    name: str
    directory: Path
    entry: ModelEntry
    needs_weights: bool = True
    must_encode: bool = True

    def read(self, path: str) -> dict[str, Any]:
        """Return a JSON object; empty if there is no such file. Raise ModelError if it is something else."""
        return read_object(self.directory / path, self.name, is_needed=False)

    def require(self, path: str) -> dict[str, Any]:
        """Return a JSON object. Raise ModelError if there is no such file."""
        file = self.directory / path
        if not file.is_file():
            raise ModelError(
                f"The model {self.name!r} has no {file.name} in {file.parent}; is this a model directory?"
            )
        return self.read(path)

    @property
    def called(self) -> str:
        """Return the name and the directory, by which some families are recognized."""
        return f"{self.name} {self.directory}"

    @property
    def pooling(self) -> str | None:
        """Return the pooling of dense vectors in the registry entry."""
        return None if self.entry.pooling == SPLADE else self.entry.pooling

    @property
    def revision(self) -> str:
        return self.entry.revision or fingerprint_directory(self.directory, self.weights)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.require("config.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def architecture(self) -> str:
        """Return the first architecture in config.json; empty if there is none."""
        return str((self.config.get("architectures") or [""])[0])

    @cached_property
    def weights(self) -> list[Path]:
        """Return the files of the transformer's weights; empty if none are needed."""
        return find_weights(self.directory, self.name) if self.needs_weights else []

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """Return the headers of all tensors by name; empty if the weights are not here."""
        paths = self.weights or list_weights(self.directory)
        return {name: header for path in paths for name, header in read_header(path).items()}

    @property
    def num_parameters(self) -> int | None:
        return sum(math.prod(header.shape) for header in self.headers.values()) if self.headers else None

    @cached_property
    def modules(self) -> list[dict[str, Any]]:
        """Return the modules of sentence-transformers in order; empty for other layouts."""
        path = self.directory / "modules.json"
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        modules = sorted(listed, key=lambda entry: int(entry["idx"]))
        return [module for module in modules if find_kind(module) != "Dropout"]  # no effect outside training

    @property
    def kinds(self) -> list[str]:
        return [find_kind(module) for module in self.modules]

    def list_dense(self) -> list[str]:
        """Return the folders of the Dense modules, in order."""
        return [str(module["path"]) for module in self.modules if find_kind(module) == "Dense"]

    def read_module(self, number: int) -> dict[str, Any]:
        """Return the config.json of a module. Raise ModelError if there is none."""
        return self.require(f"{self.modules[number]['path']}/config.json")

    @cached_property
    def transformer(self) -> dict[str, Any]:
        """Return the settings of the module Transformer; empty in other layouts."""
        folder = self.modules[0]["path"] if self.modules else None
        found = [] if folder is None else [Path(folder, name) for name in TRANSFORMER_CONFIGS]
        return next((self.read(str(path)) for path in found if (self.directory / path).is_file()), {})

    @cached_property
    def encoder(self) -> dict[str, Any]:
        """Return what sentence-transformers and PyLate keep about the whole model."""
        return self.read("config_sentence_transformers.json")

    def read_prompts(self) -> tuple[dict[str, str], str]:
        """Return the prompts by name, and the one used by default."""
        told = self.encoder.get("prompts") or {}
        prompts = {key: text for key, text in told.items() if isinstance(text, str)}
        return prompts, prompts.get(self.encoder.get("default_prompt_name") or "", "")

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Return the ids of all tokens; empty without a tokenizer.json."""
        tokenizer = self.read("tokenizer.json")
        known = tokenizer.get("model", {}).get("vocab", {})
        ids = (
            {entry[0]: number for number, entry in enumerate(known)}
            if isinstance(known, list)
            else dict(known)
        )
        return ids | {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}

    def find_special(self, *roles: str) -> tuple[int, ...]:
        """Return the ids of those special tokens, such as mask_token, that the tokenizer has."""
        named = self.read("special_tokens_map.json") | self.read("tokenizer_config.json")
        values = [named.get(role) for role in roles]
        texts = [value.get("content") if isinstance(value, dict) else value for value in values]
        return tuple(self.tokens[text] for text in texts if text in self.tokens)

    def read_shape(
        self,
        config: Mapping[str, Any],
        prefix: str = "",
        *,
        dense: Sequence[str] = (),
        has_head: bool = False,
    ) -> ModelShape:
        """Return the shape by a transformer's configuration and its tensors, whose names may have a `prefix`."""

        def find(*keys: str) -> int:
            return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)

        hidden_size = find("hidden_size", "d_model", "dim")
        num_heads = find("num_attention_heads", "n_heads", "num_heads")
        modules = [self.require(f"{folder}/config.json") for folder in dense]
        shape = ModelShape(
            num_layers=find("num_hidden_layers", "n_layers", "num_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_key_value_heads=find("num_key_value_heads") or num_heads,
            head_size=find("head_dim") or hidden_size // max(1, num_heads),
            intermediate_size=find("intermediate_size", "hidden_dim", "d_ff", "ffn_dim"),
            vocab_size=find("vocab_size"),
            model_type=str(config.get("model_type", "")),
            dense_values=sum(
                int(each["out_features"]) * (int(each["in_features"]) + bool(each.get("bias", True)))
                for each in modules
            ),
        )
        floats = {
            name.removeprefix(prefix): each.shape for name, each in self.headers.items() if each.is_float
        }
        return shape.fill(floats, has_head=has_head)

    def find_window(self, config: dict[str, Any]) -> int:
        """Return the number of positions of a transformer, or less if its tokenizer has a lower limit."""
        positions = config.get("max_position_embeddings") or -1
        limit = positions if positions > 0 else LARGEST_MAX_TOKENS
        if find_family(str(config.get("model_type"))).has_offset:
            limit -= int(config.get("pad_token_id") or 0) + 1
        told = self.read("tokenizer_config.json").get("model_max_length")
        if isinstance(told, (int, float)) and told > 0:
            limit = min(limit, int(min(told, LARGEST_MAX_TOKENS)))
        return limit

    def choose_max_tokens(self, window: int, own: int) -> int:
        """Return how many tokens are read: as registered, or else `own`. Raise ModelError above the window."""
        wanted = self.entry.max_tokens
        if wanted is not None and wanted > window:
            raise ModelError(
                f"max_tokens {wanted} exceeds the {window} tokens that the model {self.name!r} can read."
            )
        return wanted or min(own, LARGEST_MAX_TOKENS)

    def require_inside(self, folder: str) -> None:
        """Raise ModelError if a module is outside the model's directory, by its path or by symbolic links.

        A snapshot in the hub's cache consists of links into the blobs two folders above it, which are allowed.
        """
        home = self.directory.resolve()
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        place = (home / folder).resolve()
        files = [path.resolve() for path in place.glob("*")] if folder and place.is_relative_to(home) else []
        outside = [path for path in files if not (path.is_relative_to(home) or path.is_relative_to(blobs))]
        if not place.is_relative_to(home) or outside:
            raise ModelError(
                f"modules.json of model {self.name!r} refers to a path outside the model directory: {folder!r} "
                f"resolves to {outside[0] if outside else place}. Copy the missing files into {self.directory}."
            )


def find_kind(module: dict[str, Any]) -> str:
    """Return the kind of a module: the last part of its import path, whose rest differs between versions."""
    return str(module["type"]).rsplit(".", 1)[-1]
