"""Every family through the whole engine: 64 greedy tokens as Transformers generates them, in slices and in company."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import weft
from tests.models import tiny
from tests.models.conftest import Saved

LENGTHS = (3, 37, 60)
TOKENS = 64
CONTEXT = tiny.CONTEXT // 4  # the original context of longrope, beyond which Transformers changes its factors under way
TIE = 1e-4  # the reference's two best logits this close excuse a different choice


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """What Transformers would choose behind the prompt and each of the tokens, and by how much each choice won. As long
    as its choices are these tokens, it is its greedy continuation, at the price of one pass instead of one a token."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.float().topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def excused_tokens(model: PreTrainedModel, path: Path) -> int:
    """Generates with both; fails at a difference that no tie excuses, and counts the others."""
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    # 24 tokens a step: the longer prompts are cut into slices, which share their steps with decodes.
    llm = weft.LLM(path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=4, max_num_batched_tokens=24)
    results = llm.generate(prompts, weft.SamplingParams(temperature=0, max_tokens=TOKENS), progress=False)
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    excused = 0
    for prompt, result in zip(prompts, results, strict=True):
        *before, last = result.token_ids
        assert len(before) + 1 == TOKENS or last in ends
        assert not {*before} & {*ends}
        expected, leads = reference(model, prompt, result.token_ids)
        for position, (mine, theirs) in enumerate(zip(result.token_ids, expected, strict=True)):
            if mine != theirs:
                assert leads[position] < TIE, f"token {position} after {len(prompt)}: {mine} instead of {theirs}"
                excused += 1
                break  # from here on the two continue different texts
    return excused


def test_greedy_tokens_are_those_of_transformers_for_every_family_and_rope(saved: Saved) -> None:
    names = [*tiny.FAMILIES, *tiny.ROPES]
    excused = sum(excused_tokens(*saved(name)) for name in names)
    assert excused < 0.001 * len(names) * len(LENGTHS) * TOKENS


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe", "gemma3", "phi3"])
def test_a_sharded_checkpoint_generates_the_same(name: str, tmp_path: Path) -> None:
    model = tiny.FAMILIES[name]()
    tiny.save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert excused_tokens(model, tmp_path) == 0
