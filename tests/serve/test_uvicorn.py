"""uvicorn still has the private parts that HttpConnection and the server use.

When this fails after an upgrade, read the change in uvicorn before raising the upper bound in pyproject.toml.
"""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

ROOT = Path(__file__).parents[2]
OVERRIDDEN = (  # HttpConnection overrides these, and calls most of them
    *("connection_made", "connection_lost", "eof_received", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("send_400_response", "_unset_keepalive_if_required"),
)
OF_CONNECTION = ("parser", "loop", "transport", "cycle", "headers", "url")
OF_CYCLE = ("scope", "more_body", "response_started", "response_complete", "keep_alive")
OF_SERVER = ("started", "should_exit")


def missing(owner: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


async def answered(protocol_class: type[HttpToolsProtocol]) -> HttpToolsProtocol:
    """A connection that has read one request, and has answered it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=protocol_class, lifespan="off", log_level="error")
    state = ServerState()
    connection = protocol_class(config, state, {})
    transport = Mock()
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.gather(*state.tasks)
    return connection


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_methods_that_a_connection_overrides(name: str) -> None:
    assert callable(getattr(HttpToolsProtocol, name, None)), (
        f"uvicorn {uvicorn.__version__} has no HttpToolsProtocol.{name}: adapt serve/http/http_connection.py"
    )


def test_the_attributes_of_a_connection() -> None:
    connection = asyncio.run(answered(HttpToolsProtocol))
    gone = [f"HttpToolsProtocol.{name}" for name in missing(connection, OF_CONNECTION)]
    gone += [f"RequestResponseCycle.{name}" for name in missing(getattr(connection, "cycle", None), OF_CYCLE)]
    assert gone == [], f"uvicorn {uvicorn.__version__} has moved {', '.join(gone)}: adapt serve/http/http_connection.py"
    assert connection.cycle.response_complete
    assert isinstance(connection.headers, list), "HttpConnection builds the head of a request again from it"
    assert connection.url == b"/"


def test_the_parts_of_the_server() -> None:
    server = uvicorn.Server(uvicorn.Config(Mock()))
    gone = missing(server, OF_SERVER)
    assert gone == [], f"uvicorn {uvicorn.__version__} has moved Server.{', Server.'.join(gone)}: adapt serve/server.py"
    assert inspect.iscoroutinefunction(getattr(uvicorn.Server, "_serve", None)), (
        f"uvicorn {uvicorn.__version__} has no coroutine Server._serve: adapt serve/server.py"
    )
    assert list(inspect.signature(uvicorn.Server._serve).parameters) == ["self", "sockets"]


def test_the_list_of_names_is_complete() -> None:
    """Every attribute that HttpConnection uses is its own, or in the lists above."""
    tree = ast.parse((ROOT / "src/weft/serve/http/http_connection.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and node.attr.startswith("_")}
    of_self = {node.attr for node in attributes if ast.unparse(node.value) == "self"}
    of_cycle = {node.attr for node in attributes if ast.unparse(node.value) in ("cycle", "self.cycle")}
    of_super = {node.attr for node in attributes if ast.unparse(node.value) == "super()"}
    assert "_check_liveness" in own
    assert of_self - own <= {*OF_CONNECTION, *OVERRIDDEN}
    assert of_cycle <= {*OF_CYCLE}
    assert of_super <= {*OVERRIDDEN}


def test_the_version_is_bounded() -> None:
    assert re.search(r'"uvicorn>=[\d.]+,<[\d.]+"', (ROOT / "pyproject.toml").read_text())
