"""Client of deepstack vision-language models on Triton: images, videos and a question in, a streamed answer out."""

from deepstack_client.async_client import AsyncClient
from deepstack_client.client import Client
from deepstack_client.errors import (
    ClientError,
    ConnectError,
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
)
from deepstack_client.images import ImageSource
from deepstack_client.request import Message, RequestOptions
from deepstack_client.response import Chunk, Completion
from deepstack_client.streams import AsyncStream, Stream
from deepstack_client.transports.base import AsyncTransport, Transport
from deepstack_client.transports.grpc_async import AsyncGrpcTransport
from deepstack_client.transports.grpc_sync import GrpcTransport
from deepstack_client.transports.http import HttpTransport
from deepstack_client.transports.threaded import ThreadedTransport
from deepstack_client.videos import VideoFrames, VideoSource

__all__ = [
    "AsyncClient",
    "AsyncGrpcTransport",
    "AsyncStream",
    "AsyncTransport",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "ConnectError",
    "GrpcTransport",
    "HttpTransport",
    "ImageSource",
    "InvalidRequestError",
    "Message",
    "ProtocolError",
    "RequestCancelledError",
    "RequestOptions",
    "RequestTimeoutError",
    "ServerError",
    "ServerUnavailableError",
    "Stream",
    "ThreadedTransport",
    "Transport",
    "VideoFrames",
    "VideoSource",
]
