"""Workers with one model, device and host name: each counts, under a name that is its own and that it keeps."""

from uuid import UUID, uuid4

from sqlalchemy import Engine, text

from tests.database import ask
from tests.protocol import SPEC
from vectormill.workers.workers import list_workers
from worker.chunk.leases import LeaseKeeper
from worker.identity import WorkerIdentity, beat_as, take_name

NAME = "fake-cpu0@host"
FIRST, SECOND, THIRD = uuid4(), uuid4(), uuid4()


def identity_of(launcher: UUID) -> WorkerIdentity:
    return WorkerIdentity(NAME, uuid4(), launcher, SPEC.model, slots=4)


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [worker.name for worker in list_workers(connection)]


def age(engine: Engine, name: str) -> None:
    """Lets a worker be silent for longer than a live one is."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.workers SET heartbeat_at = now() - interval '16 s' WHERE name = :name"),
            {"name": name},
        )


def never_waits(seconds: float) -> None:
    raise AssertionError("nobody else goes by this name")


def test_workers_of_two_launchers_with_one_host_name_both_count(engine: Engine) -> None:
    first = take_name(engine, identity_of(FIRST), {}, never_waits)

    def first_beats(seconds: float) -> None:
        assert ask(engine, beat_as, first, {})

    second = take_name(engine, identity_of(SECOND), {}, first_beats)
    assert (first.name, second.name) == (NAME, "fake-cpu0.2@host")
    assert names(engine) == ["fake-cpu0.2@host", NAME]
    with engine.connect() as connection:
        assert [worker.slots for worker in list_workers(connection)] == [4, 4]


def test_a_restart_keeps_the_name(engine: Engine) -> None:
    """The launcher's next worker has it at once; after a killed launcher, the next one has it when the row is old."""
    take_name(engine, identity_of(FIRST), {}, never_waits)
    assert take_name(engine, identity_of(FIRST), {}, never_waits).name == NAME
    looks: list[float] = []

    def grows_old(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            age(engine, NAME)

    assert take_name(engine, identity_of(SECOND), {}, grows_old).name == NAME
    assert len(looks) == 3
    assert names(engine) == [NAME]


def test_many_workers_of_one_name_start_without_waiting_for_each_in_turn(engine: Engine) -> None:
    taken = [take_name(engine, identity_of(FIRST), {}, never_waits)]
    num_looks = 0

    def all_beat(seconds: float) -> None:
        nonlocal num_looks
        num_looks += 1
        with engine.begin() as connection:
            for identity in taken:
                assert beat_as(connection, identity, {})

    for _ in range(5):
        taken.append(take_name(engine, identity_of(uuid4()), {}, all_beat))
    assert num_looks == 5
    assert {identity.name for identity in taken} == {NAME, *(f"fake-cpu0.{n}@host" for n in range(2, 7))}


def test_a_worker_whose_name_was_taken_while_it_was_cut_off_goes_on_under_another(engine: Engine) -> None:
    cut_off = take_name(engine, identity_of(FIRST), {}, never_waits)
    keeper = LeaseKeeper(engine, cut_off, dict, heartbeat_seconds=3600, lease_seconds=30)
    age(engine, NAME)
    newcomer = take_name(engine, identity_of(THIRD), {}, never_waits)
    assert newcomer.name == NAME
    keeper.start()
    try:
        assert names(engine) == sorted([NAME, cut_off.owner])
        assert ask(engine, beat_as, newcomer, {}), "the newcomer keeps the row"
    finally:
        keeper.stop()
    assert names(engine) == [NAME]
