"""PrefixFacts: which prompts repeat the beginning of an earlier one, and how much of that was computed again."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weft.diagnose.step_times import StepTimes
from weft.observe.frames import PromptFrame
from weft.observe.recording import EngineRun

# A prompt is taken for the next turn of a session if it is as long as an earlier prompt and its answer together, and
# at most so many tokens longer.
MOST_NEW_TOKENS = 512
MOST_COMPARED = 64  # earlier prompts with the same first block, the last ones
LEAST_LOST_TOKENS = 256  # of a turn, computed again although an earlier turn had them; less is a partial block


@dataclass(frozen=True)
class PrefixFacts:
    """Counts of prompts and tokens. Only prompts with a recorded start count."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # taken from the prefix cache
    seen_tokens: int = 0  # the beginning of an earlier prompt whose prefill had ended
    evicted_tokens: int = 0  # seen, and computed again: the cache had lost them
    evicted_prompts: int = 0
    broken_prompts: int = 0  # next turns that differ from the turn before at an early block
    broken_tokens: int = 0  # of the turn before, computed again for them
    broken_block: int | None = None  # the block at which most of them differ, from 0
    known_tokens: dict[int, int] = field(default_factory=dict)  # by key: cached, or seen in an earlier prompt

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def again_share(self) -> float:
        """Share of the computed prompt tokens that were computed before."""
        return (self.evicted_tokens + self.broken_tokens) / max(1, self.prompt_tokens - self.cached_tokens)


def prefix_facts(run: EngineRun, times: StepTimes, block_size: int) -> PrefixFacts:
    """Follows the prompts in order of their first step. A prompt counts as seen when its first token has come."""
    starts = times.first_slices()
    ends = times.first_tokens()
    outputs = times.output_tokens()
    events = [(began, 1, key) for key, (began, _) in starts.items() if key in run.prompts]
    events += [(ended, 0, key) for key, ended in ends.items() if key in run.prompts and key in starts]
    seen: set[int] = set()
    known_tokens: dict[int, int] = {}
    turns = _Turns(block_size)
    count = prompt_tokens = cached_tokens = seen_tokens = evicted_tokens = evicted_prompts = 0
    for _, is_start, key in sorted(events):
        prompt = run.prompts[key]
        numbers = np.frombuffer(prompt.prefix, np.int32).tolist()
        if not is_start:
            seen.update(numbers)
            turns.add(prompt, numbers, outputs.get(key, 0))
            continue
        cached = starts[key][1]
        known = _known_blocks(numbers, seen) * block_size
        known = max(cached, min(known, (prompt.prompt_tokens - 1) // block_size * block_size))
        known_tokens[key] = known
        lost = known - cached
        count += 1
        prompt_tokens += prompt.prompt_tokens
        cached_tokens += cached
        seen_tokens += known
        if lost >= LEAST_LOST_TOKENS:
            evicted_tokens += lost
            evicted_prompts += 1
        known_tokens[key] += turns.compare(prompt, numbers, known // block_size)
    return PrefixFacts(
        count,
        prompt_tokens,
        cached_tokens,
        seen_tokens,
        evicted_tokens,
        evicted_prompts,
        turns.broken_prompts,
        turns.broken_tokens,
        turns.blocks.most_common(1)[0][0] if turns.blocks else None,
        known_tokens,
    )


def _known_blocks(numbers: list[int], seen: set[int]) -> int:
    """Blocks at the beginning that were seen. A block's number stands for all blocks before it, too."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high + 1) // 2
        if numbers[middle - 1] in seen:
            low = middle
        else:
            high = middle - 1
    return low


class _Turns:
    """Finds prompts that look like the next turn of an earlier one by their length, but differ from it early.

    Only prompts with the same first block are compared: a prompt that differs in its first block looks like any other.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.broken_prompts = self.broken_tokens = 0
        self.blocks = Counter[int]()
        self._by_first_block: dict[int, list[tuple[int, NDArray[np.int32]]]] = {}

    def add(self, prompt: PromptFrame, numbers: list[int], output_tokens: int) -> None:
        if numbers:
            entry = (prompt.prompt_tokens + output_tokens, np.frombuffer(prompt.prefix, np.int32))
            self._by_first_block.setdefault(numbers[0], []).append(entry)

    def compare(self, prompt: PromptFrame, numbers: list[int], known: int) -> int:
        """Counts the prompt if it is a broken turn. `known` of its blocks were seen. Returns the tokens that it lost."""
        earlier = self._by_first_block.get(numbers[0], []) if numbers else []
        fitting = [
            blocks
            for length, blocks in earlier[-MOST_COMPARED:]
            if 0 <= prompt.prompt_tokens - length <= MOST_NEW_TOKENS
        ]
        if not fitting:
            return 0
        own = np.array(numbers, np.int32)
        shared, blocks = max(((_shared(own, one), one) for one in fitting), key=lambda pair: pair[0])
        lost = (min(len(blocks), len(own)) - max(shared, known)) * self.block_size
        if 2 * shared >= len(blocks) or lost < LEAST_LOST_TOKENS:
            return 0
        self.broken_prompts += 1
        self.broken_tokens += lost
        self.blocks[shared] += 1
        return lost


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    size = min(len(one), len(other))
    return int(np.argmin(np.append(one[:size] == other[:size], False)))
