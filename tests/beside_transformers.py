"""A training step of `foretrain run` beside the same step by Hugging Face's transformers: the same weights, tokens and loss.

    python3 tests/beside_transformers.py target/release/foretrain [cpu|cuda] [OUT.json] [--model NAME]..

For each kind of checkpoint that `run --weights` reads: a small model with random weights that bf16 has exactly is saved by
transformers, its reference is transformers' own step in fp32, and `foretrain run --weights --tokens --dump` takes the step in
bf16 on a GPU, or in fp32 on CPU threads, by each of some layouts. Prints, and writes as JSON, how far loss and gradients are
off (||ours - theirs|| / ||theirs|| of all gradients together, and the worst tensor), and on a GPU how far transformers' own
step in bf16 is: rounding alone says no other number is right. Exit code 1 where a gradient is further off than `MOST` or, on a
GPU, than `TIMES` times what bf16 does to transformers. Needs PyTorch, transformers 5 and safetensors; no test of the suite runs
it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SEQ, BATCH, VOCAB = 512, 4, 1024
COMMON = dict(hidden_size=512, num_hidden_layers=3, num_attention_heads=8, vocab_size=VOCAB, max_position_embeddings=2048)
DENSE = dict(COMMON, num_key_value_heads=4, intermediate_size=1024)
EXPERTS = dict(COMMON, num_key_value_heads=4, num_experts_per_tok=2)
MODELS = {
    "llama": transformers.LlamaConfig(**DENSE),
    "qwen2": transformers.Qwen2Config(**DENSE),
    "qwen3": transformers.Qwen3Config(**DENSE, head_dim=64),
    "gpt2": transformers.GPT2Config(n_embd=512, n_layer=3, n_head=8, n_positions=2048, vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "mixtral": transformers.MixtralConfig(**EXPERTS, intermediate_size=512, num_local_experts=8),
    "qwen3_moe": transformers.Qwen3MoeConfig(**EXPERTS, head_dim=64, intermediate_size=1024, moe_intermediate_size=512, num_experts=8, norm_topk_prob=True),
    "deepseek_v3": transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        intermediate_size=1024, moe_intermediate_size=512, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5),
}
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=0.707)
LATENT = MODELS["deepseek_v3"].to_dict()
SCALED = {
    "llama_llama3": transformers.LlamaConfig(**DENSE, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256)),
    "llama_linear": transformers.LlamaConfig(**DENSE, rope_scaling=dict(type="linear", factor=4.0)),
    "llama_dynamic": transformers.LlamaConfig(**{**DENSE, "max_position_embeddings": 200}, rope_scaling=dict(type="dynamic", factor=2.0)),
    "qwen3_yarn": transformers.Qwen3Config(**DENSE, head_dim=64, rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=128)),
    "deepseek_v3_yarn": transformers.DeepseekV3Config(
        **{name: LATENT[name] for name in LATENT if name not in ("rope_parameters", "head_dim", "qk_head_dim")}, rope_scaling=YARN),
}
MODELS |= SCALED
LAYOUTS = ["", "--ulysses 2 --ring 2", "--tp 2 --dp 2 --zero 3", "--pp 3 --recompute full"]
LAYOUTS_OF_EXPERTS = ["", "--dp 2 --ep 2", "--tp 2 --ring 2 --ep 4", "--ulysses 2 --dp 2 --ep 2 --recompute full"]
MOST = {"cpu": 1e-4, "cuda": 0.1}
TIMES = 2.0


def as_saved(kind, name, tensor):
    """A tensor of the model as its checkpoint has it: experts are one each there."""
    mixtral = kind == "mixtral"
    experts = re.match(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$", name)
    if not experts:
        return {name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight") if mixtral else name: tensor}
    prefix, which = experts.groups()
    parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[which]
    layer = "mlp.experts"
    if mixtral:
        parts, layer = [{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[p] for p in parts], "block_sparse_moe.experts"
    found = {}
    for e, matrix in enumerate(tensor):
        for part, rows in zip(parts, matrix.chunk(len(parts), 0)):
            found[f"{prefix}.{layer}.{e}.{part}.weight"] = rows
    return found


def step(kind, model, ids, dtype, device):
    """Loss and gradients of transformers' step, in names of the checkpoint."""
    model = model.to(device=device)
    for weight in model.parameters():  # not the frequencies of rotary embedding, which stay fp32 as in training
        weight.data = weight.data.to(dtype)
    model.zero_grad()
    ids = ids.to(device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            grads.update(as_saved(kind, name, weight.grad.float().cpu()))
    return loss.item(), grads


def off(ours, theirs):
    """Of all together, of the worst, and which that is."""
    missing = sorted(set(theirs) - set(ours))
    assert not missing, f"no gradient of {missing[:3]}"
    square = lambda t: float(t.double().square().sum())
    apart = {n: (square(ours[n].float().cpu() - t), square(t)) for n, t in theirs.items()}
    whole = sum(b for _, b in apart.values())
    # The gradient of a key's bias is nothing but rounding, since softmax does not see it.
    worst = max((n for n in apart if apart[n][1] > 1e-8 * whole), key=lambda n: apart[n][0] / apart[n][1])
    return (sum(a for a, _ in apart.values()) / whole) ** 0.5, (apart[worst][0] / apart[worst][1]) ** 0.5, worst


def main():
    words = argparse.ArgumentParser()
    words.add_argument("program")
    words.add_argument("on", nargs="?", default="cuda", choices=["cpu", "cuda"])
    words.add_argument("out", nargs="?")
    words.add_argument("--model", action="append", choices=list(MODELS))
    words = words.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, wrong = [], 0

    def save():
        """What is there so far: a run that is cut off loses nothing."""
        if words.out:
            found = dict(on=words.on, torch=torch.__version__, transformers=transformers.__version__, rows=rows)
            Path(words.out).write_text(json.dumps(found, indent=1))

    for name in words.model or MODELS:
        torch.manual_seed(1)
        config = MODELS[name]
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.eval()  # no dropout, and routers as they are in training
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16().float())
        ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1))
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            model.save_pretrained(folder)
            (folder / "ids.json").write_text(json.dumps(ids.tolist()))
            loss, grads = step(name, model, ids, torch.float32, words.on)
            if words.on == "cuda":
                theirs = step(name, model, ids, torch.bfloat16, words.on)
                theirs = (theirs[0], *off(theirs[1], grads))
            for layout in LAYOUTS_OF_EXPERTS if "experts" in " ".join(grads) else LAYOUTS:
                command = [words.program, "run", "--on", words.on, "--weights", folder, "--tokens", folder / "ids.json", "--seq-len", SEQ,
                           "--global-batch", BATCH, "--dump", folder / "out.safetensors", "--json", *layout.split()]
                command += ["--no-mtp"] if name.startswith("deepseek") else []  # transformers has no modules of it
                command += ["--devices", "0"] if words.on == "cuda" else []
                said = json.loads(subprocess.run(list(map(str, command)), capture_output=True, text=True).stdout)
                row = dict(model=name, layout=layout, loss_transformers_fp32=loss)
                rows.append(row)
                if "error" in said:
                    row["error"] = said["error"]
                    wrong += 1
                    print(f"{name:16} {layout:44} {said['error']}")
                    save()
                    continue
                dump = load_file(folder / "out.safetensors")
                ours = {n.removeprefix("grad."): t for n, t in dump.items() if n.startswith("grad.")}
                row["loss"] = float(dump["loss"])
                row["grads_off"], row["worst_off"], row["worst"] = off(ours, grads)
                fine = row["grads_off"] < MOST[words.on]
                note = ""
                if words.on == "cuda":
                    row["loss_transformers_bf16"], row["transformers_bf16_off"], row["transformers_bf16_worst_off"] = theirs[:3]
                    fine = fine and row["grads_off"] < TIMES * theirs[1]
                    note = f"; transformers in bf16 {theirs[0]:.5f}, {theirs[1]:.2e}, worst {theirs[2]:.2e}"
                wrong += not fine
                print(f"{name:16} {layout:44} {'fine ' if fine else 'WRONG'} loss {row['loss']:.5f} of {loss:.5f}, gradients off by "
                      f"{row['grads_off']:.2e}, worst {row['worst_off']:.2e} ({row['worst']}){note}", flush=True)
                save()
    sys.exit(wrong > 0)


main()
