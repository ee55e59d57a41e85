"""What Hugging Face's transformers computes of scaled rotary frequencies, for tests/rope.rs to be held to.

    python3 tests/rope/transformers_figures.py

Writes beside itself frequencies.json, the inverse frequencies and factors of published configs and of some small ones, and steps.json,
the loss and gradients of small models with weights by a formula (`weight` here and there), in fp64 but for the tables of rotary
embedding, which transformers makes in fp32. Of each gradient its norm and its products with two vectors by the same formula are kept.
Needs PyTorch, transformers 5 and numpy; no test of the suite runs it.
"""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

HERE = Path(__file__).parent
SEQ, BATCH = 32, 2

LLAMA = dict(model_type="llama", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             intermediate_size=12, vocab_size=29, rms_norm_eps=1e-5, rope_theta=100.0, hidden_act="silu",
             tie_word_embeddings=False, max_position_embeddings=64)
DEEPSEEK = dict(model_type="deepseek_v3", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                q_lora_rank=8, kv_lora_rank=6, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=5, intermediate_size=12,
                moe_intermediate_size=10, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
                n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, vocab_size=29, rms_norm_eps=1e-6,
                rope_theta=100.0, hidden_act="silu", tie_word_embeddings=False, max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LONG = dict(type="longrope", short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[1.0, 2.0, 3.5, 5.0],
            original_max_position_embeddings=16)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.25)


def heads(dim, theta, most, scaling, **more):
    """A model with heads so wide, whatever its other sizes."""
    return {**LLAMA, **dict(head_dim=dim, rope_theta=theta, max_position_embeddings=most, rope_scaling=scaling), **more}


FREQUENCIES = {
    "Llama-3.1-8B": (heads(128, 5e5, 131072, dict(LLAMA3, factor=8.0, original_max_position_embeddings=8192)), 8192),
    "Llama-3.2-1B": (heads(64, 5e5, 131072, dict(LLAMA3, factor=32.0, original_max_position_embeddings=8192)), 8192),
    "Qwen2.5 with YaRN": (heads(128, 1e6, 131072, dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)), 131072),
    "DeepSeek-V3": ({**DEEPSEEK, **dict(qk_rope_head_dim=64, rope_theta=1e4, max_position_embeddings=163840, rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))}, 4096),
    "DeepSeek-V2-Lite's factors": ({**DEEPSEEK, **dict(qk_rope_head_dim=64, rope_theta=1e4, max_position_embeddings=163840, rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707))}, 4096),
    "Kimi-K2": ({**DEEPSEEK, **dict(qk_rope_head_dim=64, rope_theta=5e4, max_position_embeddings=131072, rope_scaling=dict(
        type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0))}, 4096),
    "gpt-oss": (heads(64, 1.5e5, 131072, dict(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False)), 4096),
    "YaRN by defaults": (heads(64, 1e4, 4096, dict(rope_type="yarn", factor=2.0, attention_factor=0.75)), 4096),
    "linear": (heads(64, 1e4, 16384, dict(type="linear", factor=4.0)), 16384),
    "dynamic, longer": (heads(64, 1e4, 4096, dict(type="dynamic", factor=2.0)), 10000),
    "dynamic, as long": (heads(64, 1e4, 4096, dict(type="dynamic", factor=2.0)), 4096),
    "longrope, short": (heads(8, 1e4, 64, LONG), 16),
    "longrope, long": (heads(8, 1e4, 64, LONG), 17),
    "longrope by its config": (heads(8, 1e4, 64, {k: v for k, v in LONG.items() if k[0] != "o"}, original_max_position_embeddings=32), 64),
}

STEPS = {
    "llama3": {**LLAMA, "rope_scaling": dict(LLAMA3, factor=8.0, original_max_position_embeddings=32)},
    "linear": {**LLAMA, "rope_scaling": dict(type="linear", factor=3.0)},
    "dynamic": {**LLAMA, "max_position_embeddings": 12, "rope_scaling": dict(type="dynamic", factor=2.0)},
    "longrope": {**LLAMA, "rope_scaling": LONG},
    "yarn": {**LLAMA, "model_type": "qwen3", "rope_scaling": YARN},
    "yarn as transformers 5 writes it": {
        **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
        "model_type": "mistral",
        "rope_parameters": dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16, beta_fast=2.0,
                                beta_slow=0.25, truncate=False)},
    "deepseek": {**DEEPSEEK, "rope_scaling": dict(YARN, mscale=1.0, mscale_all_dim=0.707)},
}


def config_of(stated):
    stated = json.loads(json.dumps(stated))
    return transformers.AutoConfig.for_model(**stated)


def frequencies():
    all = []
    for name, (stated, longest) in FREQUENCIES.items():
        config = config_of(stated)
        kind = config.rope_parameters["rope_type"]
        by_length = kind in ("dynamic", "longrope")
        speeds, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=longest if by_length else None)
        latent = stated["model_type"] == "deepseek_v3"
        all.append(dict(name=name, config=stated, longest=longest, inverse_frequencies=[float(f"{x:.8g}") for x in speeds],
                        attention_factor=attention, score_factor=yarn_apply_mscale(config.rope_parameters, 1.0) if latent else 1.0))
    return all


def weight(name, n):
    """n numbers from -0.5 up to 0.5."""
    x = (np.arange(n, dtype=np.uint64) * 0x85EBCA6B + zlib.crc32(name.encode())) & 0xFFFFFFFF
    for shift, times in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x = (x * times) & 0xFFFFFFFF
    x ^= x >> 16
    return x.astype(np.float64) / 2**32 - 0.5


def as_saved(name, tensor):
    """A tensor of the model as its checkpoint has it: experts are one each there."""
    experts = re.match(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$", name)
    if not experts:
        return {name: tensor}
    prefix, which = experts.groups()
    parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[which]
    return {f"{prefix}.mlp.experts.{e}.{part}.weight": rows
            for e, matrix in enumerate(tensor) for part, rows in zip(parts, matrix.chunk(len(parts), 0))}


def step(stated):
    config = config_of(stated)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    shapes = {}
    with torch.no_grad():
        for whole, tensor in model.state_dict().items():
            for name, part in as_saved(whole, tensor).items():
                shapes[name] = list(part.shape)
                values = weight(name, part.numel())
                values = 1.0 + 0.2 * values if "norm" in name else 0.1 * values if "bias" in name else values
                part.copy_(torch.from_numpy(values.astype(np.float32)).reshape(part.shape))
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
        tensor.data = tensor.data.double()
    ids = torch.tensor([(i * i * 5 + i) % 29 for i in range(BATCH * (SEQ + 1))]).reshape(BATCH, SEQ + 1)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    assert logits.dtype == torch.float64
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {}
    for whole, tensor in model.named_parameters():
        for name, part in as_saved(whole, tensor.grad).items():
            flat = part.flatten().numpy()
            along = [float(f"{flat @ weight(f'{way} {name}', flat.size):.10g}") for way in "ab"]
            gradients[name] = dict(norm=float(f"{np.linalg.norm(flat):.10g}"), along=along)
    return dict(config=stated, shapes=shapes, loss=loss.item(), gradients=gradients)


def write(file, name, entries, **more):
    """An entry a line."""
    head = json.dumps(dict(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], **more))
    lines = ",\n".join(map(json.dumps, entries))
    (HERE / file).write_text(f'{head[:-1]}, "{name}": [\n{lines}\n]}}\n')


write("frequencies.json", "configs", frequencies())
write("steps.json", "steps", [dict(name=name, **step(stated)) for name, stated in STEPS.items()], seq_len=SEQ, batch=BATCH)
