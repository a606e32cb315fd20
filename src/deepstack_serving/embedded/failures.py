"""What can keep the embedded server from starting or running, as part of the project's error tree."""

from __future__ import annotations

from collections.abc import Mapping

from deepstack_serving.errors import DeepstackError, UnavailableError


class EmbeddedServerError(DeepstackError):
    """Base of the embedded server's errors; each text names the remedy or the reason."""


class UnsupportedEnvironmentError(EmbeddedServerError):
    """This machine or this Python environment cannot run the wheel's server."""


class MissingLibraryError(UnsupportedEnvironmentError):
    """A shared library that the server or its Python stub needs is not on this machine."""


class PortInUseError(EmbeddedServerError):
    """A port that was asked for by number is taken."""


class ServerStartError(EmbeddedServerError, UnavailableError):
    """The server ended, or did not answer in time, while starting."""


class ModelLoadError(ServerStartError):
    """One or more models did not load. `reasons` maps each model's name to the model's own reason."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"model {name!r} did not load: {reason}" for name, reason in reasons.items()))
