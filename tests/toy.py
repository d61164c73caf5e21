"""An exact stand-in for a model: what it "computes" for a token is a hash of everything before it, read back through
the block tables. A wrong block, a stale one or a wrong order gives a wrong token, with no rounding to hide in. Its
grammar hashes as well: a mask of another position, or of another request, gives a wrong token.
"""

import hashlib
from collections import abc, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from weft.core import Policy, Scheduler, StepBatch, chunked
from weft.core.prefix import HashedBlocks
from weft.engine.executor import DeviceMemory, Executor, ExecutorFacts, StepInputs, StepMasks, StepResult
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.sequence import SchedulingParams, Sequence
from weft.engine.structured import CompiledGrammar, RequestGrammar
from weft.kv.spec import KVLayout, KVSpec

VOCAB = 50
EOS = 0  # sampled about every fiftieth token


def advance(state: int, token: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{state}:{token}".encode(), digest_size=6).digest(), "big")


def solo(prompt: abc.Sequence[int], max_tokens: int, *, constrained: bool = False) -> list[int]:
    """What a request must generate, whoever it shares the engine with."""
    state, matcher = 0, ToyMatcher()
    for token in prompt:
        state = advance(state, token)
    output: list[int] = []
    while len(output) < max_tokens and EOS not in output:
        output.append(choose(state, matcher.allowed() if constrained else ANY))
        matcher.consume_token(output[-1])
        state = advance(state, output[-1])
    return output


ANY = np.ones(VOCAB, np.bool_)


def choose(state: int, allowed: NDArray[np.bool_]) -> int:
    """The allowed token at or behind the one that the state stands for."""
    return (state + int(np.argmax(np.roll(allowed, -(state % VOCAB))))) % VOCAB


class ToyMatcher:
    """Allows a third of all tokens, which depends on every token before, and the end always."""

    def __init__(self, before_mask: Callable[[], object] = lambda: None) -> None:
        self.state = 0
        self._before_mask = before_mask  # called on the thread that computes a mask

    def consume_token(self, token: int) -> bool:
        self.state = advance(self.state, token)
        return True

    def compute_bitmask(self) -> bytes:
        self._before_mask()
        return np.packbits(np.resize(self.allowed(), 64), bitorder="little").tobytes()

    def allowed(self) -> NDArray[np.bool_]:
        allowed = (np.arange(VOCAB) + self.state) % 3 == 0
        allowed[EOS] = True
        return allowed


class ToyGrammar(CompiledGrammar):
    def __init__(self, matcher: ToyMatcher) -> None:
        super().__init__("", cast(Any, SimpleNamespace(vocab_size=VOCAB, eos_tokens=[EOS])))
        self._only = matcher

    def _make(self) -> Any:
        return self._only


class Lazy:
    """Runs when asked for its result, after all that was submitted before it: what is planned meanwhile comes first."""

    def __init__(self, pending: "deque[Lazy]", run: Callable[[], Any]) -> None:
        self.pending, self.run = pending, run
        self.found: Any = None
        self.error: Exception | None = None
        pending.append(self)

    def result(self) -> Any:
        while self in self.pending:
            first = self.pending[0]
            try:
                first.found = first.run()  # an interrupt here changes nothing
            except Exception as error:
                first.error = error
            self.pending.popleft()
        if self.error is not None:
            raise self.error
        return self.found


class ToyExecutor:
    def __init__(self, slots: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # Two numbers of four bytes for each token: as large as the state that is kept.
        layout = KVLayout(num_layers=1, block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32")
        self.facts = ExecutorFacts("toy", "virtual", layout, VOCAB, "int64")
        self.slots = slots
        self.pending: deque[Lazy] = deque()
        self.allocate_kv_cache(KVSpec(layout, num_blocks))
        self.last_token = np.zeros(slots, np.int64)
        self.lengths = np.zeros(slots, np.int64)  # tokens that are computed
        self.steps = 0
        self.computed = 0

    def measure_memory(self) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 30, reserved=0)

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        self.cache = np.full(spec.num_blocks * self.block_size, -1, np.int64)  # state after the token at this place
        self.tables = np.zeros((self.slots, spec.num_blocks), np.int64)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        progress(1, 1)

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> Lazy:
        return Lazy(self.pending, lambda: self.run(batch, inputs, masks))

    def read_blocks(self, blocks: abc.Sequence[int]) -> Lazy:
        return Lazy(self.pending, lambda: self._blocks[list(blocks)].view(np.uint8))

    def write_blocks(self, blocks: abc.Sequence[int], data: NDArray[np.uint8]) -> Lazy:
        def write() -> None:
            self._blocks[list(blocks)] = np.ascontiguousarray(data).view(np.int64)

        return Lazy(self.pending, write)

    def fill_kv_cache_with_noise(self) -> None:
        self.cache[:] = np.arange(len(self.cache))

    def close(self) -> None:
        pass

    def accepts(self, batch: StepBatch, row: int) -> bool:
        """Whether the step computes a decode row. If not, the scheduler must plan it again."""
        return True

    def run(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None) -> StepResult:
        allowed = _unpacked(masks)
        self.tables[batch.new_blocks.slots, batch.new_blocks.columns] = batch.new_blocks.blocks
        decodes = self.last_token[batch.slots[: batch.num_decodes]]
        values = iter([*decodes.tolist(), *inputs.prefill_tokens.tolist()])
        tokens, accepted, sampled = [], batch.count.copy(), 0
        for row, (slot, first, count) in enumerate(zip(batch.slots, batch.first, batch.count, strict=True)):
            inputs_of_row = [next(values) for _ in range(count)]
            place, sampled = sampled, sampled + int(batch.is_sampled[row])
            if row < batch.num_decodes:
                first = self.lengths[slot]  # the plan is too far ahead if a step before was not accepted
                if not self.accepts(batch, row):
                    accepted[row] = 0
                    continue
            state = 0 if first == 0 else int(self.cache[self._place(slot, first - 1)])
            for position, token in enumerate(inputs_of_row, start=first):
                state = advance(state, token)
                self.cache[self._place(slot, position)] = state
            self.lengths[slot] = first + count
            if batch.is_sampled[row]:
                tokens.append(choose(state, allowed.get(place, ANY)))
                self.last_token[slot] = tokens[-1]
        self.steps += 1
        self.computed += int(accepted.sum())
        is_whole = bool((accepted == batch.count).all())
        times = {"started": float(self.steps), "finished": self.steps + 0.5}
        return StepResult(tokens, **times, accepted=None if is_whole else accepted)

    @property
    def _blocks(self) -> NDArray[np.int64]:
        return self.cache.reshape(-1, self.block_size)

    def _place(self, slot: int, position: int) -> int:
        block, offset = divmod(int(position), self.block_size)
        return int(self.tables[slot, block]) * self.block_size + offset


class ReluctantExecutor(ToyExecutor):
    """Leaves out a decode now and then, as an executor may that waits for something. It must be planned again."""

    refusals = 0

    def accepts(self, batch: StepBatch, row: int) -> bool:
        is_accepted = advance(batch.number, row) % 4 > 0
        self.refusals += not is_accepted
        return is_accepted


def toy_loop(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 32,
    seqs: int = 8,
    depth: int = 1,
    caching: bool = True,
    policy: Policy | None = None,
    make_executor: Callable[[int, int, int], Executor] = ToyExecutor,
    before_reuse: Callable[[HashedBlocks], None] | None = None,
) -> Loop:
    scheduler = Scheduler(
        policy=policy or chunked(budget),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        before_reuse=before_reuse,
    )
    executor = make_executor(scheduler.slots.size, num_blocks, block_size)
    ticks = iter(range(10**9))
    return Loop(scheduler, executor, depth=depth, clock=lambda: float(next(ticks)))


def toy_stream(
    name: str,
    prompt: abc.Sequence[int],
    max_tokens: int = 8,
    *,
    block_size: int = 4,
    arrival: float = 0.0,
    salt: str = "",
    sibling: bool = False,
    matcher: ToyMatcher | None = None,
    **scheduling: Any,
) -> Sequence:
    return Sequence.create(
        name,
        np.array(prompt, np.int32),
        SamplingParams(temperature=0, max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        eos_ids=(EOS,),
        root=root_hash(salt),
        hashes=prompt_hashes(root_hash(salt), np.array(prompt, np.int32), block_size),
        arrival=arrival,
        scheduling=SchedulingParams(**scheduling),
        sibling=sibling,
        grammar=None if matcher is None else RequestGrammar(ToyGrammar(matcher)),
    )


def _unpacked(masks: StepMasks | None) -> dict[int, NDArray[np.bool_]]:
    """Which tokens are allowed, by place."""
    if masks is None:
        return {}
    flags = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(np.bool_)
    return dict(zip(masks.rows.tolist(), flags, strict=True))
