"""A column encoded in Ray, Daft and Spark, each the real package, in a process with a cluster of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.environments import CLUSTERS, make_cluster_variables
from tests.reference import TEXTS as SOUND
from tests.reference import known_vectors

pytestmark = pytest.mark.slow

# The ways in which the script of each package encodes the texts.
WAYS: Final = {
    "ray": {"numpy", "pandas", "pyarrow"},
    "daft": {"with errors", "plain", "float16"},
    "spark": {"with errors", "plain"},
}
# Texts that cannot be encoded, each with the code of the reason, among others.
TEXTS: Final = [SOUND[0], None, *SOUND[1:20], "", *SOUND[20:50], "a NUL\0here", *SOUND[50:]]
CODES: Final = ["empty_text", "empty_text", "nul_character"]


@pytest.mark.timeout(900)  # installing downloads some hundred megabytes
@pytest.mark.parametrize("name", WAYS)
def test_a_cluster_gives_the_vectors_of_the_reference_in_order_and_reasons_for_texts_without(
    name: str, tmp_path: Path
) -> None:
    asked, answered = tmp_path / "texts.json", tmp_path / "answer.json"
    asked.write_text(json.dumps(TEXTS), encoding="utf-8")
    script = Path(__file__).with_name(f"on_{name}.py")
    done = subprocess.run(
        (sys.executable, str(script), str(asked), str(answered)),
        env=make_cluster_variables(name),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    assert f"=={answer.pop('version')}" in CLUSTERS[name]
    assert answer.keys() == WAYS[name]
    expected = known_vectors()
    for way, made in answer.items():
        assert made["texts"] == TEXTS, way
        vectors = np.array([vector for vector in made["vectors"] if vector is not None])
        cosines = (vectors * expected).sum(axis=1) / np.linalg.norm(vectors, axis=1)
        assert cosines.min() > 0.9999, way
        reasons = [reason for reason in made["errors"] if reason is not None]
        assert [reason.partition(":")[0] for reason in reasons] == CODES, way
        missing = [vector is None for vector in made["vectors"]]
        assert missing == [reason is not None for reason in made["errors"]], way
