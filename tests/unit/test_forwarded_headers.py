"""Headers that Triton forwards stand among a request's parameters, and are none of them."""

from __future__ import annotations

from pathlib import Path

from tests.support.local import LocalServer, local_settings


def test_forwarded_headers_are_no_unknown_parameters(checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint, forwarded_headers="X-Request-Id")) as server:
        let_through = server.submit({"text_input": ["hi"]}, **{"x-request-ID": "1", "max_tokens": 1})
        refused = server.submit({"text_input": ["hi"]}, **{"X-Other": "1"})
        assert let_through.wait().error is None
        assert "unknown request parameter 'X-Other'" in str(refused.wait().error)
