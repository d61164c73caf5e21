"""`available_memory`: what this process may still allocate, within the limits of its control groups (cgroups)."""

from collections.abc import Iterator
from pathlib import Path

CGROUP_FILE, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
UNBOUNDED = 1 << 60  # cgroup version 1 shows a number near 2**63 if there is no limit


def available_memory() -> int:
    """Bytes that this process can still allocate: the machine's free memory or the container's limit, if smaller."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):  # not Linux
        free = 8 << 30
    return min([free, *container_rooms()])


def container_rooms(groups: Path = CGROUP_FILE, mount: Path = CGROUP_MOUNT) -> list[int]:
    """Bytes that each limited group can still allocate; empty if no group is limited."""
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
    """Yields the folder of this process's group and of each parent, with the names of its limit and usage files."""
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
        # In a container, its group is often mounted as the root, while the name is the one outside the container.
        for folder in (own, *own.parents):
            if folder == root or root in folder.parents:
                yield folder, *files


def _cache(folder: Path) -> int:
    """Bytes of the group's page cache, which the kernel frees on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get("inactive_file", 0)) + int(found.get("active_file", 0))
