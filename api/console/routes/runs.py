"""The actions on a run, on every page that lists it: its schedule's and its collection's."""

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from api.dependencies import ResourcesDependency
from api.problems import Problem
from api.routes.runs import RunId
from vectormill.runs.runs import cancel_run, confirm_run

router = APIRouter(include_in_schema=False)

WISHES: Final[dict[str, Callable[[Connection, Any], object]]] = {
    "confirm": confirm_run,
    "cancel": cancel_run,
}


@router.post("/console/runs/{run_id}/{wish}", status_code=204)
def post_wish(resources: ResourcesDependency, run_id: RunId, wish: str) -> Response:
    """Carry out an action on a run; the page that asked follows it. Raise RunNotFound, WrongRunState and Problem."""
    if wish not in WISHES:
        raise Problem(
            404,
            "not-found",
            f"{wish[:40]!r} is none of a run's actions: {', '.join(WISHES)}.",
        )
    with resources.engine.begin() as connection:
        WISHES[wish](connection, run_id)
    return Response(status_code=204)
