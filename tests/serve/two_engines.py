"""A server with two engine processes. No option asks for several yet."""

import sys

from weft.engine.options import EngineOptions
from weft.serve.options import ServeOptions
from weft.serve.server import serve

if __name__ == "__main__":
    options = EngineOptions.of(policy="chunked", max_num_seqs=16, kv_cache_memory_bytes=64 << 20)
    sys.exit(serve(ServeOptions(port=0, shutdown_timeout=2), options, engines=2))
