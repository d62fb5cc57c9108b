"""A vector type is declared in one module: nothing else of the product names one, but where users read it."""

import ast
from typing import Final

from tests.architecture.sources import find_sources, parse
from vectormill.domain.vector_type import VECTOR_TYPES

DECLARED: Final = "vectormill/domain/vector_type.py"
# The files in which such a word means something else, or is the default of a command that users read in its signature.
ALLOWED: Final = {
    "api/openai/operations.py": "types of embeddings in Cohere's API",
    "api/openai/routes.py": "types of embeddings in Cohere's API",
    "vectormill/batches/endpoints.py": "types of embeddings in /v1/embeddings, as in vLLM",
    "vectormill/batches/operations.py": "a format of OpenAPI",
    "vectormill/cli/estimate.py": "the default of --vector-type",
    "vectormill/client/aio/searches.py": "types of embeddings in /v1/embeddings, made from its endpoint",
    "vectormill/client/sync/searches.py": "types of embeddings in /v1/embeddings, made from its endpoint",
    "vectormill/collections/collection.py": "a reserved word of SQL",
    "vectormill/integrations/spark.py": "a type of Spark",
    "vectormill/runs/differences.py": "a type of Postgres",
    "vectormill/sources/sql.py": "a type of Postgres",
    "worker/encoder/choice.py": "a precision of weights",
    "worker/placement/footprint.py": "a precision of weights",
    "worker/placement/placement.py": "a precision of weights",
}


def test_no_module_but_the_one_that_declares_vector_types_names_one() -> None:
    naming = {
        str(path)
        for path in find_sources("api", "indexer", "scheduler", "vectormill", "worker")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and node.value in VECTOR_TYPES
    }
    assert naming - {DECLARED} == ALLOWED.keys(), "ask a property of the VectorType instead"
