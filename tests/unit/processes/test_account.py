from pathlib import Path

from tests.clusters import new_directory
from vectormill.embedded.account import Account, write_private

STRANGER = 65533


def test_an_account_reaches_what_the_modes_allow() -> None:
    for modes, owned, reachable in [
        ((0o755, 0o755), False, True),
        ((0o711, 0o711), False, True),  # to pass through is enough
        ((0o700, 0o755), False, False),  # one closed directory on the way closes all below
        ((0o755, 0o700), True, True),
        ((0o755, 0o077), True, False),  # the owner's bits decide for the owner
    ]:
        with new_directory() as home:
            inner = home / "outer" / "inner"
            inner.mkdir(parents=True)
            status = inner.stat()
            owner = (status.st_uid, status.st_gid) if owned else (STRANGER, STRANGER)
            for directory, mode in zip((inner, inner.parent), reversed(modes), strict=True):
                directory.chmod(mode)
            assert Account("somebody", *owner).can_enter(inner) is reachable
            for directory in (inner.parent, inner):
                directory.chmod(0o700)  # so that it can be removed


def test_a_private_file_is_replaced_whole_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old and longer")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_planted_in_place_of_a_private_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "secret").symlink_to(victim)
    write_private(tmp_path / "secret", "new")
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "secret").is_symlink()
