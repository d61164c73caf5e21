"""EngineFolder: the temporary folder with the socket and the heartbeat file of one engine process."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "weft-"
LOCK = "lock"
MOST_PATH = 103  # bytes; longest socket path: the limit is 107 on Linux and 103 on macOS
STALE_AGE_S = 60.0  # seconds; an unlocked folder of this age was left behind, and is not being created


class EngineFolder:
    """A folder that only this user can read. Its lock is held until `close` or the end of this process, even a kill."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self.path.rmdir()
            raise
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        socket = self.path / "engine"
        if len(os.fsencode(socket)) > MOST_PATH:
            self.close()
            raise OSError(
                f"the path of a socket, {socket}, has {len(os.fsencode(socket))} bytes, and may have {MOST_PATH}: "
                "point TMPDIR to a folder with a shorter path"
            )
        self.address = f"ipc://{socket}"
        self.heartbeat_file = self.path / "heartbeat"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale_folders() -> int:
    """Removes folders that killed servers of this user left behind. Returns their number."""
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if (
                not stat.S_ISDIR(about.st_mode)
                or about.st_uid != os.getuid()
                or time.time() - about.st_mtime < STALE_AGE_S
            ):
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # other programs' have none
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed += 1
            finally:
                os.close(lock)
    return removed
