"""Runs the engine on the CPU and on a CUDA device with the same random weights, and compares their greedy tokens.

    python scripts/compare_devices.py            # Qwen3-0.6B's shape, float32, eager

A differing token is excused only where the CPU's two best log probabilities lie within 1e-4.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import weft

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TIE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt (default: 64)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[5, 100, 300, 700], help="lengths of the prompts")
    parser.add_argument("--device", default="cuda", help="what to compare with the CPU (default: cuda)")
    arguments = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(QWEN3_0_6B["vocab_size"]) for _ in range(length)] for length in arguments.prompts]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_0_6B))
        expected = generate(folder, "cpu", prompts, arguments.tokens)
        found = generate(folder, arguments.device, prompts, arguments.tokens)
    return report(expected, found)


def generate(folder: str, device: str, prompts: list[list[int]], tokens: int) -> list[weft.Generation]:
    """All prompts at once, in chunks of 256 tokens, so that prefill slices and decodes share steps."""
    options = {"dtype": "float32", "load_format": "dummy", "max_model_len": 2048, "kv_cache_memory_bytes": 2 * 10**9}
    params = weft.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    started = time.perf_counter()
    with weft.LLM(folder, device=device, max_num_seqs=16, max_num_batched_tokens=256, **options) as llm:
        loaded = time.perf_counter()
        results = llm.generate(prompts, params, progress=False)
    ended = time.perf_counter()
    print(f"{device}: loaded in {loaded - started:.1f} s, {len(prompts)} x {tokens} tokens in {ended - loaded:.1f} s")
    return results


def report(expected: list[weft.Generation], found: list[weft.Generation]) -> int:
    equal = excused = wrong = 0
    for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
        for position, (a, b) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            if a == b:
                equal += 1
                continue
            best, second = sorted(mine.logprobs[position].top.values(), reverse=True)
            excused += best - second < TIE
            wrong += best - second >= TIE
            print(f"prompt {number}, token {position}: {a} and {b}; the CPU's best two differ by {best - second:.2g}")
            break  # from here on the two continue different texts
    print(f"{equal} tokens equal, {excused} excused by a tie, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
