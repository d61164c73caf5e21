from tests.serve.conftest import server

__all__ = ["server"]
