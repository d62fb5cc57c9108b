"""Packages that ask other vendors' APIs, pointed at ours: each in an environment of its own, a real worker behind."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.environments import make_environment
from tests.front_door import FrontDoor, open_front_door
from tests.reference import TEXTS as KNOWN_TEXTS
from tests.reference import known_vectors
from vectormill.models.registry import DEFAULT_MODEL

SCRIPT: Final = Path(__file__).with_name("ask_package.py")
TEXTS: Final = (*KNOWN_TEXTS[:3], KNOWN_TEXTS[5])
# None of them shall ask anybody but us, nor a proxy for us.
QUIET: Final = {
    "NO_PROXY": "127.0.0.1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


# The packages to install for each client that ask_package.py uses.
PINS: Final = {
    "litellm": ("litellm==1.106.2",),
    "cohere": ("cohere==7.3.1",),
    "haystack": ("haystack-ai==3.4.0", "cohere-haystack==11.0.0"),
    "voyageai": ("voyageai==0.5.0",),
    # numpy is what feature_extraction answers in, and the package leaves it to its extra.
    "huggingface": ("huggingface_hub==2.4.0", "numpy"),
}


@pytest.fixture(scope="module")
def door(postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    with open_front_door(postgres_url, redis_url, tmp_path_factory.mktemp("cache")) as door:
        yield door


@pytest.mark.slow
@pytest.mark.timeout(900)  # pip, where there is no uv, installs for minutes
@pytest.mark.parametrize("package", PINS)
def test_a_package_for_another_api_gets_the_vectors_and_the_order_of_the_reference(
    package: str, door: FrontDoor
) -> None:
    asked = {"url": door.url, "model": DEFAULT_MODEL, "texts": TEXTS}
    done = subprocess.run(
        (make_environment(package, PINS[package]), SCRIPT, package),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **QUIET},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    expected = known_vectors(TEXTS)
    assert found["vectors"]
    for name, vectors in found["vectors"].items():
        assert np.shape(vectors) == expected.shape, name
        assert (np.array(vectors) * expected).sum(axis=1).min() > 0.9999, name
    best = np.argsort(-(expected @ expected[0])).tolist()
    for name, order in found["orders"].items():
        assert len(order) >= 3, name
        assert order == best[: len(order)], name
