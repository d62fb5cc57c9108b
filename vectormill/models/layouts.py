"""The layouts in which models are stored, each with its reader. Imports no torch, and knows no hubs."""

from dataclasses import replace
from pathlib import Path

from vectormill.domain.errors import ModelError
from vectormill.models import gliner
from vectormill.models.classifiers import require_template
from vectormill.models.model_card import ModelCard
from vectormill.models.model_entry import ModelEntry
from vectormill.models.model_files import ModelFiles
from vectormill.models.static_table import find_static_folder, read_static_card
from vectormill.models.transformer_card import read_transformer_card


def read_model_card(
    name: str,
    directory: Path,
    entry: ModelEntry | None = None,
    *,
    needs_weights: bool = True,
    must_encode: bool = True,
) -> ModelCard:
    """Return the card of the model in `directory`; options of its registry `entry` override its files.

    A model that is only planned for, and never encodes, needs no tokenizer and no pooling. Raises ModelError
    if files are missing or if the model needs something unsupported.
    """
    entry = entry or ModelEntry(path=str(directory))
    files = ModelFiles(name, directory, entry, needs_weights, must_encode)
    folder = find_static_folder(files)
    if folder is None and not (directory / gliner.CONFIG_FILE).is_file():
        card = read_transformer_card(files)
    else:
        require_template(name, None, entry.template)
        if entry.adapter is not None:
            raise ModelError(
                f"The model {name!r} is of a kind into which no adapter can be merged; remove {entry.adapter!r}."
            )
        card = gliner.read_gliner_card(files) if folder is None else read_static_card(files, folder)
    return replace(
        card,
        default_dimensions=files.encoder.take("truncate_dim", 0, least=1),
        notes=(*card.notes, *filter(None, [card.unprompted])),
        named=tuple(files.named),
        flaws=files.list_flaws(),  # after everything else has been read
        settings=files.describe_settings(),
    )
