"""Choose the model of a demo: the task's own, a registered one, or one in a directory that is not registered."""

import json
import re
from pathlib import Path
from typing import Final

from vectormill.cli.demos.task_demo import DemoModel, TaskDemo
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import EMBED
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import PREFIX, ModelEntry, Settings

MODELS_VARIABLE: Final = f"{PREFIX}MODELS"
DEFAULT: Final = DemoModel(None, "the default", "The weights are those of the service's default model.")


def choose_weights(
    demo: TaskDemo | None, model: str | None, settings: Settings, directory: Path
) -> DemoModel:
    """Return the model of a demo; raise UnknownModel, ModelError or InvalidOption before anything is started.

    `model` is a name or a directory. None leaves it to the demo, which may write a model into `directory`; without a
    demo the service has its default.
    """
    if model is not None:
        weights = find_weights(model, settings)
    elif demo is not None:
        weights = demo.choose_weights(directory)
    else:
        return DEFAULT
    card = Registry(list_models(settings, weights)).card(str(weights.model))
    make_spec(card, EncodingOptions(task=demo.task, **demo.options) if demo else EncodingOptions(task=EMBED))
    return weights


def find_weights(model: str, settings: Settings) -> DemoModel:
    """Return a registered model, or the model in a directory under the directory's name."""
    path = Path(model).expanduser()
    if model in settings.models or not path.is_dir():
        return DemoModel(model, "asked for", f"The weights are those of {model}.")
    name = re.sub(r"[^\w.-]+", "-", path.resolve().name)
    return DemoModel(name, "asked for", f"The weights are those in {path.resolve()}.", path.resolve())


def find_remote(model: str | None) -> DemoModel:
    """Return a model of a service that runs already. Raise InvalidOption for a directory, which that service cannot
    read.
    """
    if model is None:
        return DEFAULT
    if Path(model).is_dir():
        raise InvalidOption(
            "With --api-url, --model must be a model that is registered with that service, not a directory."
        )
    return DemoModel(model, "asked for", f"The weights are those of {model}.")


def list_models(settings: Settings, weights: DemoModel) -> dict[str, ModelEntry]:
    """Return the models that are registered, and this one."""
    own = {} if weights.path is None else {str(weights.model): ModelEntry(path=str(weights.path))}
    return settings.models | own


def register(settings: Settings, weights: DemoModel) -> dict[str, str]:
    """Return the variables with which a process knows the model; none where it is registered."""
    if weights.path is None:
        return {}
    models = list_models(settings, weights)
    return {
        MODELS_VARIABLE: json.dumps(
            {name: entry.model_dump(exclude_none=True) for name, entry in models.items()}
        )
    }
