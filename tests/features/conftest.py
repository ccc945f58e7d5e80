"""What the tests of features share with those of the supervisor: simulated runs."""

from tests.supervisor.conftest import simulate

__all__ = ["simulate"]
