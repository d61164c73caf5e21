"""KV blocks are read and written by id, and their names mean the same in another process: a prefix moves between two
engines with a real model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import tiny_directory
from weft import LLM, SamplingParams
from weft.engine.executor import Bytes, ExecutorFacts
from weft.engine.fingerprint import block_space
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.simulated import VIRTUAL_LAYOUT
from weft.models import load_config

PROMPT = list(range(2, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def llm_of(path: Path, **options: Any) -> LLM:
    given = {"dtype": "float64", "block_size": 8, "kv_cache_memory_bytes": 1 << 20, **options}
    return LLM(path, load_format="dummy", max_num_seqs=4, **given)


def names_of(llm: LLM, prompt: list[int], salt: str = "") -> list[bytes]:
    root = root_hash(salt, llm.engine.block_space)
    return prompt_hashes(root, np.array(prompt, np.int32), llm.engine.loop.scheduler.block_size)


def test_a_prefix_computed_by_one_engine_is_used_by_another(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path)
    with llm_of(path) as one, llm_of(path) as other:
        expected = one.generate([PROMPT], GREEDY, progress=False)[0].token_ids
        names = names_of(one, PROMPT)
        assert names == names_of(other, PROMPT)
        blocks = one.engine.loop.scheduler.kv.cache.match(names, 0, len(names))
        assert len(blocks) == len(names) == len(PROMPT) // 8
        data = one.engine.loop.executor.read_blocks(blocks).result()
        assert data.shape == (len(blocks), one.engine.loop.executor.facts.layout.block_bytes)

        scheduler = other.engine.loop.scheduler
        expected_blocks = scheduler.kv.reserve_incoming(names)
        assert expected_blocks is not None
        other.engine.loop.executor.write_blocks(expected_blocks.blocks, data).result()
        assert not scheduler.kv.cache.match(names, 0, len(names)), "not before they have arrived"
        assert scheduler.kv.end_transfer(expected_blocks, arrived=True)
        scheduler.check_integrity()
        loop, (stream,) = other.engine.loop, other.engine.create_sequences(PROMPT, GREEDY)
        loop.add(stream)
        while loop.has_work:
            loop.step()
        assert stream.output == expected
        assert stream.request.cached_tokens == len(names) * 8


def test_the_bytes_of_a_block_do_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    with llm_of(tiny_directory(tmp_path)) as llm:
        executor = llm.engine.loop.executor
        layout = executor.facts.layout
        random = np.random.default_rng(0)
        data: Bytes = random.integers(256, size=(3, layout.block_bytes), dtype=np.uint8)
        executor.write_blocks([5, 0, 9], data).result()
        np.testing.assert_array_equal(executor.read_blocks([0, 9, 5]).result(), data[[1, 2, 0]])
        kv: Any = executor
        shape = (layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        inner = data[0].view(np.float64).reshape(shape)
        np.testing.assert_array_equal(kv.kv.k[1][5].numpy(), inner[1, 0])
        np.testing.assert_array_equal(kv.kv.v[0][5].numpy(), inner[0, 1])


def test_names_depend_on_all_that_changes_the_numbers(tmp_path: Path) -> None:
    path, other = tiny_directory(tmp_path / "a"), tiny_directory(tmp_path / "b", rope_theta=77.0)
    with llm_of(path) as llm:
        own = names_of(llm, PROMPT)
        assert own != names_of(llm, PROMPT, salt="salt")
        options: list[dict[str, Any]] = [{"dtype": "float32"}, {"block_size": 16}]
        for changed in options:
            with llm_of(path, **changed) as another:
                assert not set(own) & set(names_of(another, PROMPT))
        with llm_of(other) as another:
            assert not set(own) & set(names_of(another, PROMPT))


def space_of(path: Path, **changes: Any) -> bytes:
    given: dict[str, Any] = {"load_format": "auto", "max_model_len": 64, **changes}
    facts = ExecutorFacts("a machine", given.pop("device_type", "cpu"), VIRTUAL_LAYOUT, 64, "float64")
    return block_space(path, load_config(path), facts, **given)


def save(folder: Path, name: str = "model.safetensors", **changed: float) -> Path:
    """A model directory with three tensors; `changed` adds a number to some of them."""
    from safetensors.numpy import save_file

    tiny_directory(folder)
    numbers = np.random.default_rng(0).normal(size=(3, 300, 300))
    save_file({key: numbers[i] + changed.get(key, 0.0) for i, key in enumerate("abc")}, folder / name)
    return folder


def test_a_fine_tune_of_one_tensor_has_other_names(tmp_path: Path) -> None:
    base = space_of(save(tmp_path / "base"))
    assert base == space_of(save(tmp_path / "copy"))
    for tensor in "abc":
        assert base != space_of(save(tmp_path / tensor, **{tensor: 1e-3}))


def test_only_files_that_are_loaded_count(tmp_path: Path) -> None:
    folder = save(tmp_path)
    base = space_of(folder)
    save(folder, "consolidated.safetensors", a=1.0)
    assert base == space_of(folder)


def test_random_weights_depend_on_the_device(tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path)
    spaces = {space_of(folder, load_format="dummy", device_type=kind) for kind in ("cpu", "cuda", "cpu")}
    assert len(spaces) == 2


def test_a_rotation_that_depends_on_the_context_is_part_of_the_name(tmp_path: Path) -> None:
    fixed, dynamic = (
        tiny_directory(tmp_path / "fixed"),
        tiny_directory(
            tmp_path / "dynamic", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        ),
    )
    dummy = {"load_format": "dummy"}
    assert space_of(fixed, **dummy, max_model_len=64) == space_of(fixed, **dummy, max_model_len=100_000)
    assert space_of(dynamic, **dummy, max_model_len=64) != space_of(dynamic, **dummy, max_model_len=100_000)


def test_names_are_the_same_in_another_process(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path)
    with llm_of(path) as llm:
        own = [name.hex() for name in names_of(llm, PROMPT)]
    code = (
        "import json, sys; from pathlib import Path; from tests.engine.test_blocks_travel import *\n"
        "with llm_of(Path(sys.argv[1])) as llm: print(json.dumps([n.hex() for n in names_of(llm, PROMPT)]))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == own


@pytest.mark.parametrize("arrived", [True, False])
def test_a_transfer_that_ends_after_a_reset_changes_nothing(tmp_path: Path, arrived: bool) -> None:
    with llm_of(tiny_directory(tmp_path)) as llm:
        scheduler = llm.engine.loop.scheduler
        expected = scheduler.kv.reserve_incoming([b"a", b"b"])
        assert expected is not None
        scheduler.reset()
        assert not scheduler.kv.end_transfer(expected, arrived=arrived)
        scheduler.check_integrity()
        assert scheduler.kv.block_pool.num_free == scheduler.kv.block_pool.num_blocks
