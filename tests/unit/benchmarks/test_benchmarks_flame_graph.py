import re
from xml.etree import ElementTree

from benchmarks.cases.host.profiles import leave_out_waits
from benchmarks.results.flame_graph import draw_flame_graph, find_shares, fold_perf_script, read_folded

FOLDED = ["main;encode;tokenize 60", "main;encode 20", "main;commit <lambda> 20"]

PERF = """\
postgres 123 [000] 5.0: 1 cycles:
\t    55d0 heap_insert+0x10 (/usr/bin/postgres)
\t    55d1 main+0x1 (/usr/bin/postgres)

postgres 123 [000] 5.1: 1 cycles:
\t    55d1 main+0x1 (/usr/bin/postgres)
"""


def test_a_frame_has_all_samples_that_passed_through_it() -> None:
    root = read_folded(FOLDED)
    assert root.count == 100
    assert root.callees["main"].callees["encode"].count == 80


def test_a_frame_s_own_time_is_without_what_it_called() -> None:
    assert find_shares(read_folded(FOLDED)) == {"tokenize": 0.6, "encode": 0.2, "commit <lambda>": 0.2}


def test_a_graph_is_valid_and_tells_each_frame_s_share() -> None:
    graph = draw_flame_graph(read_folded(FOLDED), "the worker & its lock")
    ElementTree.fromstring(graph)
    assert "tokenize: 60.0%" in graph
    assert "commit &lt;lambda&gt;: 20.0%" in graph


def test_frames_that_nobody_can_read_are_left_out() -> None:
    graph = draw_flame_graph(read_folded(["main;wide 9999", "main;narrow 1"]), "title")
    assert "wide" in graph
    assert "narrow" not in graph


def test_no_frame_is_wider_than_its_caller() -> None:
    graph = draw_flame_graph(read_folded(FOLDED), "title")
    widths = [float(width) for width in re.findall(r'y="\d+" width="([\d.]+)"', graph)]
    assert max(widths) == 1200
    assert sorted(widths) == [240, 720, 960, 1200, 1200]


def test_samples_of_perf_are_read_from_the_outermost_frame_inwards() -> None:
    assert list(fold_perf_script(PERF.splitlines())) == ["postgres;main;heap_insert 1", "postgres;main 1"]


def test_threads_that_wait_are_left_out() -> None:
    working = "main (app.py:1);encode (engine.py:2) 3"
    waiting = "main (app.py:1);Condition.wait (threading.py:331) 9"
    assert list(leave_out_waits([working, waiting])) == [working]
