"""What generations ask of the jobs does not grow with the jobs that have ended: an index answers each question."""

import json
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, TextClause, text

from tests.database import execute
from tests.protocol import make_items, submit
from vectormill.collections.generations import LIST_LAGGING_TWINS, LIST_PRUNABLE
from vectormill.db.parameters import to_jsonb
from vectormill.db.session import walk_plan
from vectormill.jobs.dual_writes import LIST_TWINS, LIST_UNWANTED_JOBS, LIST_WITHOUT_TWIN
from vectormill.jobs.transitions import INSERT_TWIN
from vectormill.runs.checks import COUNT_OPEN_JOBS

ENDED_JOBS = text("""
    INSERT INTO vectormill.jobs (id, state, model, spec, generation_id, priority, num_items, finished_at, twin_of)
    SELECT gen_random_uuid(), 'completed', 'fake', '{}', 1, 5, 1, now(),
           CASE WHEN number % 2 = 0 THEN gen_random_uuid() END
      FROM generate_series(1, 20000) AS number
""")
ONE = str(uuid4())
QUESTIONS: list[tuple[str, TextClause, dict[str, Any]]] = [
    ("twins of a job", LIST_TWINS, {"job_id": ONE}),
    ("twins that lag", LIST_LAGGING_TWINS, {"generation_id": 1}),
    ("jobs that are unwanted", LIST_UNWANTED_JOBS, {}),
    ("generations to prune", LIST_PRUNABLE, {"seconds": 1.0, "generation_id": None}),
    ("open jobs", COUNT_OPEN_JOBS, {"generation_id": 1}),
    ("jobs without a twin", LIST_WITHOUT_TWIN, {"generation_id": 2, "former_id": 1, "seq": 39_990}),
    (
        "a twin",
        INSERT_TWIN,
        {
            "job_id": ONE,
            "with_done": False,
            "twin_id": str(uuid4()),
            "model": "m",
            "spec": to_jsonb({}),
            "generation_id": 1,
        },
    ),
]


def test_questions_about_generations_read_no_ended_jobs(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    execute(engine, ENDED_JOBS)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE vectormill.jobs"))
    for name, statement, values in QUESTIONS:
        with engine.connect() as connection:
            (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement.text}"), values).scalar_one()
        scans = [node for node in walk_plan(plan["Plan"]) if node["Node Type"] == "Seq Scan"]
        read = [scan for scan in scans if scan["Relation Name"] in ("jobs", "chunks")]
        assert not read, (name, json.dumps(plan, indent=1))
