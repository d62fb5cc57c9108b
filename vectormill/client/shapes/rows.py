"""Rows of results, which are no part of the API's description: a line each of an export."""

from typing import Any, TypedDict


class VectorRow(TypedDict):
    """Of the task embed. The numbers are those of the job's vector type."""

    key: str
    embedding: list[float]


class ScoreRow(TypedDict):
    """Of the task score. `label` is null where the model has one number; `probabilities` are by label."""

    key: str
    score: float
    label: str | None
    probabilities: dict[str, float]


class RecordRow(TypedDict):
    """Of the task extract."""

    key: str
    output: list[Any]
