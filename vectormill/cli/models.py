"""Commands that list, add and remove models.

A model is added where it is used: `add` reads and writes files of this machine, and needs no service.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vectormill.cli.certify import tell_flaws, write_measured
from vectormill.cli.command import Client, command
from vectormill.cli.exits import ITEMS_FAILED
from vectormill.cli.printing import Outcome, listing, print_facts, tell
from vectormill.cli.service import CHOICES, describe_choice, explain_choice
from vectormill.domain.errors import InvalidOption

if TYPE_CHECKING:
    from vectormill.models.model_card import ModelCard
    from vectormill.settings import ModelEntry, Settings

app = typer.Typer(
    epilog="Example: vectormill models add BAAI/bge-m3",
    help="List the registered models; add and remove them.",
)


@command(
    app,
    "vectormill models",
    name="list",
    view=listing(
        "name",
        "task",
        ("outputs", lambda model: ",".join(model["outputs"] or ())),
        "dimension",
        "max_tokens",
        "pooling",
        "normalize",
        "workers",
        "problem",
    ),
    is_default=True,
)
def list_all(client: Client) -> Sequence[Mapping[str, Any]]:
    """List the registered models."""
    return client.models()


def show_model(model: Mapping[str, Any]) -> None:
    """Print a model, and what its files say of it."""
    names = ("name", "task", "dimension", "max_tokens", "pooling", "revision", "problem")
    print_facts(
        [
            *((name, model[name]) for name in names),
            *(("setting", setting) for setting in model["settings"]),
            *(("note", note) for note in model["notes"]),
        ]
    )


@command(app, "vectormill models show all-MiniLM-L6-v2", view=show_model)
def show(client: Client, name: str) -> Mapping[str, Any]:
    """Show a registered model: which settings of its files are honoured, and what cannot be.

    Args:
        name (NAME): The name of the model.
    """
    models = {model["name"]: model for model in client.models()}
    if name not in models:
        raise InvalidOption(f"Unknown model {name!r}. Registered models: {', '.join(models)}.")
    return models[name]


def show_added(added: Mapping[str, Any]) -> None:
    report = added["report"] or {}
    print_facts(
        [
            *((name, added[name]) for name in ("name", "path", "revision", "task")),
            ("outputs", ",".join(added["outputs"])),
            ("dimension", added["dimension"]),
            ("longest text", f"{added['max_tokens']:,} tokens"),
            *((name, explain_choice(report, name)) for name in CHOICES if name in report),
            *(("setting", setting) for setting in added["settings"]),
            *(("note", note) for note in added["notes"]),
        ]
    )


@command(
    app,
    "vectormill models add BAAI/bge-m3",
    "vectormill models add ./my-model --name mine --certify",
    note="Exit codes: 0 added, 1 not added, since its results differ from the reference, 2 bad usage, or refused.",
    view=show_added,
)
def add(
    model: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_tokens: int | None = None,
    template: str | None = None,
    adapter: str | None = None,
    certify: bool = False,
    data_dir: Path | None = None,
) -> Outcome:
    """Fetch a model, check that workers here can run it, convert it for them, and register it.

    The API, the indexer and workers on this data directory then know it by its name; a running API needs no restart.
    For a model that is registered already, all but the last is done. HF_TOKEN has the token for the hub, and
    HF_ENDPOINT the address of a mirror.

    Args:
        model (NAME|PATH): OWNER/NAME on the Hugging Face hub, a directory, or a registered model.
        name (NAME): The name for jobs. By default, the last part of NAME or PATH.
        revision (REVISION): A commit, tag or branch on the hub. The commit that is found is registered.
        pooling (POOLING): Overrides the model's own pooling, such as mean.
        normalize: Override whether vectors have unit length.
        max_tokens (N, from 3): Override the model's longest input.
        template (TEMPLATE): How a generative reranker's pairs are put into words.
        adapter (FOLDER): The folder of an adapter (LoRA) that is merged into the weights.
        certify: Compare its results with its authors' code, in the way workers here would run it, before it is
            registered.
    """
    from vectormill.models.registry import change_added, name_added, open_registry, read_added
    from vectormill.models.specs import find_own_task
    from vectormill.settings import ModelEntry, load_settings

    settings = load_settings(data_dir=data_dir)
    file = name_added(settings)
    given: dict[str, Any] = {
        "revision": revision, "pooling": pooling, "normalize": normalize, "max_tokens": max_tokens,
        "template": template, "adapter": adapter,
    }  # fmt: skip
    options = {option: value for option, value in given.items() if value is not None}
    known = registry = open_registry(settings)
    read_added(file)  # if it is damaged, refused before all the work
    is_new = model not in registry.names() or name is not None or bool(options)
    if is_new:
        directory = Path(model).expanduser()
        path = str(directory.resolve()) if directory.is_dir() else model
        name = name or Path(path).name
        if name in settings.models:
            raise InvalidOption(f"VECTORMILL_MODELS has a model {name!r}; choose another one with --name.")
        entry = ModelEntry(path=path, **options)
        registry = open_registry(settings.model_copy(update={"models": {name: entry}}))
    name = name or model
    card = registry.card(name)  # refused from its small files, if at all
    card.require_honoured()
    entry = registry.entry(name)
    if not Path(entry.path).is_dir():
        # The folder of a snapshot has the name of its commit; the card's revision also names an adapter.
        entry = replace(entry, revision=card.path.name)

    def enter(entries: "Mapping[str, ModelEntry]") -> "dict[str, ModelEntry]":
        if entries.get(name, entry) != entry:
            raise InvalidOption(
                f"A model {name!r} is registered already with other options or files; remove it first, or choose "
                "another name with --name."
            )
        return {**entries, name: entry}

    if is_new and name in known.names():
        enter({name: known.entry(name)})
    card = registry.card(name, weights=True)
    report = try_to_load(card, settings)
    facts = ("dimension", "max_tokens", "outputs", "settings", "notes", "revision")
    answer = {
        **asdict(entry),
        **{fact: getattr(card, fact) for fact in facts},
        "name": name,
        "task": find_own_task(card),
        "report": report,
    }
    if certify and has_flaws(card, report, settings):
        return Outcome(answer, ITEMS_FAILED)
    if is_new:
        change_added(file, enter)  # another command may have added the name meanwhile
        tell(
            f"Registered {name} in {file}. On other machines set VECTORMILL_MODELS to "
            f"{json.dumps({name: entry.options})}."
        )
    tell(f"Start a worker with `vectormill worker --model {name}`.")
    return Outcome(answer, 0)


def try_to_load(card: "ModelCard", settings: "Settings") -> "Mapping[str, Any] | None":
    """Return the report of a worker that has loaded the model; None, with the reason told, if it was not loaded."""
    if find_spec("torch") is None:
        tell(
            "It was not loaded: this installation has no torch, so workers convert it when they first load it."
        )
        return None
    from worker.launcher import prepare

    report = prepare(card, settings)
    if report is None:
        tell("It was not loaded: it is spread over several devices (`vectormill plan` shows how).")
    return report


def has_flaws(card: "ModelCard", report: "Mapping[str, Any] | None", settings: "Settings") -> bool:
    """Certify the model in the way in which a worker has loaded it, and return whether a promise is broken."""
    from worker.certificates.certificate import name_certificate
    from worker.certificates.measuring import Choices
    from worker.settings import load_worker_settings

    backend, precision = (describe_choice(report or {}, name)[0] for name in ("backend", "precision"))
    devices = load_worker_settings().devices
    choices = Choices(devices) if report is None else Choices(devices, precision, backend)
    path = name_certificate(settings.data_dir, card.name)
    return bool(tell_flaws(write_measured(card, choices, None, settings, path)))


@command(app, "vectormill models remove my-model")
def remove(name: str, *, data_dir: Path | None = None) -> str:
    """Forget a model that was added. Its files stay, and so do the results of its jobs.

    Args:
        name (NAME): The name of the model.
    """
    from vectormill.models.registry import change_added, name_added
    from vectormill.settings import load_settings

    file = name_added(load_settings(data_dir=data_dir))

    def forget(entries: "dict[str, ModelEntry]") -> "dict[str, ModelEntry]":
        if name not in entries:
            raise InvalidOption(f"{file} has no model {name!r}; it has {', '.join(entries) or 'none'}.")
        return {other: entry for other, entry in entries.items() if other != name}

    change_added(file, forget)
    return f"Removed {name} from {file}."
