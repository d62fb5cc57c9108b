"""The small files of a model, each read when it is needed, and its registry entry. Reads no weights, loads no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.domain.vector_type import COSINE, DOT
from vectormill.models.families import find_family
from vectormill.models.model_card import DenseLayer
from vectormill.models.model_entry import ModelEntry
from vectormill.models.model_shape import ModelShape
from vectormill.models.stored import Stored, naming, read_json, read_stored, shorten
from vectormill.models.tensor_headers import TensorHeader, fingerprint_directory, read_header
from vectormill.models.weights import find_weights, list_weights

TRANSFORMER_CONFIGS: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
ENCODER_CONFIG: Final = "config_sentence_transformers.json"
# The pooling that a registry entry may name for a plain masked language model.
SPLADE: Final = "splade"
# A tokenizer without a limit reports 10^30.
LARGEST_MAX_TOKENS: Final = 1 << 20
# The tables of learned positions, by the ends of their names, whose rows bound the window.
POSITION_TABLES: Final = ("position_embeddings.weight", "embed_positions.weight", "wpe.weight")
# Scalings of rotary positions by the longest text of a batch, beyond a number of tokens up to which nothing is scaled.
SCALED_BY_LENGTH: Final = ("dynamic", "longrope")
# The attention of a BigBird unless its configuration has another.
BLOCK_SPARSE: Final = "block_sparse"
# The classes of torch.nn that may follow a linear layer; all are made without arguments, and have no weights.
ACTIVATIONS: Final = (
    "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "ReLU",
    "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip
# The names of the key in config.json for the function between the two matrices of a feed-forward block.
ACTIVATION_KEYS: Final = (
    "hidden_activation", "hidden_act", "activation", "activation_function", "dense_act_fn", "feed_forward_proj",
)  # fmt: skip
# The keys of sentence-transformers' files that no result depends on, each with the reason. Every other key is
# honoured, or named in the refusal of the model.
VERSIONS: Final = {"__version__": "the versions of the packages that saved the model"}
WITHOUT_INFLUENCE: Final[Mapping[str, Mapping[str, str]]] = {
    "modules.json": {
        "idx": "the number of a module in the list, whose order counts",
        "name": "the label of a module",
        "kwargs": "the names of arguments that callers of sentence-transformers may pass to the module",
    },
    ENCODER_CONFIG: {
        "model_type": "the class that saved the model, which its modules tell",
        "keep_in_fp32_modules": "which weights stay in fp32 where others are rounded",
    },
    "Transformer": {
        "unpad_inputs": "whether a batch is padded",
        "track_media_counts": "it concerns images",
        "backend": "the engine that computed it before",
    },
    "Pooling": {
        "embedding_dimension": "the width of the transformer's hidden states, which config.json tells",
        "word_embedding_dimension": "the former name of embedding_dimension",
    },
    "SpladePooling": {
        "embedding_dimension": "the size of the vocabulary, which config.json tells",
        "word_embedding_dimension": "the former name of embedding_dimension",
        "chunk_size": "how many tokens were computed at a time",
    },
}


@dataclass(frozen=True, slots=True)
class Module:
    """A module of sentence-transformers: its folder, relative to the model's directory, and the path of its class."""

    folder: str
    type: str

    @property
    def kind(self) -> str:
        """Return the last part of the class's path, whose rest differs between versions."""
        return self.type.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model in `directory`, and its registry `entry`, whose options override them.

    Weights may be missing unless `needs_weights`. A model that need not encode is only planned for, and can do
    without a tokenizer and a pooling. `flaws` collects sentences about settings that former releases skipped and that
    cannot be honoured, and `named` what the name of the model or of its directory decides instead of a file.
    """

    name: str
    directory: Path
    entry: ModelEntry
    needs_weights: bool = True
    must_encode: bool = True
    flaws: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    _read: dict[str, Stored] = field(default_factory=dict)

    def read(self, path: str) -> Stored:
        """Return a JSON object, the same at each call; empty if there is no such file. Raise ModelError if damaged."""
        if path not in self._read:
            self._read[path] = read_stored(self.directory / path, self.name, path)
        return self._read[path]

    def require(self, path: str) -> Stored:
        """Return a JSON object. Raise ModelError if there is no such file."""
        file = self.directory / path
        if not file.is_file():
            raise ModelError(
                f"The model {self.name!r} has no {file.name} in {file.parent}; is this a model directory?"
            )
        return self.read(path)

    def expect(self, stored: Stored, key: str, *values: object) -> None:
        """Take a value that changes nothing if it is one of these, or empty; any other is a flaw."""
        if stored.find(key) not in (None, {}, [], *values):
            told = " or ".join(map(shorten, values))
            self.flaws.append(
                str(stored.refuse(key, f"must be {told} here" if told else "is not supported here"))
            )

    def refuse(self, reason: str) -> tuple[str, ...]:
        """Raise UnsupportedModel; if the model is only planned for, return the reason as a note."""
        if self.must_encode:
            raise UnsupportedModel(reason)
        return (f"No worker will load it: {reason}",)

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
    def config(self) -> Stored:
        return self.require("config.json")

    @property
    def model_type(self) -> str:
        return self.config.take("model_type", "")

    @property
    def architecture(self) -> str:
        """Return the first architecture in config.json; empty if there is none."""
        return next(iter(self.config.texts("architectures")), "")

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
    def modules(self) -> list["Module"]:
        """Return the modules of sentence-transformers in order; empty for other layouts."""
        path = self.directory / "modules.json"
        listed = read_json(path, self.name, list) if path.is_file() else []
        modules = []
        for number, values in enumerate(listed):
            stored = self._read[f"modules.json, {number}"] = Stored(
                values if isinstance(values, dict) else {}, f"modules.json, {number}", self.name
            )
            if not stored.take("type", "") or stored.values.get("path") is None:
                raise ModelError(
                    f"modules.json of model {self.name!r} has no type or no path for module {number}."
                )
            modules.append(Module(stored.take("path", ""), stored.take("type", "")))
        return [module for module in modules if module.kind != "Dropout"]  # no effect outside training

    @property
    def kinds(self) -> list[str]:
        return [module.kind for module in self.modules]

    def list_dense(self) -> list[str]:
        """Return the folders of the Dense modules, in order."""
        return [module.folder for module in self.modules if module.kind == "Dense"]

    def read_changing(self, folder: str, feature: str) -> Stored:
        """Return the configuration of a module that changes this feature of a text; a flaw if it changes another."""
        told = self.read(f"{folder}/config.json")
        for key in ("module_input_name", "module_output_name"):
            self.expect(told, key, feature)
        return told

    def read_dense(self, folder: str, feature: str) -> DenseLayer:
        """Return a module Dense that changes this feature of a text. Raise ModelError if it cannot be computed."""
        told = self.read_changing(folder, feature)
        path = told.take("activation_function", "torch.nn.modules.activation.Tanh")
        activation = path.rsplit(".", 1)[-1]
        if not path.startswith("torch.") or activation not in ACTIVATIONS:
            raise UnsupportedModel(
                str(told.refuse("activation_function", f"must be one of torch.nn's {', '.join(ACTIVATIONS)}"))
            )
        num_inputs, num_outputs = told.count("in_features"), told.count("out_features")
        has_bias, has_residual = told.take("bias", True), told.take("use_residual", False)
        return DenseLayer(folder, num_inputs, num_outputs, has_bias, activation, has_residual)

    @cached_property
    def transformer(self) -> Stored:
        """Return the settings of the module Transformer; empty in other layouts."""
        folder = self.modules[0].folder if self.modules else None
        found = [] if folder is None else [str(Path(folder, name)) for name in TRANSFORMER_CONFIGS]
        path = next((path for path in found if (self.directory / path).is_file()), TRANSFORMER_CONFIGS[0])
        return self.read(path) if found else Stored({}, path, self.name)

    @cached_property
    def encoder(self) -> Stored:
        """Return what sentence-transformers and PyLate keep about the whole model."""
        return self.read(ENCODER_CONFIG)

    def read_prompts(self) -> tuple[dict[str, str], str]:
        """Return the prompts by name, and the one used by default."""
        told = self.encoder.inner("prompts")
        prompts = {key: told.take(key, "") for key, text in told.values.items() if text is not None}
        default = self.encoder.take("default_prompt_name", "")
        if default and default not in told.values:
            self.flaws.append(
                f"{ENCODER_CONFIG} of model {self.name!r} has no prompt {default!r}, its default."
            )
        return prompts, prompts.get(default, "")

    def read_similarity(self, *, has_unit_length: bool) -> tuple[str, tuple[str, ...]]:
        """Return how dense vectors are compared, and a note if their authors compare them in another way."""
        told = self.encoder.take("similarity_fn_name", COSINE)
        if told in (COSINE, DOT):
            return told, ()
        # Distances put vectors of unit length in the order of their cosines.
        note = f"Its authors compare vectors by {told}, and searches by {COSINE}."
        return COSINE, () if has_unit_length else (note,)

    def list_flaws(self) -> tuple[str, ...]:
        """Return why the model is refused: a sentence for each setting that cannot be honoured.

        Among them are those keys of sentence-transformers' files that no reader asked for.
        """
        kinds = {f"{module.folder}/config.json": module.kind for module in self.modules}
        kinds |= {
            ENCODER_CONFIG: ENCODER_CONFIG,
            self.transformer.place: "Transformer",
            "modules.json": "modules.json",
        }
        skipped = (
            f"{place} of model {self.name!r} has {key} {shorten(stored.values[key])}, which Vectormill does not know."
            for place, stored in self._read.items()
            if (kind := kinds.get(place.partition(", ")[0])) is not None
            for key in stored.list_rest({**VERSIONS, **WITHOUT_INFLUENCE.get(kind, {})})
        )
        return (*self.flaws, *skipped)

    def describe_settings(self) -> tuple[str, ...]:
        """Return a line for each file with the values that were taken of it; the tokenizer's own is left out."""
        read = (stored for place, stored in self._read.items() if not place.endswith("tokenizer.json"))
        return tuple(line for stored in read if (line := stored.describe()))

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Return the ids of all tokens; empty without a tokenizer.json."""
        tokenizer = self.read("tokenizer.json")
        with naming("tokenizer.json", self.name):
            known = tokenizer.inner("model").find("vocab") or {}
            is_list = isinstance(known, list)
            ids = {each[0]: number for number, each in enumerate(known)} if is_list else dict(known)
            return ids | {each["content"]: each["id"] for each in tokenizer.take("added_tokens", [])}

    def find_special(self, *roles: str) -> tuple[int, ...]:
        """Return the ids of those special tokens, such as mask_token, that the tokenizer has."""
        files = (self.read("tokenizer_config.json"), self.read("special_tokens_map.json"))
        texts = [next((file.token(role) for file in files if role in file.values), "") for role in roles]
        return tuple(self.tokens[text] for text in texts if text in self.tokens)

    def read_shape(self, config: Stored, prefix: str = "", *, has_head: bool = False) -> ModelShape:
        """Return the shape by a transformer's configuration and its tensors, whose names may have a `prefix`."""

        def find(*keys: str) -> int:
            return next((config.take(key, 0, least=0) for key in keys if config.values.get(key)), 0)

        values, model_type = config.values, config.take("model_type", "")
        looks_both_ways = values.get("is_causal") is False or bool(values.get("use_bidirectional_attention"))
        # The windows of a Longformer's layers may differ.
        blocks = values.get("attention_window") or 0
        # Some layers attend to near tokens only. The window of a Qwen is off unless it is turned on.
        uses_window = values.get("use_sliding_window", not model_type.startswith("qwen"))
        hidden_size = find("hidden_size", "d_model", "dim")
        num_heads = find("num_attention_heads", "n_heads", "num_heads")
        shape = ModelShape(
            num_layers=find("num_hidden_layers", "n_layers", "num_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_key_value_heads=find("num_key_value_heads") or num_heads,
            head_size=find("head_dim") or hidden_size // max(1, num_heads),
            intermediate_size=find("intermediate_size", "hidden_dim", "d_ff", "ffn_dim"),
            vocab_size=find("vocab_size"),
            model_type=model_type,
            sees_later=looks_both_ways or not find_family(model_type).is_causal,
            has_window=bool(uses_window and (values.get("sliding_window") or values.get("local_attention"))),
            block_tokens=max(blocks) if isinstance(blocks, list) else int(blocks),
            activation=str(next((values[key] for key in ACTIVATION_KEYS if values.get(key)), "")),
        )
        floats = {
            name.removeprefix(prefix): each.shape for name, each in self.headers.items() if each.is_float
        }
        return shape.fill(floats, has_head=has_head)

    def find_window(self, config: Stored, *, most: int = LARGEST_MAX_TOKENS) -> tuple[int, int]:
        """Return how many tokens the weights can read, and how many a text has by the tokenizer: at most as many.

        The first is the least of `most`, the positions in the configuration, the rows of a table of positions, and the
        tokens up to which rotary positions and the attention of a BigBird do not depend on other texts: above them
        transformers computes sparse attention, until the first batch of short texts.
        """
        bounds = [most, config.take("max_position_embeddings", 0)]
        tables = [each for name, each in self.headers.items() if name.endswith(POSITION_TABLES)]
        bounds += [each.shape[0] for each in tables]
        family = find_family(config.take("model_type", ""))
        if family.has_offset:
            padding_id = config.take("pad_token_id", 0) if family.padding_id is None else family.padding_id
            offset = padding_id + 1
            bounds[1:] = [bound - offset for bound in bounds[1:]]
        rope = config.inner("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
        # Some families have parameters for each kind of layer.
        for each in [
            rope,
            *(rope.inner(key) for key, value in rope.values.items() if isinstance(value, dict)),
        ]:
            if each.find("rope_type", "type") in SCALED_BY_LENGTH:
                bounds += [place.take("original_max_position_embeddings", 0) for place in (each, config)]
        if family.model_type == "big_bird" and config.take("attention_type", BLOCK_SPARSE) == BLOCK_SPARSE:
            num_blocks = 5 + 2 * config.take("num_random_blocks", 3)
            bounds.append(num_blocks * config.take("block_size", 64))
        window = min(bound for bound in bounds if bound > 0)
        told = self.read("tokenizer_config.json").take("model_max_length", 0.0)
        return window, int(min(window, told)) if told > 0 else window

    def choose_max_tokens(self, window: int, own: int) -> int:
        """Return how many tokens are read: as registered, or else `own`. Raise ModelError above the window."""
        wanted = self.entry.max_tokens
        if wanted is not None and wanted > window:
            raise ModelError(
                f"max_tokens {wanted} exceeds the {window} tokens that the model {self.name!r} can read."
            )
        return wanted or min(own, window)

    def require_inside(self, folder: str) -> None:
        """Raise ModelError if a module is outside the model's directory, by its path or by symbolic links.

        A snapshot in the hub's cache consists of links into the blobs two folders above it, which are allowed.
        """
        if (
            len(Path(folder).parts) > 1
        ):  # the identity of a model is of its folder, and of those directly in it
            self.flaws.append(
                f"modules.json of model {self.name!r} has the path {folder!r}: it must be a single folder."
            )
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
