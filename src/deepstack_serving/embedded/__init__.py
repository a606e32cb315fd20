"""Runs the real tritonserver from the pip wheel `nvidia-pytriton`, without a container: lay out, start, wait, stop."""

from deepstack_serving.embedded.display import ProgressDisplay
from deepstack_serving.embedded.failures import (
    EmbeddedServerError,
    MissingLibraryError,
    ModelLoadError,
    PortInUseError,
    ServerStartError,
    UnsupportedEnvironmentError,
)
from deepstack_serving.embedded.loading import Progress, ProgressListener
from deepstack_serving.embedded.options import Ports, ServerOptions
from deepstack_serving.embedded.server import EmbeddedServer

__all__ = [
    "EmbeddedServer",
    "EmbeddedServerError",
    "MissingLibraryError",
    "ModelLoadError",
    "PortInUseError",
    "Ports",
    "Progress",
    "ProgressDisplay",
    "ProgressListener",
    "ServerOptions",
    "ServerStartError",
    "UnsupportedEnvironmentError",
]
