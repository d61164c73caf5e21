"""What a container allows: the memory limits of the control groups (cgroups) that this process is in."""

from collections.abc import Iterator
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
UNBOUNDED = 1 << 60  # version 1 writes a number near 2**63 where there is no limit


def container_rooms(groups: Path = GROUPS, mount: Path = MOUNT) -> list[int]:
    """Bytes that each limited group may still take; empty where none is limited."""
    rooms = []
    for folder, limit, used in _folders(groups, mount):
        try:
            most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
            if most != "max" and int(most) < UNBOUNDED:
                rooms.append(max(0, int(most) - taken + _cache(folder)))
        except (OSError, ValueError):
            continue
    return rooms


def _folders(groups: Path, mount: Path) -> Iterator[tuple[Path, str, str]]:
    """Of the own group and of all above it: the folder, and the names of the files with its limit and what it uses."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2
            root, files = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / name.lstrip("/")
        # Within a container its own group is often mounted as the root, and the name is that of the world outside.
        for folder in (own, *own.parents):
            if folder == root or root in folder.parents:
                yield folder, *files


def _cache(folder: Path) -> int:
    """Bytes of files that the group holds in memory and would give up."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get("inactive_file", 0)) + int(found.get("active_file", 0))
