"""Which poolings a model uses, by its files, by convention or by its registry entry, and why others cannot be encoded.

A transformer gives a vector for each token. Which of them make the vector of a text depends on how the model
was trained, and a wrong guess silently gives wrong vectors.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.models.families import CONVENTIONS, find_family
from vectormill.models.model_files import SPLADE, ModelFiles
from vectormill.models.rerankers import RERANKERS

CLS: Final = "cls"
MEAN: Final = "mean"
MAX: Final = "max"
MEAN_SQRT_LEN: Final = "mean_sqrt_len"
WEIGHTED_MEAN: Final = "weighted_mean"
LAST_TOKEN: Final = "last_token"  # noqa: S105 - the place of a vector, not a secret

# Our names, in the order in which sentence-transformers concatenates them, with every name it has used for
# them.
POOLING_NAMES: Final = {
    CLS: ("cls", "cls_token"),
    MAX: ("max", "max_tokens"),
    MEAN: ("mean", "mean_tokens"),
    MEAN_SQRT_LEN: ("mean_sqrt_len", "mean_sqrt_len_tokens"),
    WEIGHTED_MEAN: ("weighted_mean", "weightedmean", "weightedmean_tokens"),
    LAST_TOKEN: ("last_token", "lasttoken"),
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """The modes whose vectors are concatenated, the trained head that is ignored for them, and notes on both."""

    modes: tuple[str, ...]
    unread: str = ""
    notes: tuple[str, ...] = ()
    includes_prompt: bool = True


def parse_pooling(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return our names for the pooling modes of "mean", "cls+mean" or a list of names."""
    by_alias = {alias: mode for mode, aliases in POOLING_NAMES.items() for alias in aliases}
    names = text.split("+") if isinstance(text, str) else text
    for name in names:
        if name not in by_alias:
            raise ModelError(
                f"Unknown pooling {name!r}; expected one of {', '.join(POOLING_NAMES)}, or several joined by '+'."
            )
    return tuple(by_alias[name] for name in names)


def read_pooling_module(files: ModelFiles) -> Pooling:
    """Return the pooling in the second module of sentence-transformers; without any mode if it is another one."""
    if files.kinds[1:2] != ["Pooling"]:
        return Pooling(())
    config = files.require(f"{files.modules[1].folder}/config.json")
    modes = tuple(
        mode
        for mode, aliases in POOLING_NAMES.items()
        if True in [config.take(f"pooling_mode_{alias}", False) for alias in aliases]
    )
    told = parse_pooling(config.texts("pooling_mode")) or modes or (MEAN,)
    return Pooling(told, includes_prompt=config.take("include_prompt", True))


def choose_pooling(files: ModelFiles) -> Pooling:
    """Return the pooling of a model without modules.json.

    Refuse it if neither a convention nor its registry entry says how it pools.
    """
    wanted = files.pooling
    head, judges = find_head(files.headers)
    convention = CONVENTIONS.get(files.architecture)
    if convention is not None and not head:  # it would be ignored
        pooling = wanted or MEAN
        whose = "as set in VECTORMILL_MODELS" if wanted else f"by convention, because it is {convention}"
        note = f"It has no modules.json: {pooling} pooling is used {whose}."
        return Pooling(parse_pooling(pooling), notes=(note,))
    if wanted is None:
        return Pooling((MEAN,), notes=files.refuse(describe_plain(files, head)))
    purpose, reader = describe_purpose(files)
    left_out = f"; {head} is ignored" if head else ""
    note = f"It is {purpose}, used with {wanted} pooling as set in VECTORMILL_MODELS{left_out}."
    unread = head if judges else purpose if reader else ""
    return Pooling(parse_pooling(wanted), unread, (note,))


@dataclass(frozen=True, slots=True)
class PromptedFamily:
    """Models of these types, recognized by name, whose authors want a prompt that no file contains.

    Without `includes_prompt` the tokens of the prompt are not pooled over, which no file says either.
    """

    name: str
    pattern: re.Pattern[str]
    model_types: tuple[str, ...]
    prompts: tuple[str, ...]
    includes_prompt: bool = True


PROMPTED_FAMILIES: Final = (
    # https://huggingface.co/intfloat/e5-base-v2 and its siblings: "Each input text should start with …". Not
    # …-instruct, whose queries carry an instruction.
    PromptedFamily(
        "E5",
        re.compile(
            r"(?:^|[\s/]|--)(?:multilingual-)?e5-(?:small|base|large)(?:-v2|-unsupervised)?(?=$|[\s/])"
        ),
        ("bert", "xlm-roberta"),
        ("query: ", "passage: "),
    ),
    # https://huggingface.co/jinaai/jina-embeddings-v3/blob/main/config.json, "task_instructions": those of retrieval
    # alone. The adapter is named in what the pattern is looked for in.
    PromptedFamily(
        "jina-embeddings-v3 with an adapter for retrieval",
        re.compile(r"jina-embeddings-v3.* retrieval[._]"),
        ("jina_embeddings_v3",),
        ("Represent the query for retrieving evidence documents: ", "Represent the document for retrieval: "),
    ),
    # https://huggingface.co/hkunlp/instructor-large; sentence-transformers 6.2.0 excludes the prompts of these three
    # by their names too (`sentence_transformer/model.py`).
    PromptedFamily(
        "INSTRUCTOR",
        re.compile(r"(?:^|[\s/]|--)instructor-(?:base|large|xl)(?=$|[\s/])"),
        ("t5",),
        ("Represent the sentence for retrieval: ",),
        includes_prompt=False,
    ),
)

LATE_INTERACTION: Final = "a late-interaction model (ColBERT), which keeps a vector for each token"
SPARSE: Final = "a sparse encoder (SPLADE), whose vectors have a number for each word of the vocabulary"
GENERATIVE_RERANKER: Final = "a generative reranker, which scores a pair by the probability of a word"
NO_TASK: Final = "no task supports it"
TEMPLATE_NEEDED: Final = (
    f"if it scores as one of {', '.join(row.name for row in RERANKERS)} does, set that as its template in "
    "VECTORMILL_MODELS"
)

# The end of an architecture's name, what such a model is, and the task that uses it or similar models.
PURPOSES: Final = (
    ("ColBERT", LATE_INTERACTION, NO_TASK),
    (
        "LayerWiseMiniCPMForCausalLM",
        "a layerwise reranker (bge-reranker-v2-minicpm-layerwise), which scores after any of its layers by code of its "
        "own that is never run",
        NO_TASK,
    ),
    (
        "CostWiseGemmaForCausalLM",
        "a layerwise reranker (bge-reranker-v2.5-gemma2-lightweight), which compresses tokens between its layers by "
        "code of its own that is never run",
        NO_TASK,
    ),
    ("ForCausalLM", "a causal language model, which was trained to predict the next token", ""),
    ("ForMaskedLM", "a masked language model, which was trained to predict masked tokens", ""),
    ("ForPreTraining", "a pretrained model, which was trained to predict masked tokens", ""),
    ("ForConditionalGeneration", "an encoder-decoder model, of which only one stack would be used", ""),
    ("ForTokenClassification", "a model that labels tokens", NO_TASK),
    ("ForQuestionAnswering", "a model that finds answers in texts", NO_TASK),
    ("ForMultipleChoice", "a model that chooses among answers", NO_TASK),
)


# How the name of an architecture begins whose code comes with its repository, the key of config.json without which
# it is not meant, if there is one, what such a model is, and what to do instead.
REPOSITORY_CODE: Final = (
    ("JinaBert", "", "jina-embeddings-v2", "no conversion is known; jina-embeddings-v3-hf runs"),
    (
        "JinaEmbeddingsV4",
        "",
        "jina-embeddings-v4, a model of images and texts",
        "no conversion of its texts is known; jina-embeddings-v3-hf runs",
    ),
    (
        "New",
        "",
        "gte v1.5 and gte-multilingual as first published",
        "transformers has the architecture as gte, and reads the same weights: take a revision whose config.json has "
        "the model_type gte",
    ),
    (
        "NomicBert",
        "n_embd",
        "nomic-embed as first published",
        "transformers has the architecture as nomic_bert, and reads the same weights: take a revision whose "
        "config.json has hidden_size instead of n_embd",
    ),
    ("NVEmbed", "", "NV-Embed, which pools by layers of attention of its own", "no conversion is known"),
)
# The kind of model that sentence-transformers' and PyLate's modules make, by the last part of a module's type.
MODULE_PURPOSES: Final = {
    "Router": "a model with a path of its own for queries",
    "SparseStaticEmbedding": "a sparse encoder that weighs the words of queries without a transformer",
    "SparseAutoEncoder": "a sparse autoencoder, whose numbers belong to no words",
    "HierarchicalTokenPooling": "a late-interaction model (ColBERT) that joins the vectors of several tokens",
    "WordEmbeddings": "a table of word embeddings, without a transformer",
    "CLIPModel": "a model of images and texts",
}
_WORDS: Final = "a language-model head"
# The first part of a tensor's name -> the head it belongs to, which a bare transformer does not read. All but those
# that predict words judge a text or a pair.
_HEADS: Final = {
    "classifier": "a classifier's head",
    "pre_classifier": "a classifier's head",
    "score": "a classifier's or reranker's head",
    "linear": "ColBERT's projection",
    "qa_outputs": "a question-answering head",
} | dict.fromkeys(("cls", "lm_head", "vocab_projector", "vocab_transform"), _WORDS)


def find_head(tensors: Collection[str]) -> tuple[str, bool]:
    """Return what the weights of a head among the tensors are for, empty if there is none, and whether it judges.

    A head that judges takes precedence over one that predicts words.
    """
    purposes = ((name, _HEADS.get(name.partition(".")[0], "")) for name in sorted(tensors))
    heads = [(purpose == _WORDS, f"{purpose} ({name})") for name, purpose in purposes if purpose]
    predicts_words, purpose = min(heads, key=lambda head: head[0], default=(True, ""))
    return purpose, not predicts_words


def judge_code(files: ModelFiles) -> tuple[str, ...]:
    """Refuse a model of REPOSITORY_CODE, or a decoder whose code may attend both ways; return notes.

    gte-Qwen2 is such a decoder, and says `is_causal: false`, which transformers reads too.
    """
    code = files.config.inner("auto_map").find("AutoModel")
    if code and "is_causal" not in files.config.values and find_family(files.model_type).is_causal:
        return files.refuse(
            f"The model {files.name!r} has code of its own ({code}), which is never run. Transformers' "
            f"{files.model_type} reads texts from left to right, and no file says whether that code does: set "
            "is_causal in config.json, to false if it attends both ways."
        )
    for beginning, key, what, way in REPOSITORY_CODE:
        is_it = files.architecture.startswith(beginning) and (key in files.config.values or not key)
        if is_it and "auto_map" in files.config.values:
            return files.refuse(
                f"The model {files.name!r} is {what} ({files.architecture}), whose code comes with its repository and "
                f"is never run; {way}."
            )
    return ()


def describe_plain(files: ModelFiles, head: str) -> str:
    """Return why a model that does not say how to encode is refused, naming the task or option to use."""
    purpose, reader = describe_purpose(files)
    what = f"The model {files.name!r} is {purpose}"
    if head and files.architecture in CONVENTIONS:
        what += f", but its weights include {head}, which would be ignored"
    way = (
        "nothing defines how its tokens become the vector of a text: it has no modules.json. If it was trained to "
        f'embed texts, set its pooling in VECTORMILL_MODELS: {{"{files.name}": {{"path": …, "pooling": "mean"}}}}'
    )
    return f"{what}; {reader + ', and ' if reader else ''}{way}."


def judge_adapters(files: ModelFiles) -> tuple[str, ...]:
    """Return notes on a model's adapters for tasks; empty if it has none.

    Refuse it if it has some and neither an adapter nor a pooling is registered. jinaai/jina-embeddings-v3 lists them
    in its config.json. The transformers class for its conversion (…-hf) has no adapters, so this is decided by the
    architecture.
    """
    if files.entry.adapter is not None:
        return (f"The adapter {files.entry.adapter} is merged into its weights.",)
    named = ", ".join(files.config.texts("lora_adaptations"))
    if not named and files.architecture != "JinaEmbeddingsV3Model":
        return ()
    adapters = f"an adapter (LoRA) for each task{f' ({named})' if named else ''}"
    if files.pooling is not None:
        return (f"Such a model is trained with {adapters}; adapters outside its weights are ignored.",)
    return files.refuse(
        f"The model {files.name!r} was trained with {adapters}, and none is chosen: without it the vectors would "
        "differ. Take its conversion for transformers (jinaai/jina-embeddings-v3-hf), whose adapters are folders, and "
        f'name one in VECTORMILL_MODELS: {{"{files.name}": {{"path": …, "adapter": "retrieval_query"}}}}'
        "; with a pooling and no adapter, its weights are used as they are."
    )


def find_prompted_family(called: str, model_type: str) -> PromptedFamily | None:
    """Return the family of a model that is called so, if its authors want a prompt that no file contains."""
    rows = (family for family in PROMPTED_FAMILIES if model_type in family.model_types)
    return next((family for family in rows if family.pattern.search(called)), None)


def tell_prompts(called: str, model_type: str, prompts: Mapping[str, str], default: str) -> str:
    """Return a warning about texts without a prompt; empty if the authors want none or one is the default.

    `called` is the model's name and directory.
    """
    spoken = sorted(key for key, text in prompts.items() if text)
    if default:
        return ""
    if spoken:
        return (
            f"The model defines prompts ({', '.join(spoken)}) but no default: texts are encoded without one unless "
            "`prompt` names one, which gives worse vectors if the model was trained with them."
        )
    family = find_prompted_family(called, model_type)
    if family is None:
        return ""
    wanted = " or ".join(f'"{prompt}"' for prompt in family.prompts)
    begin = "should begin with" if family.includes_prompt else "should begin with a prompt such as"
    return (
        f"By its name the model belongs to the family {family.name}, whose texts {begin} {wanted}, but its "
        "files define no prompt: texts are encoded without one unless `prompt` gives one, which gives worse vectors."
    )


def describe_purpose(files: ModelFiles) -> tuple[str, str]:
    """Return what a model is, with words that its name helps to choose, and if known, which task uses it."""
    architecture, called = files.architecture, files.called.lower()
    if not architecture:
        return "of unknown kind, because its config.json names no architecture", ""
    if architecture.endswith("ForMaskedLM") and SPLADE in called:
        return f"{SPARSE} ({architecture})", ""
    for ending, purpose, reader in PURPOSES:
        if architecture.endswith(ending):
            if ending == "ForCausalLM" and "rerank" in called:
                purpose, reader = GENERATIVE_RERANKER, TEMPLATE_NEEDED
            return f"{purpose} ({architecture})", reader
    return f"of the architecture {architecture}", ""
