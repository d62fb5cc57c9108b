"""Read the card and the configuration of a GLiNER, and refuse its kinds that are not supported. Reads no weights.

A GLiNER finds spans of words for labels that stand before the text. Source: Zaratiana et al., GLiNER (2024), and the
package gliner (0.2.29, https://github.com/urchade/GLiNER), whose class UniEncoderSpanGLiNER is meant here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.families import FAMILIES, find_family
from vectormill.models.model_card import GLINER, GlinerConfig, ModelCard
from vectormill.models.model_files import ModelFiles
from vectormill.models.poolings import MEAN
from vectormill.models.transformer_card import read_special_tokens

CONFIG_FILE: Final = "gliner_config.json"
# Tensors of the encoder, under their names in transformers behind this.
ENCODER_PREFIX: Final = "token_rep_layer.bert_layer.model."
# The settings that make another network, and the only value that is supported; None stands for false, too.
SUPPORTED: Final[Mapping[str, Any]] = {
    "span_mode": "markerV0",
    "subtoken_pooling": "first",
    "words_splitter_type": "whitespace",
    "fuse_layers": None,
    "post_fusion_schema": None,
    "span_encoder_config": None,
    "precomputed_prompts_mode": None,
    "labels_encoder": None,
    "labels_decoder": None,
    "relations_layer": None,
}
# A window of so many tokens holds the 384 words that such models read, and their labels.
MOST_TOKENS: Final = 1024


def read_gliner_card(files: ModelFiles) -> ModelCard:
    if files.entry.pooling is not None or files.entry.normalize is not None:
        raise ModelError(
            f"The model {files.name!r} is a {GLINER}, to which neither pooling nor normalize applies."
        )
    config = read_gliner_config(files)
    limit = {} if config.has_positions else {"max_position_embeddings": MOST_TOKENS}
    encoder = replace(files.read(CONFIG_FILE).inner("encoder_config"), values={**config.encoder, **limit})
    window, usual = files.find_window(encoder, most=MOST_TOKENS)
    return ModelCard(
        name=files.name,
        path=files.directory,
        revision=files.revision,
        architecture=GLINER,
        dimension=0,
        max_tokens=files.choose_max_tokens(window, usual),
        pooling=(MEAN,),
        normalize=False,
        num_parameters=files.num_parameters,
        extractor=GLINER,
        gliner=config,
        special=read_special_tokens(files),
        shape=files.read_shape(encoder, ENCODER_PREFIX),
    )


def read_gliner_config(files: ModelFiles) -> GlinerConfig:
    """Return the configuration. Raise ModelError if it cannot be read or is of an unsupported kind."""
    name, config = files.name, files.read(CONFIG_FILE)
    for key, supported in SUPPORTED.items():
        found = config.find(key) or supported
        if found != supported:
            only = f"only {supported!r} is" if supported else "which is not"
            raise UnsupportedModel(f"The GLiNER {name!r} has {key} {found!r}, {only} supported.")
    encoder = dict(config.take("encoder_config", {}))
    if not encoder or not (files.directory / "tokenizer.json").is_file():
        raise ModelError(
            f"The GLiNER {name!r} lacks {'tokenizer.json' if encoder else 'encoder_config in ' + CONFIG_FILE}. Write "
            "both with the package gliner: GLiNER.from_pretrained(…).save_pretrained(…)."
        )
    family = str(encoder.setdefault("model_type", "deberta-v2"))
    if family not in FAMILIES or find_family(family).is_causal:
        raise UnsupportedModel(
            f"The GLiNER {name!r} has an encoder of the architecture {family!r}, which is not supported."
        )
    return GlinerConfig(
        encoder=encoder,
        hidden_size=config.count("hidden_size"),
        max_width=config.count("max_width"),
        max_words=config.count("max_len"),
        num_rnn_layers=config.take("num_rnn_layers", 1, least=0),
        marker=config.take("ent_token", "<<ENT>>"),
        separator=config.take("sep_token", "<<SEP>>"),
        reads_label=not config.take("embed_ent_token", True),
    )
