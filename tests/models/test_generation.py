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
def reference(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Transformers' greedy continuation, and by how much each token won."""
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def excused_tokens(model: PreTrainedModel, path: Path) -> int:
    """Generates with both; fails at a difference that no tie excuses, and counts the others."""
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    # 24 tokens a step: the longer prompts are cut into slices, which share their steps with decodes.
    llm = weft.LLM(path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=4, max_num_batched_tokens=24)
    results = llm.generate(prompts, weft.SamplingParams(temperature=0, max_tokens=TOKENS), progress=False)
    excused = 0
    for prompt, result in zip(prompts, results, strict=True):
        expected, leads = reference(model, prompt)
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
