"""A prompt that leaves no room for a text is refused, and no two long texts get the same tokens in silence."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from tests.rounds import ask
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import TOO_MANY_TOKENS
from vectormill.models.prompt_room import leaves_room, require_room
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.tasks.embed import Embed
from worker.tasks.score import Classify
from worker.tokens.tokenized import INPUT_IDS
from worker.tokens.tokenizer import Tokenizer

CARD = Registry({}).card(DEFAULT_MODEL)
RUST = RustTokenizer.from_file(str(CARD.path / "tokenizer.json"))
RUST.no_padding()
RUST.no_truncation()
TOKENIZER = Tokenizer(CARD.path)
WORDS = "fifteen words of a prompt that leave no room for any text which follows them "
LONG = [
    "one text of many words, " * 4,
    "and another one of as many words, " * 4,
    "1 2 3 4 5 6 7 8 9 10 11 12 13",
]


@given(prompt=st.text(max_size=40), max_tokens=st.integers(2, 300))
@example(prompt=WORDS, max_tokens=17)
@example(prompt="\ufdfa" * 14, max_tokens=256)  # each of which is normalized to eighteen characters
@example(prompt="為這個句子生成表示以用於檢索相關文章：", max_tokens=20)
def test_a_prompt_is_refused_where_the_tokenizer_leaves_no_room(prompt: str, max_tokens: int) -> None:
    spec = replace(make_spec(CARD, EncodingOptions()), prompt=prompt, max_tokens=max_tokens)
    has_room = (
        not prompt
        or len(RUST.encode(prompt)) < max_tokens
        or not RUST.encode(prompt, add_special_tokens=False).ids
    )
    assert has_room or not leaves_room(spec), "what is certain is so"
    if has_room:
        require_room(CARD, spec)
        return
    with pytest.raises(InvalidOption, match="leaves no room for the text; use a shorter prompt"):
        require_room(CARD, spec)


def test_options_are_refused_by_name_and_length_of_their_prompt() -> None:
    card = replace(CARD, prompts={"query": WORDS})
    with pytest.raises(
        InvalidOption, match=r"^No text can be encoded: the prompt 'fifteen words .* leaves no room"
    ):
        make_spec(card, EncodingOptions(prompt="query", max_tokens=16))
    with pytest.raises(InvalidOption, match="leaves no room"):
        make_spec(card, EncodingOptions(prompt="query", max_tokens=16, task=JUDGE))
    with pytest.raises(InvalidOption, match="The prompt has 1,000,000 characters"):
        make_spec(card, EncodingOptions(prompt="a" * 1_000_000))
    assert make_spec(card, EncodingOptions(prompt="query", max_tokens=18)).prompt == WORDS


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("max_tokens", range(12, 24))
def test_long_texts_fail_where_their_prompt_leaves_none_of_their_tokens(
    include_prompt: bool, max_tokens: int
) -> None:
    card = replace(CARD, include_prompt=include_prompt)
    spec = replace(make_spec(card, EncodingOptions()), prompt=WORDS, max_tokens=max_tokens)
    texts = [text.encode() for text in LONG]
    for task in (Embed(card, TOKENIZER), Classify(TOKENIZER, 256)):
        read, _ = ask(task.process(spec, texts, 1000))
        rows = {tuple(read.inputs[INPUT_IDS].row(row).tolist()) for row in range(len(LONG))}
        if len(RUST.encode(WORDS)) < max_tokens:
            assert len(rows) == len(LONG)
            assert not read.failures
        else:
            assert rows == {()}
            assert {failure.code for failure in read.failures.values()} == {TOO_MANY_TOKENS}
            assert f"max_tokens is {max_tokens}, which leaves no room" in read.failures[0].detail
            assert len(read.failures) == len(LONG)
    fitting, _ = ask(Embed(card, TOKENIZER).process(replace(spec, prompt="a b c "), [b"d", texts[0]], 1000))
    assert not fitting.failures
