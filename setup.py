"""Which folders are packages; all else about the distribution stands in pyproject.toml, which cannot say this.

alembic/ is a folder of the top level that is no package, as it would shadow the library. An installed copy has it as
vectormill.migrations (docs/decisions/0036-a-wheel-that-migrates.md).
"""

from setuptools import find_packages, setup

OURS = ("api", "indexer", "scheduler", "vectormill", "worker")

setup(
    packages=[
        *find_packages(include=[pattern for name in OURS for pattern in (name, f"{name}.*")]),
        "vectormill.migrations",
        "vectormill.migrations.versions",
    ],
    package_dir={"vectormill.migrations": "alembic"},
)
