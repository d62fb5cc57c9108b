"""What an index of the default shape finds of what an exact search does: real texts, a real model, a real Postgres."""

from itertools import islice

import numpy as np
import pytest
from sqlalchemy import Engine, text

from indexer.indexing import build_indexes
from tests.indexed import make_collection, search_collection, start_run
from vectormill.corpus import read_docstrings
from vectormill.models.registry import find_packaged_model

NUM_TEXTS = 3000
NUM_QUERIES = 200


@pytest.mark.slow  # encodes 3,200 texts: a minute of one core
@pytest.mark.timeout(900)
def test_the_default_index_finds_98_of_100_of_the_ten_nearest_of_real_texts(engine: Engine) -> None:
    from sentence_transformers import SentenceTransformer  # only here: whoever collects would import it

    model = SentenceTransformer(str(find_packaged_model()), device="cpu")
    model.max_seq_length = 48  # of the beginnings of texts, which are texts too
    texts = [docstring.text[:200] for docstring in islice(read_docstrings(), 0, None, 2)]
    texts = texts[: NUM_TEXTS + NUM_QUERIES]
    assert len(texts) == NUM_TEXTS + NUM_QUERIES
    encoded = np.asarray(model.encode(texts, normalize_embeddings=True))
    # Queries are none of the rows: one that is has itself as its nearest in any index.
    queries, vectors = encoded[::16], np.delete(encoded, slice(None, None, 16), axis=0)
    generation = make_collection(engine, vectors)
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert (report["plan"]["m"], report["plan"]["ef_construction"]) == (16, 64)
    num_found = 0
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        for query in queries:
            nearest = {str(number) for number in np.argsort(-(vectors @ query))[:10]}
            found = search_collection(connection, generation, query, 10)
            assert found["num_rows_read"] is None
            num_found += len(nearest & {match["key"] for match in found["data"]})
    recall = num_found / (10 * len(queries))
    assert recall >= 0.98, recall  # 0.998
