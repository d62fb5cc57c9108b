from pathlib import Path

from vectormill.corpus import Docstring, read_docstrings

MODULE = '''"""Module."""

import sys

if sys.platform == "win32":
    def find():
        """Find, on Windows."""
else:
    def find():
        """Find, elsewhere."""

try:
    async def run():
        """Run."""
        def inner():
            """Inner."""
except ImportError:
    class run: """Run, as a class."""

class Outer:
    """Outer."""

    class Inner:
        def method(self):
            """Method.

            Indented.
            """

        def silent(self):
            return "no docstring"

    def empty(self):
        """   """

match sys.argv:
    case []:
        def chosen(): "Chosen."
raise SystemExit("nothing of this is run")
'''


def test_every_docstring_has_its_qualified_name_in_the_order_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(MODULE)
    assert list(read_docstrings(tmp_path)) == [
        Docstring("package", "Module."),
        Docstring("package.find", "Find, on Windows."),
        Docstring("package.find#2", "Find, elsewhere."),
        Docstring("package.run", "Run."),
        Docstring("package.run.inner", "Inner."),
        Docstring("package.run#2", "Run, as a class."),
        Docstring("package.Outer", "Outer."),
        Docstring("package.Outer.Inner.method", "Method.\n\nIndented."),
        Docstring("package.chosen", "Chosen."),
    ]


def test_tests_and_installed_packages_are_left_out_and_broken_files_passed_over(tmp_path: Path) -> None:
    for name in (
        "test/a.py",
        "idlelib/idle_test/b.py",
        "lib2to3/tests/c.py",
        "site-packages/d.py",
        "kept/test/e.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Text."""')
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "nul.py").write_bytes(b'"""a\0b"""')
    assert [docstring.key for docstring in read_docstrings(tmp_path)] == ["kept.test.e"]
