"""ModelConfig: the properties of a model, read from config.json and generation_config.json.

Published configs and configs written by Transformers 5 say the same things with different keys: `rope_theta` and
`rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`. Both become an equal ModelConfig here. Keys that are
special to a family are rewritten by the family (`CausalLM.modernise`) before `parse_config` reads them.
"""

from dataclasses import dataclass
from typing import Any

from weft.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding as the config describes it; rope.py turns it into frequencies. Lengths are in tokens."""

    kind: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    max_positions: int  # max_position_embeddings
    original_positions: int  # context length before it was stretched (llama3, yarn, longrope)
    factor: float = 1.0
    attention_factor: float | None = None  # factor on cos and sin; None: derived from `factor`
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeConfig:
    """The experts of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # whether a token's expert weights are scaled to sum to one
    sparse_layers: frozenset[int]  # the other layers have one dense MLP


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the model, the engine and the KV cache need to know about a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # tokens; the default for max_model_len
    rms_norm_eps: float
    activation: str
    attention_scale: float
    attention_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    logit_softcap: float | None
    layer_windows: tuple[int | None, ...]  # tokens that a layer's query sees, itself included; None: all
    layer_ropes: tuple[RopeConfig, ...]
    moe: MoeConfig | None
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def longest_context(self) -> int:
        """The largest sensible max_model_len. Dynamic rope stretches beyond max_context, but only on request."""
        return int(self.max_context * min(rope.factor if rope.kind == "dynamic" else 1.0 for rope in self.layer_ropes))


MOST_PARTS = 10_000  # layers, or experts of a layer: many times more than the largest models have
MOST_SIZE = 1 << 31  # limit of all other counts


def check_layers(raw: dict[str, Any]) -> None:
    """Checks the number of layers, before anything is built per layer."""
    _count(raw, "num_hidden_layers", most=MOST_PARTS)


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json that its family has modernised, and of a generation_config.json ({}: none)."""
    layers, heads = _count(raw, "num_hidden_layers", most=MOST_PARTS), _count(raw, "num_attention_heads")
    hidden, vocab = _count(raw, "hidden_size"), _count(raw, "vocab_size")
    kv_heads, head_dim = _count(raw, "num_key_value_heads", heads), _count(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    layer_types = _layer_types(raw, layers)
    windowed = raw.get("sliding_window") is not None and raw.get("use_sliding_window", True)
    window = _count(raw, "sliding_window") if windowed else None
    ropes = _ropes(raw, head_dim)
    eos = _token_ids(raw.get("eos_token_id")) + _token_ids(generation.get("eos_token_id"))
    return ModelConfig(
        architecture=raw["architecture"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max(_context(rope) for rope in ropes.values()),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu"),
        attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        logit_softcap=raw.get("final_logit_softcapping"),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
        layer_ropes=tuple(ropes.get(kind) or ropes["full_attention"] for kind in layer_types),
        moe=_moe(raw, layers),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        # Ids that the model cannot produce are dropped.
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if 0 <= token < vocab)),
        bos_token_id=raw.get("bos_token_id"),
    )


# The known kinds of rope, and the keys that each requires.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_NUMBERS = (
    *("attention_factor", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)


def _count(raw: dict[str, Any], key: str, default: int | None = None, most: int = MOST_SIZE) -> int:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ModelError(f"config.json has no {key!r}")
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json says {key!r} is {value!r:.100}; it must be a positive integer")
    if value > most:
        raise ModelError(f"config.json says {key!r} is {str(value)[:20]}; it must be at most {most}")
    return value


def _token_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _layer_types(raw: dict[str, Any], layers: int) -> list[str]:
    """For each layer "sliding_attention" or "full_attention", which select its window and its rope."""
    types: list[str] | None = raw.get("layer_types")
    if types is None:
        full = min(raw.get("max_window_layers", 0), layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if len(types) != layers:
        raise ModelError(f"config.json has {len(types)} layer_types for {layers} layers")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"unknown layer type {min(unknown)!r}; known: full_attention, sliding_attention")
    return types


def _moe(raw: dict[str, Any], layers: int) -> MoeConfig | None:
    key = "num_local_experts" if raw.get("num_local_experts") else "num_experts"
    if not raw.get(key):
        return None
    experts = _count(raw, key, most=MOST_PARTS)
    step, dense = raw.get("decoder_sparse_step") or 1, set(raw.get("mlp_only_layers") or ())
    chosen = _count(raw, "num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"num_experts_per_tok {chosen} is more than the {experts} experts there are")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=_count(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob")),
        sparse_layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _ropes(raw: dict[str, Any], head_dim: int) -> dict[str, RopeConfig]:
    """Ropes by layer type. A rope for all layers is under "full_attention"."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    by_type = settings if "full_attention" in settings else {"full_attention": settings}
    return {kind: _rope(rope, raw, head_dim) for kind, rope in by_type.items()}


def _rope(own: dict[str, Any], raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """A rope from its settings. Older configs keep some of them at the top level."""
    settings = {**raw, **{key: value for key, value in own.items() if value is not None}}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise ModelError(f"unknown rope type {kind!r}; known: {', '.join(_ROPE_KEYS)}")
    if missing := [key for key in _ROPE_KEYS[kind] if settings.get(key) is None]:
        raise ModelError(f"rope type {kind!r} needs {missing[0]!r}")
    positions = original = _count(raw, "max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):  # here the top-level value wins, as in Transformers
        key = "original_max_position_embeddings"
        original = int(raw.get(key) or settings.get(key) or positions)
    rope = RopeConfig(
        kind=kind,
        theta=float(settings.get("rope_theta") or 10_000.0),
        rotary_dim=int(head_dim * (settings.get("partial_rotary_factor") or 1.0)),
        max_positions=positions,
        original_positions=original,
        factor=float(settings.get("factor") or positions / original),
        truncate=bool(settings.get("truncate", True)),
        short_factor=tuple(settings.get("short_factor") or ()),
        long_factor=tuple(settings.get("long_factor") or ()),
        **{key: float(settings[key]) for key in _ROPE_NUMBERS if settings.get(key)},
    )
    pairs, odd = divmod(rope.rotary_dim, 2)
    if odd or any(len(factors) not in (0, pairs) for factors in (rope.short_factor, rope.long_factor)):
        raise ModelError(f"rope type {kind!r}: {rope.rotary_dim} rotated dimensions are odd or do not fit its factors")
    return rope


def _context(rope: RopeConfig) -> int:
    """Context length of a rope. Configs with yarn often keep the max_position_embeddings from before yarn."""
    if rope.kind == "yarn":
        return max(rope.max_positions, int(rope.original_positions * rope.factor))
    return rope.max_positions
