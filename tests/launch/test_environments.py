"""What is made of the environments of real launchers."""

from __future__ import annotations

import pytest

from dualeval.errors import EXIT_USAGE, LaunchError
from dualeval.launch import detect
from dualeval.world import World
from tests.environments import ENVIRONMENTS, Environment


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.name)
def test_environment(environment: Environment) -> None:
    if isinstance(environment.expected, World):
        assert detect(environment.variables) == environment.expected
        return
    with pytest.raises(LaunchError, match=environment.expected) as caught:
        detect(environment.variables)
    assert caught.value.exit_code == EXIT_USAGE
    assert "--launcher none" in str(caught.value)
    assert detect(environment.variables, "none") == World.alone()


def test_the_table_is_large_and_names_its_sources() -> None:
    assert len({environment.name for environment in ENVIRONMENTS}) == len(ENVIRONMENTS) >= 40
    assert all(environment.source for environment in ENVIRONMENTS)
