"""SIGKILL at every statement of a swap and of a rollback: before COMMIT all is as it was, after it all is new.

The process that dies is an indexer's last phase; what it had locked goes with its connection. Another one goes on.
"""

from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest
from sqlalchemy import Engine, text

from indexer.swapping import swap
from tests.building import BITS, NEXT, build, encode_all, make_context, make_run, put
from tests.database import ask, execute
from tests.integration.crashes.points import CrashPoints
from tests.integration.crashes.victims import Servers, running, watched_engine
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_building, find_generation, find_generation_by_id
from vectormill.collections.generations import roll_back
from vectormill.db.locks import act_in_short_locks
from vectormill.db.session import make_engine
from vectormill.domain.encoding import EncodingSpec

# The view as users see it: what it reads, the type of its vectors, who may read it, and what it says of itself.
LOOK = text("""
    SELECT (SELECT array_agg(key ORDER BY key) FROM docs) AS keys,
           (SELECT format_type(atttypid, atttypmod) FROM pg_attribute
             WHERE attrelid = 'docs'::regclass AND attname = 'embedding') AS type,
           has_table_privilege('public', 'docs', 'SELECT') AS is_public,
           obj_description('docs'::regclass, 'pg_class') AS comment,
           (SELECT array_agg(state ORDER BY id) FROM vectormill.generations) AS states
""")


def swap_in_indexer(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    engine = watched_engine(servers, points)
    looking = make_engine(servers.database_url, application_name="test", pool_size=1)
    building = ask(looking, find_building, "docs")
    assert building is not None
    swap(make_context(engine, make_run(building, seq=1)))


def roll_back_in_api(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    engine = watched_engine(servers, points)
    act_in_short_locks(engine, lambda connection: roll_back(connection, "docs"))


def prepare(engine: Engine, spec: EncodingSpec) -> Generation:
    """`old` is in the live generation, `both` in that which is being built too."""
    put(engine, "old", "both")
    encode_all(engine)
    with engine.begin() as connection:
        connection.execute(text("GRANT SELECT ON docs TO PUBLIC"))
        connection.execute(text("COMMENT ON VIEW docs IS 'ours'"))
    building = build(engine, spec)
    put(engine, "both")
    encode_all(engine)
    return building


def look(engine: Engine) -> dict[str, Any]:
    return dict(execute(engine, LOOK).one()._mapping)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "spec",
    [pytest.param(NEXT, id="same column", marks=pytest.mark.slow), pytest.param(BITS, id="another column")],
)  # another column takes every statement that the same one takes, and more
@pytest.mark.parametrize(
    "role",
    [
        pytest.param(swap_in_indexer, id="swap"),
        pytest.param(
            roll_back_in_api, id="rollback", marks=pytest.mark.slow
        ),  # the same statements, backwards
    ],
)
def test_whoever_is_killed_at_any_statement_of_a_swap_leaves_the_old_or_the_new_and_nothing_between(
    database_url: str, engine: Engine, spec: EncodingSpec, role: Any
) -> None:
    servers = Servers(database_url, "")
    building = prepare(engine, spec)
    column = "halfvec(8)" if spec is NEXT else "bit(8)"
    shared = {"is_public": True, "comment": "ours"}
    old = shared | {"keys": ["both", "old"], "type": "halfvec(8)", "states": ["live", "building"]}
    new = shared | {"keys": ["both"], "type": column, "states": ["retired", "live"]}
    if role is roll_back_in_api:
        with running(swap_in_indexer, servers) as swapper:
            swapper.hear_all()
        old, new = new, old | {"states": ["live", "retired"]}
    assert look(engine) == old
    seen: list[str] = []
    while look(engine) == old:
        with running(role, servers, last=len(seen)) as victim:
            points = victim.hear_all()
        assert len(points) == len(seen) + 1, "it lived, and changed nothing"
        seen.append(points[-1])
        is_committed = "before MAKE_LIVE" in points and points[-1] == "after COMMIT"
        assert look(engine) == (new if is_committed else old), f"killed {points[-1]}"
    assert {"before LOCK_COLLECTION", "before RETIRE_LIVE", "before MAKE_LIVE", "before CREATE_VIEW"} <= set(
        seen
    )
    assert ("before DROP_VIEW" in seen) == (spec is BITS)
    assert {"before COMMIT", "after COMMIT"} <= set(seen)
    live = ask(engine, find_generation, "docs")
    assert (live.id == building.id) == (role is swap_in_indexer)
    again = ask(engine, find_generation_by_id, building.id)
    assert again is not None
    if role is swap_in_indexer:  # the indexer that takes the run over finds nothing left to do
        swap(make_context(engine, make_run(building, seq=1)))
        assert look(engine) == new
