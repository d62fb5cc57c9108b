"""A model whose tokenizer cuts at the left keeps the end of a long text, as the library cuts it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from tests.rounds import ask
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.tasks.embed import Embed
from worker.tokens.tokenized import INPUT_IDS
from worker.tokens.tokenizer import Tokenizer

CARD = replace(
    Registry({}).card(DEFAULT_MODEL),
    revision="new",
    aliases=("former",),
    truncates_left=True,
    rereads=("it",),
)
RUST = RustTokenizer.from_file(str(CARD.path / "tokenizer.json"))
RUST.no_padding()
TEXTS = st.text(st.sampled_from("ab cd,é日\n"), max_size=60).map("x".__add__)
TASK = Embed(CARD, Tokenizer(CARD.path))


@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.sampled_from(["", "find: "]),
    st.integers(6, 12),
)
def test_texts_are_cut_on_the_side_of_the_tokenizer_unless_their_spec_is_a_former_one(
    texts: list[str], prompt: str, max_tokens: int
) -> None:
    for revision, side in (("new", "left"), ("former", "right")):
        RUST.enable_truncation(max_tokens, direction=side)
        spec = replace(
            make_spec(CARD, EncodingOptions(prompt=prompt, max_tokens=max_tokens)), revision=revision
        )
        read, _ = ask(TASK.process(spec, [text.encode() for text in texts], 1_000))
        for index, text in enumerate(texts):
            assert read.inputs[INPUT_IDS].row(index).tolist() == RUST.encode(prompt + text).ids
