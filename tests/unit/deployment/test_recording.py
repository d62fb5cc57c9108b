"""The recording of a terminal: what a command writes is laid on a screen as a terminal does it, and drawn as it was."""

import sys
from pathlib import Path
from xml.etree import ElementTree

from deploy.recording import COLUMNS, MAX_FRAMES, ROWS, Screen, Terminal, choose, draw, run
from tests.architecture.sources import DOCS

SVG = "{http://www.w3.org/2000/svg}"


def read(screen: Screen) -> list[str]:
    return ["".join(cell[0] for cell in line).rstrip() for line in screen]


def show(text: str) -> list[str]:
    terminal = Terminal()
    terminal.write(text)
    return read(terminal.screen())


def test_a_line_that_is_written_anew_takes_the_place_of_the_former() -> None:
    assert show("a\r\n50 %\r\x1b[2K100 %\r\nb") == ["a", "100 %", "b"]
    assert show("one\r\ntwo\r\n\x1b[2A\x1b[2KONE") == ["ONE", "two"]


def test_what_is_too_long_goes_on_in_the_next_line_and_the_first_lines_leave_the_screen() -> None:
    assert show("x" * (COLUMNS + 1)) == ["x" * COLUMNS, "x"]
    assert show("".join(f"{number}\r\n" for number in range(ROWS + 5))) == [
        str(number) for number in range(5, ROWS + 5)
    ]


def test_colors_and_weight_last_until_they_are_taken_back() -> None:
    terminal = Terminal()
    terminal.write("\x1b[1;32mgo\x1b[0m on")
    (line,) = terminal.screen()
    assert [cell[1:] for cell in line[:2]] == [("#99cc99", True)] * 2
    assert line[3][2] is False


def test_a_real_command_is_recorded_with_its_last_screen_and_its_status() -> None:
    program = "import sys; print(sys.stdout.isatty(), 1 < 2); sys.exit(3)"
    screens, status = run((sys.executable, "-c", program), "python <demo>")
    assert status == 3
    assert read(screens[0][1]) == ["$ python <demo>"]
    assert read(screens[-1][1]) == ["$ python <demo>", "True True"]
    picture = ElementTree.fromstring(draw(choose(screens), "a < b"))
    assert [text.text for text in picture.iter(f"{SVG}text")][-1] == "True True"


def test_of_many_screens_a_few_are_taken_the_first_and_the_last_among_them() -> None:
    screens = [(float(number), ((("x", "", False),) * number,)) for number in range(1, 200)]
    chosen = choose(screens)
    assert len(chosen) <= MAX_FRAMES
    assert (chosen[0][1], chosen[-1][1]) == (screens[0][1], screens[-1][1])
    assert len(choose(screens[:3])) == 3


def test_the_picture_of_the_readme_is_small_and_shows_a_run_to_its_end() -> None:
    path = Path(DOCS / "pictures/demo.svg")
    assert path.stat().st_size < 300_000
    words = [text.text or "" for text in ElementTree.parse(path).iter(f"{SVG}text")]
    assert "vectormill demo" in " ".join(words[:4])
    assert words[-1].endswith("texts have their vector.")
