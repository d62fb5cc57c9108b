"""Play many histories of a state machine of Hypothesis, made by seeds that a command line may name.

`pytest -m slow tests/integration/repair tests/integration/order --seeds 3` plays those of three seeds; `--first-seed`
plays again what a failure names.
"""

from random import SystemRandom

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play_histories(
    machine: type[RuleBasedStateMachine], config: pytest.Config, num_histories: int, num_steps: int
) -> None:
    """Play so many histories for each seed: new ones in every run, unless the command line names the first.

    A history that fails is told as it is, unless the command line has it shortened, which takes long.
    """
    first_seed = config.getoption("first_seed")
    first_seed = SystemRandom().randrange(1 << 32) if first_seed is None else first_seed
    phases = [Phase.generate, *([Phase.shrink] if config.getoption("shorten") else [])]
    for number in range(first_seed, first_seed + config.getoption("seeds")):
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(
                    max_examples=num_histories,
                    stateful_step_count=num_steps,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    phases=phases,
                ),
            )
        except BaseException as error:
            error.add_note(f"Replay with --first-seed {number}")
            raise
