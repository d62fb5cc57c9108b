"""How many tokens a text has, about, and how large the chunks of a job become."""

import json
from dataclasses import replace

import pytest

from tests.protocol import SPEC
from vectormill.domain.encoding import PASSAGES
from vectormill.domain.task import EXTRACT
from vectormill.jobs.chunk import (
    LARGEST_CHUNK_TOKENS,
    SMALLEST_CHUNK_TOKENS,
    TokenEstimate,
    choose_chunk_tokens,
    estimate_tokens,
)


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("", 0),
        ("A quick look at it.", 4),
        ("向量数据库" * 4, 20),  # a token each
        ("вектор" * 4, 15),  # between one with a multilingual vocabulary and four with an English one
        ("e\u0301 " * 8, 9),
    ],
)
def test_tokens_are_estimated_from_bytes_and_letters(text: str, num_tokens: int) -> None:
    assert estimate_tokens(text.encode()) == num_tokens


def test_a_text_that_is_no_unicode_is_estimated_too() -> None:
    assert estimate_tokens(b"\xff\xfe\xed\xa0\x80") > 0


def test_what_is_cut_off_is_not_counted_and_what_is_read_in_passages_is() -> None:
    long = b"x" * 4096
    assert TokenEstimate(SPEC).of(long) == SPEC.max_tokens
    assert TokenEstimate(replace(SPEC, long_texts=PASSAGES, passage_overlap=8)).of(long) == 1024 + 2


def test_the_prompt_is_counted_with_every_text() -> None:
    assert TokenEstimate(replace(SPEC, prompt="search: ")).of(b"four") == 2 + 1 + 2


SCHEMA = '{"city": null, "person": {"born in": null, "job": null}}'


@pytest.mark.parametrize(
    ("schema", "num_chars", "num_tokens"),
    [
        # [CLS] hint [SEP] text [SEP], the hint [PREFIX][TYPE] and a token.
        ('{"city": null}', 40, 3 + 3 + 10),
        # A second level: what is found of a person, and two types below it.
        (SCHEMA, 40, (3 + 1 + 2 + 2 + 10) + (3 + 1 + 1 + 6 + 2 + 1 + 10)),
        # Windows of 512 tokens: of a text of 1,000, two and what is left, with 32 of the one before.
        ('{"city": null}', 4000, 1000 + 3 * (3 + 3) + 2 * 32),
    ],
)
def test_an_extraction_reads_a_text_with_every_prompt(schema: str, num_chars: int, num_tokens: int) -> None:
    estimate = TokenEstimate(replace(SPEC, task=EXTRACT, extract_schema=schema))
    assert estimate.of(b"x" * num_chars) == num_tokens
    assert estimate.of_all([b"x" * num_chars] * 3) == 3 * num_tokens
    assert estimate.of_all([]) == 0


def test_a_schema_of_many_types_takes_several_prompts_and_multiplies_tokens() -> None:
    few, many = (
        TokenEstimate(replace(SPEC, task=EXTRACT, extract_schema=json.dumps(dict.fromkeys(names))))
        for names in (["city"], [f"type number {number}" for number in range(200)])
    )
    text = b"x" * 400
    assert many.of(text) > 8 * few.of(text)
    # Four hints of at most 256 tokens, each with the text and its frame.
    assert many.of(text) <= 4 * (256 + 3 + 100)


def test_without_a_schema_many_texts_are_their_bytes_by_four() -> None:
    assert TokenEstimate(SPEC).of_all([b"x" * 400, b"y" * 4000]) == 1100


def cut(num_tokens: int) -> list[int]:
    """The chunks of a job of so many tokens, one at a time."""
    chunks: list[int] = []
    while num_tokens > sum(chunks):
        chunks.append(min(choose_chunk_tokens(sum(chunks)), num_tokens - sum(chunks)))
    return chunks


@pytest.mark.parametrize(
    ("num_tokens", "most_chunks", "largest_share"),
    [
        (4_000, 1, 1.0),
        (19_000, 5, 0.25),  # a thousand queries on four workers
        (120_000, 20, 1 / 8),  # 1,200 paragraphs
        (16_000_000, 280, 1 / 64),  # a million queries: as many chunks as with 3,600 of them in each
    ],
)
def test_a_small_job_is_spread_and_a_large_one_has_few_chunks(
    num_tokens: int, most_chunks: int, largest_share: float
) -> None:
    chunks = cut(num_tokens)
    assert len(chunks) <= most_chunks
    assert max(chunks) <= largest_share * num_tokens
    assert max(chunks) <= LARGEST_CHUNK_TOKENS
    assert min(chunks[:-1], default=SMALLEST_CHUNK_TOKENS) >= SMALLEST_CHUNK_TOKENS
