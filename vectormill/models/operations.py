"""Operations on models."""

from typing import Final

from vectormill.keys.api_key import READ
from vectormill.models.bodies import ModelBody, ModelList
from vectormill.operation import Operation

LIST: Final = Operation("GET", "/v1/models", READ, ModelList)
# A name may have slashes.
SHOW: Final = Operation("GET", "/v1/models/{name:path}", READ, ModelBody)
