"""Memory limits of containers, read from files as the kernel writes them."""

from pathlib import Path

import pytest

from weft.engine import cgroup_memory
from weft.engine.cgroup_memory import container_rooms


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_counts_every_group_above(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("0::/pod/container\n")
    write(mount / "pod", memory__max="1000\n", memory__current="300\n")
    stat = "anon 100\ninactive_file 50\nactive_file 30\n"
    write(mount / "pod" / "container", memory__max="max\n", memory__current="200\n", memory__stat=stat)
    assert container_rooms(groups, mount) == [700]
    write(mount / "pod" / "container", memory__max="500\n")
    assert sorted(container_rooms(groups, mount)) == [500 - 200 + 80, 700]


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("0::/system.slice/docker-1234.scope\n")
    write(mount, memory__max="700\n", memory__current="100\n")
    assert container_rooms(groups, mount) == [600]


def test_version_1(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("12:cpu,cpuacct:/a\n4:memory:/a\n1:name=systemd:/a\n")
    write(mount / "memory", **{"memory__limit_in_bytes": "9223372036854771712\n", "memory__usage_in_bytes": "5\n"})
    write(mount / "memory" / "a", **{"memory__limit_in_bytes": "800\n", "memory__usage_in_bytes": "900\n"})
    assert container_rooms(groups, mount) == [0], "more is in use than is allowed"


def test_without_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert container_rooms(tmp_path / "none", tmp_path) == []


def test_the_cache_is_sized_by_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup_memory, "container_rooms", lambda: [300 << 20])
    assert cgroup_memory.available_memory() == 300 << 20
