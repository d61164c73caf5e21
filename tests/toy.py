"""An exact stand-in for a model: what it "computes" for a token is a hash of everything before it, read back through
the block tables. A wrong block, a stale one or a wrong order gives a wrong token, with no rounding to hide in. Its
grammar hashes as well: a mask of another position, or of another request, gives a wrong token.
"""

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weft.core import Policy, Scheduler, StepPlan, chunked
from weft.engine.executor import StepInputs, StepMasks, StepResult
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.stream import Standing, Stream
from weft.engine.structured import Form, Grammar

VOCAB = 50
EOS = 0  # sampled about every fiftieth token


def advance(state: int, token: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{state}:{token}".encode(), digest_size=6).digest(), "big")


def solo(prompt: Sequence[int], max_tokens: int, *, constrained: bool = False) -> list[int]:
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


class ToyForm(Form):
    def __init__(self, matcher: ToyMatcher) -> None:
        super().__init__("", cast(Any, SimpleNamespace(vocab_size=VOCAB, eos_tokens=[EOS])))
        self._only = matcher

    def _make(self) -> Any:
        return self._only


class Lazy(NamedTuple):
    """Runs when asked for its result, so that everything planned meanwhile has happened before."""

    executor: "ToyExecutor"
    plan: StepPlan
    inputs: StepInputs
    masks: StepMasks | None

    def result(self) -> StepResult:
        return self.executor.run(self.plan, self.inputs, self.masks)


class ToyExecutor:
    def __init__(self, slots: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = np.full(num_blocks * block_size, -1, np.int64)  # state after the token at this place
        self.tables = np.zeros((slots, num_blocks), np.int64)
        self.last_token = np.zeros(slots, np.int64)
        self.steps = 0
        self.computed = 0

    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> Lazy:
        return Lazy(self, plan, inputs, masks)

    def close(self) -> None:
        pass

    def run(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None) -> StepResult:
        allowed = _unpacked(masks)
        self.tables[plan.new_blocks.slots, plan.new_blocks.columns] = plan.new_blocks.blocks
        decodes = self.last_token[plan.slots[: plan.num_decodes]]
        values = iter([*decodes.tolist(), *inputs.prefill_tokens.tolist()])
        tokens = []
        for slot, first, count, samples in zip(plan.slots, plan.first, plan.count, plan.samples, strict=True):
            state = 0 if first == 0 else int(self.cache[self._place(slot, first - 1)])
            for position in range(first, first + count):
                state = advance(state, next(values))
                self.cache[self._place(slot, position)] = state
            if samples:
                tokens.append(choose(state, allowed.get(len(tokens), ANY)))
                self.last_token[slot] = tokens[-1]
        self.steps += 1
        self.computed += plan.num_tokens
        return StepResult(tokens, started=float(self.steps), finished=self.steps + 0.5)

    def _place(self, slot: int, position: int) -> int:
        block, offset = divmod(int(position), self.block_size)
        return int(self.tables[slot, block]) * self.block_size + offset


def toy_loop(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 32,
    seqs: int = 8,
    depth: int = 1,
    caching: bool = True,
    policy: Policy | None = None,
) -> Loop:
    scheduler = Scheduler(
        policy=policy or chunked(budget),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
    )
    executor = ToyExecutor(scheduler.slots.size, num_blocks, block_size)
    ticks = iter(range(10**9))
    return Loop(scheduler, executor, depth=depth, clock=lambda: float(next(ticks)))


def toy_stream(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    block_size: int = 4,
    arrival: float = 0.0,
    salt: str = "",
    sibling: bool = False,
    matcher: ToyMatcher | None = None,
    **standing: Any,
) -> Stream:
    return Stream.open(
        name,
        np.array(prompt, np.int32),
        SamplingParams(temperature=0, max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        eos_ids=(EOS,),
        root=root_hash(salt),
        hashes=prompt_hashes(root_hash(salt), np.array(prompt, np.int32), block_size),
        arrival=arrival,
        standing=Standing(**standing),
        sibling=sibling,
        grammar=None if matcher is None else Grammar(ToyForm(matcher)),
    )


def _unpacked(masks: StepMasks | None) -> dict[int, NDArray[np.bool_]]:
    """Which tokens are allowed, by place."""
    if masks is None:
        return {}
    flags = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(np.bool_)
    return dict(zip(masks.places.tolist(), flags, strict=True))
