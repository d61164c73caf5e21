"""Engine: a loop together with the model's facts that a request is checked against, and how one is put together."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.core import ChunkedPolicy, Scheduler
from weft.engine.cpu import prepare_cpu
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.options import EngineOptions
from weft.engine.params import SamplingParams
from weft.engine.stream import Stream
from weft.errors import OptionError, RequestError

if TYPE_CHECKING:  # torch takes seconds to import, and must not be before prepare_cpu()
    import torch

    from weft.models import ModelConfig

MAX_BLOCKS = 1 << 22  # the host keeps about 100 bytes of books for each
DEFAULT_MODEL = Path(__file__).parent.parent / "default_model"


class Engine:
    """Opens streams on a loop. The loop does the rest."""

    def __init__(self, loop: Loop, *, vocab_size: int, eos_ids: tuple[int, ...], max_model_len: int, seed: int | None):
        self.loop = loop
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    @classmethod
    def build(cls, options: EngineOptions, path: Path, eos_ids: tuple[int, ...] = ()) -> "Engine":
        """Loads the model in `path` and sizes its KV cache. `eos_ids` end a text beside those that the config names."""
        prepare_cpu()
        from weft.engine.torch_executor import TorchExecutor
        from weft.kv import KVPool
        from weft.models import load_config, load_model, resolve_dtype

        config = load_config(path)
        device = _device(options.device)
        dtype = resolve_dtype(options.dtype, config, device)
        longest = options.max_model_len or config.max_context
        if longest > config.longest_context:
            raise OptionError(
                f"max_model_len={longest} is above the model's context of {config.longest_context} tokens: lower it"
            )
        model = load_model(
            path, config, dtype=dtype, device=device, max_model_len=longest, load_format=options.load_format
        )
        num_blocks = _num_blocks(options, config, dtype, device)
        max_model_len = _fit_context(options, longest, num_blocks)
        kv = KVPool(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
        scheduler = Scheduler(
            policy=ChunkedPolicy(options.max_num_batched_tokens),
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
        )
        executor = TorchExecutor(
            model,
            kv,
            slots=scheduler.slots.size,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            device=device,
        )
        return cls(
            Loop(scheduler, executor),
            vocab_size=config.vocab_size,
            eos_ids=(*config.eos_token_ids, *eos_ids),
            max_model_len=max_model_len,
            seed=options.seed,
        )

    def open_streams(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = ""
    ) -> list[Stream]:
        """Checks a request and makes its `params.n` streams. Nothing runs before `loop.add`."""
        tokens = self._checked(prompt)
        params.check_vocabulary(self.vocab_size)
        room = self.max_model_len - len(tokens)
        number = next(self._numbers)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        root = root_hash(salt)
        hashes = prompt_hashes(root, tokens, self.loop.scheduler.block_size)
        # Only the first describes the prompt; the others are free to take it from the prefix cache.
        silent = replace(params, prompt_logprobs=None)
        return [
            Stream.open(
                f"{number:08d}-{index}",
                tokens,
                silent if index else params,
                seed=seed + index * 0x9E3779B97F4A7C15,  # unrelated noise for each of the n
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                eos_ids=self.eos_ids,
                root=root,
                hashes=hashes,
                arrival=self.loop.clock(),
                priority=priority,
            )
            for index in range(params.n)
        ]

    def _checked(self, prompt: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, str | bytes):
            raise RequestError(f"a prompt is text or a list of token ids, not {prompt!r}")
        if len(prompt) == 0:
            raise RequestError("the prompt is empty: at least one token is needed to predict the next one")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and must leave room for one more, but the context is "
                f"{self.max_model_len}: shorten the prompt, or raise max_model_len if the model allows it"
            )
        try:
            tokens = np.asarray(prompt)
            whole = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise RequestError("a prompt of token ids must be a flat list of whole numbers")
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(wrong):
            at = int(wrong[0])
            raise RequestError(
                f"token id {tokens[at]} at position {at} is outside the vocabulary 0..{self.vocab_size - 1}"
            )
        return tokens.astype(np.int32)


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"device={name!r} is not supported: choose auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={name!r}: torch finds no CUDA device here; choose cpu")
    return device


def _num_blocks(options: EngineOptions, config: "ModelConfig", dtype: "torch.dtype", device: "torch.device") -> int:
    """Blocks that the memory for the KV cache holds."""
    from weft.kv import block_bytes

    each = block_bytes(config.num_layers, options.block_size, config.num_kv_heads, config.head_dim, dtype)
    memory = options.kv_cache_memory_bytes or _free_memory(options, device)
    if memory < each:
        raise OptionError(
            f"the KV cache has {memory} bytes, but one block of {options.block_size} tokens takes {each}: "
            "raise kv_cache_memory_bytes (or gpu_memory_utilization)"
        )
    return min(memory // each, MAX_BLOCKS)


def _free_memory(options: EngineOptions, device: "torch.device") -> int:
    """Bytes to spend on the KV cache where the owner did not say."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * options.gpu_memory_utilization) - (total - free))
    # On a CPU the memory is shared with everything else: a quarter of what is available, at most 8 GiB.
    return min(_available_memory() // 4, 8 << 30)


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):  # not Linux
        return 8 << 30


def _fit_context(options: EngineOptions, longest: int, num_blocks: int) -> int:
    """The context that the KV cache can hold for one request; an explicit wish that does not fit is an error."""
    room = num_blocks * options.block_size + 1  # the last token is sampled, never stored
    if options.max_model_len is not None and room < options.max_model_len:
        raise OptionError(
            f"the KV cache holds {room - 1} tokens, less than one request of max_model_len={options.max_model_len}: "
            "raise kv_cache_memory_bytes (or gpu_memory_utilization) or lower max_model_len"
        )
    return min(longest, room)
