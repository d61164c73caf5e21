"""Builds an engine: the model on its executor, the KV cache, the calibrated step costs and the scheduling policy."""

import gc
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core import CostModel, Policy, Scheduler, Source, Targets, chunked, monolithic, slo
from weft.core.cost import MOST_SPREAD
from weft.core.slots import Slots
from weft.engine.calibration import Calibration, calibration_file, load_calibration, save_calibration
from weft.engine.cpu_features import prepare_cpu
from weft.engine.engine import CalibratedTargets, Engine
from weft.engine.executor import DeviceMemory, Executor, ExecutorFacts
from weft.engine.fingerprint import block_space
from weft.engine.loop import Loop
from weft.engine.measure_host_cost import SubmitTimes, measure_host_cost
from weft.engine.options import EngineOptions
from weft.engine.run_calibration import calibrate
from weft.engine.structured import Grammars
from weft.errors import EngineError, OptionError
from weft.kv.spec import KVSpec
from weft.progress import work_progress

if TYPE_CHECKING:  # torch takes seconds to import, and prepare_cpu() must come before it
    import torch

    from weft.models import ModelConfig

MAX_BLOCKS = 1 << 22  # the host keeps about 100 bytes of state for each block
CALIBRATION_SECONDS = 5.0
DEFAULT_GAP_SECONDS, DEFAULT_GAP_STEPS = 0.05, 2.0  # decode steps; the larger of the two is the default gap target
DEFAULT_TTFT, DEFAULT_TTFT_PER_1K = 1.0, 0.25  # seconds; the second is added per 1,000 prompt tokens
LEAST_GAP_STEPS = 1.5  # decode steps; the default minimum gap; less leaves no time for prefill


def build_engine(
    options: EngineOptions,
    path: Path,
    eos_ids: tuple[int, ...] = (),
    done: Callable[[str], None] = lambda part: None,
    *,
    is_served: bool = False,
) -> Engine:
    """Loads the model in `path`, sizes its KV cache and returns the engine.

    `eos_ids` are end-of-text tokens in addition to the config's. `is_served` says that tokens go to clients through an
    API process. With targets and no good stored calibration for this model and device, it calibrates for a few seconds.
    `done` is called after each part of the work, with the name of the part.
    """
    prepare_cpu()
    from weft.models import load_config

    done("imports")
    config = load_config(path)
    longest = options.max_model_len or config.max_context
    if longest > config.longest_context:
        raise OptionError(
            f"max_model_len={longest} is above the model's context of {config.longest_context} tokens: lower it"
        )
    executor = _executor(options, path, config, longest)
    done("weights")
    num_blocks = _allocate_and_warm_up(options, executor, longest, done)
    max_model_len = _fit_context(options, longest, num_blocks)
    calibrated_targets = None
    if options.has_targets:
        calibrated_targets = _calibrated_targets(
            options, _calibration(options, path, executor, num_blocks, max_model_len)
        )
        done("calibration")
    scheduler = Scheduler(
        policy=_policy(options, calibrated_targets, is_served),
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=options.enable_prefix_caching,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        wave=executor.facts.wave,
    )
    eos_ids = (*config.eos_token_ids, *eos_ids)
    return Engine(
        Loop(scheduler, executor),
        vocab_size=config.vocab_size,
        eos_ids=eos_ids,
        max_model_len=max_model_len,
        seed=options.seed,
        calibrated_targets=calibrated_targets,
        grammars=Grammars(path, config.vocab_size, eos_ids),
        hidden_size=config.hidden_size,
        block_space=block_space(path, config, executor.facts, load_format=options.load_format, max_model_len=longest),
    )


def _executor(options: EngineOptions, path: Path, config: "ModelConfig", longest: int) -> Executor:
    """Loads the model onto the device. The KV cache comes later."""
    import torch

    from weft.models import Dtypes, load_model, resolve_dtype

    device = _device(options.device)
    dtypes = Dtypes.of(resolve_dtype(options.dtype, config, device))
    if device.type == "cuda" and torch.cuda.memory_reserved(device):  # by an earlier engine of this process
        gc.collect()
        torch.cuda.empty_cache()
    model = load_model(
        path, config, dtypes=dtypes, device=device, max_model_len=longest, load_format=options.load_format
    )
    slots, block_size = Slots.size_for(options.max_num_seqs), options.block_size
    if device.type == "cuda":
        from weft.engine.cuda_executor import CudaExecutor, Limits

        if torch.cuda.get_device_capability(device)[0] == 9 and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            # With a workspace, cuBLAS clears a counter in it before each larger product, and the device waits for that:
            # 1% of a mixed step of 512 tokens (Llama-3-8B on an H200). Both are set, because torch warns if the second
            # is larger than the first.
            os.environ.update(CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")
        limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, longest, slots)
        return CudaExecutor(model, limits, block_size=block_size, device=device)
    from weft.engine.cpu_executor import CpuExecutor

    return CpuExecutor(model, block_size=block_size, slots=slots, max_model_len=longest, device=device)


def _allocate_and_warm_up(options: EngineOptions, executor: Executor, longest: int, done: Callable[[str], None]) -> int:
    """Allocates the KV cache and warms the executor up. Returns the number of blocks of the cache."""
    facts = executor.facts
    is_gpu = facts.device_type == "cuda"
    memory = executor.measure_memory()
    if is_gpu:
        done("largest steps")
    num_blocks = _num_blocks(facts, _kv_memory(options, facts.device_type, memory))
    _fit_context(options, longest, num_blocks)
    executor.allocate_kv_cache(KVSpec(facts.layout, num_blocks))
    done("KV cache")
    with work_progress("capturing graphs", 1000, is_gpu and sys.stderr.isatty()) as advance:
        executor.warm_up(lambda ready, of: advance(1000 * ready // of))
    if is_gpu:
        done("graphs")
    return num_blocks


def _calibration(
    options: EngineOptions, path: Path, executor: Executor, num_blocks: int, max_model_len: int
) -> Calibration:
    """Returns the stored calibration, or measures and stores one. If storing fails, the next start measures again.

    A noisy calibration (of a busy machine) is measured again at every start until it is not noisy. The calibration with
    the smaller error is kept.
    """
    limits = {
        "block_size": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": max_model_len,
    }
    file = calibration_file(path, dtype=executor.facts.dtypes, device=executor.facts.device, **limits)
    known = load_calibration(file)
    found = known
    if known is None or known.is_noisy:
        limits["num_blocks"] = num_blocks
        try:
            found = _calibrate(executor, limits, CALIBRATION_SECONDS)
        except EngineError:  # too few steps in the time: the machine is slow or busy
            found = known or _calibrate(executor, limits, 4 * CALIBRATION_SECONDS)
        if known is not None and known.error <= found.error:
            return known
        try:
            save_calibration(file, found)
        except EngineError as error:
            print(f"weft: {error}", file=sys.stderr)
    assert found is not None
    return found


def _calibrate(executor: Executor, limits: dict[str, Any], seconds: float) -> Calibration:
    with work_progress("calibrating", 1000, sys.stderr.isatty()) as advance:
        return calibrate(executor, seconds=seconds, progress=lambda share: advance(int(1000 * share)), **limits)


def _calibrated_targets(options: EngineOptions, calibration: Calibration) -> CalibratedTargets:
    """The operator's targets. Missing ones get defaults if `default_targets` is set."""
    least = options.min_gap_target_ms
    gap, gap_source = math.inf, Source.DEFAULT
    if options.gap_target_ms is not None:
        gap, gap_source = options.gap_target_ms / 1000, Source.OPERATOR
    elif options.default_targets:
        gap = max(DEFAULT_GAP_SECONDS, DEFAULT_GAP_STEPS * calibration.decode_step)
    ttft, per_1k, ttft_source = math.inf, options.ttft_target_per_1k_ms, Source.DEFAULT
    if options.default_targets:
        ttft = DEFAULT_TTFT
    if options.ttft_target_ms is not None:
        ttft = options.ttft_target_ms / 1000
    if options.ttft_target_ms is not None or per_1k is not None:
        ttft_source = Source.OPERATOR
    if per_1k is None:
        per_1k = 1000 * DEFAULT_TTFT_PER_1K if options.default_targets else 0.0
    min_gap = LEAST_GAP_STEPS * calibration.decode_step if least is None else least / 1000
    targets = Targets(
        gap=max(gap, min_gap),
        ttft=ttft,
        ttft_per_1k=per_1k / 1000,
        gap_source=gap_source,
        ttft_source=ttft_source,
        min_gap=min_gap,
    )
    return CalibratedTargets(targets, calibration)


def _policy(options: EngineOptions, calibrated_targets: CalibratedTargets | None, is_served: bool) -> Policy:
    if options.policy == "monolithic":
        return monolithic(options.max_num_batched_tokens)
    if calibrated_targets is None:  # slo too: without targets it has nothing to size a step by
        return chunked(options.max_num_batched_tokens)
    found = calibrated_targets.calibration
    host = measure_host_cost(
        found.coefficients, SubmitTimes(found.submit, found.submit_prefill), found.wake, is_served=is_served
    )
    cost = CostModel(found.coefficients, found.mean, min(found.spread, MOST_SPREAD), host=host)
    return slo(cost, options.max_num_batched_tokens)


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
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise OptionError(f"device={name!r}: choose cuda, and the card with CUDA_VISIBLE_DEVICES={device.index}")
    return device


def _kv_memory(options: EngineOptions, device_type: str, memory: DeviceMemory) -> int:
    """Bytes for the KV cache. On a GPU: the configured share or number. On a CPU, other programs need memory too."""
    wanted = options.kv_cache_memory_bytes
    if device_type == "cpu":
        return wanted or min(memory.free // 4, 8 << 30)
    total, free, reserved = memory
    most = max(0, free - reserved)
    if wanted is None:
        return min(most, max(0, int(total * options.gpu_memory_utilization) - (total - free)))
    if wanted > most:
        raise OptionError(
            f"kv_cache_memory_bytes={wanted} is above the {most} bytes that are left for it beside weights, steps and "
            "graphs: lower it, or max_num_batched_tokens or max_num_seqs"
        )
    return wanted


def _num_blocks(facts: ExecutorFacts, memory: int) -> int:
    """Number of blocks that fit into `memory` bytes."""
    each = facts.layout.block_bytes
    if memory < each:
        raise OptionError(
            f"the KV cache has {memory} bytes, but one block of {facts.layout.block_size} tokens takes {each}: "
            "raise kv_cache_memory_bytes (or gpu_memory_utilization)"
        )
    return min(memory // each, MAX_BLOCKS)


def _fit_context(options: EngineOptions, longest: int, num_blocks: int) -> int:
    """The longest context of one request that fits the KV cache. An explicit max_model_len must fit."""
    room = num_blocks * options.block_size + 1  # the last token is sampled and never stored
    if options.max_model_len is not None and room < options.max_model_len:
        raise OptionError(
            f"the KV cache holds {room - 1} tokens, less than one request of max_model_len={options.max_model_len}: "
            "raise kv_cache_memory_bytes (or gpu_memory_utilization) or lower max_model_len"
        )
    return min(longest, room)
