"""Errors of the embedded servers; each message says what to do."""

from vectormill.domain.errors import Conflict, Unavailable


class AlreadyRunning(Conflict):
    """Another vectormill is running on this data directory; stop it, or use another --data-dir."""


class EmbeddedServerFailed(Unavailable):
    """An embedded server could not be started; its log says why."""


class StartCancelled(Unavailable):
    """The start of an embedded server was cancelled because a stop was requested."""
