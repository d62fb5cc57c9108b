"""The demos of tasks: a row each. That of `embed` is the main job's, in vectormill.cli.commands.demo."""

from collections.abc import Mapping
from typing import Final, Literal

from vectormill.cli.demos import pairs, records
from vectormill.cli.demos.task_demo import TaskDemo

TASK_DEMOS: Final[Mapping[str, TaskDemo]] = {demo.task: demo for demo in (pairs.DEMO, records.DEMO)}
# What --task takes, as type checkers see it; a test compares it with the table.
DemoTask = Literal["embed", "score", "extract"]
