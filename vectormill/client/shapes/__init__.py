"""Shapes: answers of the API as types. Made by `python -m tools.client`."""

from vectormill.batches.endpoints import EmbeddingsAnswer, EmbeddingsUsage, RerankAnswer
from vectormill.client.shapes.collections import (
    CollectionBody,
    CollectionDetail,
    CollectionIndexBody,
    CoverageBody,
    GenerationBody,
    LiveGenerationBody,
    OpenJobBody,
    RollbackAnswer,
    RunLine,
    ScheduleLine,
    SourceLine,
    StalenessBody,
)
from vectormill.client.shapes.items import DeleteAnswer, ItemAnswer, PassageBody, PutAnswer
from vectormill.client.shapes.searches import ManySearchesAnswer, MatchBody, SearchAnswer
from vectormill.collections.indexes.bodies import BuildProgressBody, IndexBody, IndexPlanBody, OneIndexBody
from vectormill.jobs.bodies import (
    BottleneckBody,
    ItemErrorBody,
    JobBody,
    RecordRow,
    ScoreRow,
    StageBody,
    TruncatedItemBody,
    VectorRow,
)
from vectormill.models.bodies import ModelBody, ModelList
from vectormill.runs.bodies import EncodingBody, RunBody
from vectormill.schedules.bodies import ScheduleBody, ScheduledRunBody
from vectormill.sources.bodies import FollowingBody, PushBody, SourceBody, SourceCheckBody, SourceRowBody
from vectormill.webhooks.bodies import DeliveryBody, NewWebhookBody, ReplayedBody, WebhookBody
from vectormill.workers.bodies import Readiness, ScheduleHealth, WorkerBody, WorkerList

__all__ = [
    "BottleneckBody",
    "BuildProgressBody",
    "CollectionBody",
    "CollectionDetail",
    "CollectionIndexBody",
    "CoverageBody",
    "DeleteAnswer",
    "DeliveryBody",
    "EmbeddingsAnswer",
    "EmbeddingsUsage",
    "EncodingBody",
    "FollowingBody",
    "GenerationBody",
    "IndexBody",
    "IndexPlanBody",
    "ItemAnswer",
    "ItemErrorBody",
    "JobBody",
    "LiveGenerationBody",
    "ManySearchesAnswer",
    "MatchBody",
    "ModelBody",
    "ModelList",
    "NewWebhookBody",
    "OneIndexBody",
    "OpenJobBody",
    "PassageBody",
    "PushBody",
    "PutAnswer",
    "Readiness",
    "RecordRow",
    "ReplayedBody",
    "RerankAnswer",
    "RollbackAnswer",
    "RunBody",
    "RunLine",
    "ScheduleBody",
    "ScheduleHealth",
    "ScheduleLine",
    "ScheduledRunBody",
    "ScoreRow",
    "SearchAnswer",
    "SourceBody",
    "SourceCheckBody",
    "SourceLine",
    "SourceRowBody",
    "StageBody",
    "StalenessBody",
    "TruncatedItemBody",
    "VectorRow",
    "WebhookBody",
    "WorkerBody",
    "WorkerList",
]
