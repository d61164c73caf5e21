"""A server that answers every completion at once with one token. It shows how fast `weft bench serve` can send.

    python scripts/stub_server.py --port 8100 &
    weft bench serve --url http://127.0.0.1:8100 --request-rate 2000 --num-prompts 20000 --input-len 16 --output-len 1

Needs nothing but weft's own packages.
"""

import argparse
import asyncio
import json

import httptools
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
EVENTS = (
    {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}},
)


def whole(data: object) -> bytes:
    body = json.dumps(data).encode()
    return HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body


def streamed() -> bytes:
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"])
    return HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    answer, models = streamed(), whole({"data": [{"id": "stub"}]})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body = b"", b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.path == b"/v1/models":
            self.transport.write(self.models)
        elif self.path == b"/tokenize":  # a word is a token
            self.transport.write(whole({"count": len(json.loads(self.body)["prompt"].split())}))
        else:
            self.transport.write(self.answer)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    uvloop.run(serve(parser.parse_args().port))
