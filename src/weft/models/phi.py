"""Phi-3: Llama with longrope for long contexts. Its checkpoints hold qkv_proj and gate_up_proj already stacked."""

from typing import Any

from weft.models.llama import Llama


class Phi3(Llama):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        rope = dict(raw.get(key) or {})
        if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):  # names of longrope in early releases
            rope["rope_type"] = "longrope"
        return {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **raw, key: rope}
