from pathlib import Path

import pytest

from vectormill.processes.logfile import open_log, rotate_log, tail_of


def test_a_log_is_made_with_its_directory_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    for line in (b"one\n", b"two\n"):
        with open_log(path) as log:
            log.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_grew_too_large_is_cut_while_it_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open_log(path) as log:
        log.write(b"x" * 100)
        rotate_log(path, max_bytes=200)
        assert path.stat().st_size == 100
        rotate_log(path, max_bytes=50)
        log.write(b"y")
    assert path.read_bytes() == b"y"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        (b"", ""),
        (b"a\nb\nc\n", "\n    b\n    c"),
        (b"a\nb\xff\n", "\n    a\n    b\N{REPLACEMENT CHARACTER}"),  # a child may write anything
    ],
)
def test_the_last_lines_are_shown(tmp_path: Path, content: bytes, tail: str) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(content)
    assert tail_of(path, lines=2) == tail
    assert tail_of(tmp_path / "missing") == ""
    assert tail_of(None) == ""
