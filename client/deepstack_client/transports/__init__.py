"""Transports, and the choice among them by the scheme of an address."""

from __future__ import annotations

from urllib.parse import urlsplit

from deepstack_client.errors import ConnectError
from deepstack_client.transports.base import AsyncTransport, Transport
from deepstack_client.transports.grpc_async import AsyncGrpcTransport
from deepstack_client.transports.grpc_sync import GrpcTransport
from deepstack_client.transports.http import HttpTransport
from deepstack_client.transports.threaded import ThreadedTransport

_DEFAULT_PORTS = {"grpc": 8001, "http": 8000}


def split_address(address: str) -> tuple[str, str, int]:
    """Scheme, host and port of `grpc://host:port`, `http://host:port` or `host:port` (which means gRPC)."""
    parts = urlsplit(address if "://" in address else f"grpc://{address}")
    try:
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        port = 0
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not port or parts.path.strip("/"):
        raise ConnectError(f"address {address!r} should look like grpc://host:port or http://host:port")
    return parts.scheme, parts.hostname, port


def transport_for(address: str) -> Transport:
    scheme, host, port = split_address(address)
    return HttpTransport(host, port) if scheme == "http" else GrpcTransport(host, port)


def async_transport_for(address: str) -> AsyncTransport:
    scheme, host, port = split_address(address)
    return ThreadedTransport(HttpTransport(host, port)) if scheme == "http" else AsyncGrpcTransport(host, port)
