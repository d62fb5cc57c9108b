"""Read which special tokens a tokenizer puts before and after a text, from its JSON files.

`tokenizer.json` has a template for this. Some transformers classes add further tokens according to
`add_bos_token` and `add_eos_token` in tokenizer_config.json, and some models have a tokenizer with custom
code, which is never run.
"""

from typing import Any, Final

from vectormill.domain.errors import UnsupportedModel
from vectormill.models.model_card import SpecialTokens
from vectormill.models.model_files import ModelFiles
from vectormill.models.stored import Stored, naming

# The classes that rewrite the template according to the two settings (transformers 4, `update_post_processor`
# in models/{llama,code_llama,gemma,cohere,gpt_neox}/tokenization_*_fast.py). Models were trained with the
# result. transformers 5 ignores both settings if there is a tokenizer.json.
APPENDS_FINAL_TOKEN: Final = frozenset(
    f"{name}Tokenizer{ending}"
    for name in ("CodeLlama", "Cohere", "Gemma", "GPTNeoX", "Llama")
    for ending in ("", "Fast")
)
# Tokenizers with custom code that do only the same: gte-Qwen2, as vLLM treats it
# (https://github.com/vllm-project/vllm, `_maybe_fix_gte_tokenizer`).
FINAL_TOKEN_CODE: Final = frozenset(
    {"tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"}
)


def read_special_tokens(files: ModelFiles) -> SpecialTokens:
    """Return the special tokens before and after each text.

    Raise UnsupportedModel if the files do not tell.
    """
    name, config = files.name, files.read("tokenizer_config.json")
    code = _find_code(config)
    foreign = [each for each in code if each not in FINAL_TOKEN_CODE]
    if foreign:
        raise UnsupportedModel(
            f"The tokenizer of model {name!r} has custom code ({foreign[0]}), which is never run, so the tokens that "
            "it adds are unknown. Write a tokenizer.json that gives the same tokens, the special ones by its "
            "post_processor, and remove auto_map from tokenizer_config.json."
        )
    with naming("tokenizer.json", name):
        prefix, suffix = _read_template(files.read("tokenizer.json").take("post_processor", {}))
    wanted = [key for key in ("add_bos_token", "add_eos_token") if config.take(key, False)]
    bos, eos = config.token("bos_token"), config.token("eos_token")
    lacking = [bos] if "add_bos_token" in wanted and bos and bos not in prefix else []
    lacking += [eos] if "add_eos_token" in wanted and eos and eos not in suffix else []
    if not lacking:
        return SpecialTokens(prefix, suffix, has_code=bool(code))
    if not code and config.take("tokenizer_class", "") not in APPENDS_FINAL_TOKEN:
        raise UnsupportedModel(
            f"The files of model {name!r} contradict each other: tokenizer_config.json requires {', '.join(lacking)} "
            f"({', '.join(wanted)}), but the post_processor of tokenizer.json does not add it. Add it there or remove "
            "the setting, whichever matches the training of the model."
        )
    new_prefix = (bos,) if "add_bos_token" in wanted else prefix
    new_suffix = (eos,) if "add_eos_token" in wanted else suffix
    flags = (("add_bos_token", bool(new_prefix)), ("add_eos_token", bool(new_suffix)))
    return SpecialTokens(new_prefix, new_suffix, is_rewritten=True, flags=flags, has_code=bool(code))


def require_final_token(name: str, tokens: SpecialTokens) -> None:
    """Raise UnsupportedModel if no token follows a text: its last word would then represent all of it."""
    if not tokens.suffix:
        raise UnsupportedModel(
            f"The model {name!r} pools the last token, but its tokenizer does not append an end-of-sequence token: "
            "the text's last word would represent all of it. Make tokenizer.json append the token it was trained with, "
            "or set add_eos_token in tokenizer_config.json."
        )


def _find_code(config: Stored) -> list[str]:
    """Return the classes that auto_map names, without the repository before `--`."""
    told = config.find("auto_map") or []
    classes = told.get("AutoTokenizer") or [] if isinstance(told, dict) else told
    names = [classes] if isinstance(classes, str) else classes
    return [str(each).rpartition("--")[2] for each in names if each]


def _read_template(processor: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens before and after a single text in a post_processor of tokenizer.json."""
    kind = (processor or {}).get("type")
    if kind == "Sequence":
        found = [_read_template(each) for each in processor.get("processors", [])]
        return next((each for each in found if each != ((), ())), ((), ()))
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (str(processor["cls"][0]),), (str(processor["sep"][0]),)
    if kind != "TemplateProcessing":
        return (), ()
    parts = [next(iter(part.items())) for part in processor.get("single", [])]
    place = next((number for number, (what, _) in enumerate(parts) if what == "Sequence"), len(parts))
    names = [str(part["id"]) for _, part in parts]
    return tuple(names[:place]), tuple(names[place + 1 :])
