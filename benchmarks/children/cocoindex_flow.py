"""CocoIndex as a process that keeps a table in step: `python -m benchmarks.children.cocoindex_flow ORDER`.

It follows CocoIndex's own example of a Postgres source (examples/postgres_source of cocoindex 1.0): a
memoized function per row, its own embedder, its own target table. Each line on standard input requests one
update, and the answer is its duration in seconds. The first update loads the model. The module imports what
the peer's environment has.
"""

import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

import asyncpg
import cocoindex as coco
import numpy as np
from cocoindex.connectors import postgres
from cocoindex.ops.sentence_transformers import SentenceTransformerEmbedder
from numpy.typing import NDArray

POOL = coco.ContextKey[asyncpg.Pool]("pool")
EMBEDDER = coco.ContextKey[SentenceTransformerEmbedder]("embedder", detect_change=True)
ORDER = json.loads(sys.argv[1]) if __name__ == "__main__" else {}


@dataclass
class Article:
    """A row of the source table."""

    key: str
    body: str
    lang: str


@dataclass
class IndexedArticle:
    """A row of the target table."""

    key: str
    lang: str
    embedding: Annotated[NDArray[np.float32], EMBEDDER]


@coco.lifespan
async def serve(builder: coco.EnvironmentBuilder) -> AsyncIterator[None]:
    async with asyncpg.create_pool(ORDER["database_url"]) as pool:
        builder.provide(POOL, pool)
        builder.provide(EMBEDDER, SentenceTransformerEmbedder(ORDER["model"], device="cpu"))
        yield


@coco.fn(memo=True)
async def index_article(article: Article, table: postgres.TableTarget[IndexedArticle]) -> None:
    embedding = await coco.use_context(EMBEDDER).embed(article.body)
    table.declare_row(row=IndexedArticle(article.key, article.lang, embedding))


@coco.fn
async def index_articles() -> None:
    schema = await postgres.TableSchema.from_class(IndexedArticle, primary_key=["key"])
    table = await postgres.mount_table_target(
        POOL, table_name="indexed_articles", table_schema=schema, pg_schema_name="cocoindex"
    )
    source = postgres.PgTableSource(coco.use_context(POOL), table_name=ORDER["table"], row_type=Article)
    await coco.mount_each(index_article, source.fetch_rows().items(lambda article: article.key), table)


def main() -> None:
    app = coco.App(coco.AppConfig(name="articles"), index_articles)
    for _ in sys.stdin:
        start = time.monotonic()
        app.update_blocking()
        print(json.dumps({"seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
