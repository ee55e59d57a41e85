"""The GPU executor beside PyTorch, on the same GPU in the same minutes: matrix products, attention, and a block of
Llama 3 8B at 32,768 tokens, forward and backward.

    python3 benches/beside_torch.py target/release/foretrain [OUT.json [products] [attention] [block]]

Prints a table of ratios, foretrain's rate over PyTorch's (more than 1 is faster), and writes all figures as JSON. Each is
the median of launches between CUDA events, on random numbers; in products the two take turns, since a GPU that is warm is
slower. PyTorch's attention is the faster of cuDNN's and FlashAttention-2; its block is eager, and once more by
torch.compile. foretrain's block is read off the trace of a training step: from the first norm to the second residual, and
from the gradient of the down-projection to that of the first norm.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
SEQ = 32768
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 4096, 32, 8, 128, 14336
PRODUCTS = [(8192, 8192, 8192), (16384, 6144, 4096), (16384, 28672, 4096), (16384, 4096, 14336), (256, 4096, 4096)]
ATTENTION = [(16384, 128, True), (16384, 128, False), (4096, 128, True), (32768, 128, True), (16384, 64, True)]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
GPU = dict(device="cuda", dtype=torch.bfloat16)


def seconds(work, times=15, warm_up=4):
    """Median seconds of a launch."""
    for _ in range(warm_up):
        work()
    around = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in around:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in around) * 1e-3


def products():
    found = {}
    for m, n, k in PRODUCTS:
        a, b, c = torch.rand(m, k, **GPU) * 2 - 1, torch.rand(n, k, **GPU) * 2 - 1, torch.empty(m, n, **GPU)
        found[f"product {m} x {n} x {k}"] = seconds(lambda: torch.mm(a, b.t(), out=c))
    return found


def attention():
    found = {}
    for seq, dim, causal in ATTENTION:
        heads = 4096 // dim
        name = f"{'causal' if causal else 'full'} {seq} d{dim}"
        make = lambda n: torch.randn(1, seq, n, dim, **GPU).transpose(1, 2).requires_grad_(True)
        for by, backend in BACKENDS.items():
            q, k, v = make(heads), make(heads // 4), make(heads // 4)
            with sdpa_kernel(backend):
                forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                out = forward()
                grad = torch.randn_like(out)
                backward = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
                for what, work in (("forward", forward), ("backward", backward)):
                    took = (seconds(work), by)
                    found[f"attention {what} {name}"] = min(found.get(f"attention {what} {name}", took), took)
            torch.cuda.empty_cache()
    return found


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False, **GPU)
        self.norm1, self.norm2 = (torch.nn.Parameter(torch.ones(HIDDEN, **GPU)) for _ in range(2))
        self.qkv = linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = linear(HEADS * HEAD_DIM, HIDDEN)
        self.gate_up, self.down = linear(HIDDEN, 2 * FFN), linear(FFN, HIDDEN)

    def forward(self, x, cos, sin):
        normed = F.rms_norm(x, (HIDDEN,), self.norm1, 1e-5)
        q, k, v = self.qkv(normed).split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], -1)
        q, k, v = (t.view(1, SEQ, -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        turn = lambda t: torch.cat((-t[..., HEAD_DIM // 2 :], t[..., : HEAD_DIM // 2]), -1)
        q, k = (t * cos + turn(t) * sin for t in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(1, SEQ, HEADS * HEAD_DIM))
        gate, up = self.gate_up(F.rms_norm(x, (HIDDEN,), self.norm2, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def block(compiled):
    """Seconds of forward and backward together; gradients are made anew in every step."""
    module = Block()
    x, grad = torch.randn(1, SEQ, HIDDEN, requires_grad=True, **GPU), torch.randn(1, SEQ, HIDDEN, **GPU)
    angles = torch.arange(SEQ, device="cuda").float()[:, None] * 5e5 ** (
        -torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM
    )
    cos, sin = (f(torch.cat((angles, angles), -1)).bfloat16()[None, None] for f in (torch.cos, torch.sin))
    call = torch.compile(module) if compiled else module

    def step():
        module.zero_grad(set_to_none=True)
        x.grad = None
        call(x, cos, sin).backward(grad)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return seconds(step, times=8, warm_up=3)


def foretrain(program, *words):
    done = subprocess.run([program, *words, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return json.loads(done.stdout)


def speeds(program, attention, of):
    words = ["--group", "norms", "--speed", "--speed-of", of, "--repeat", "15", "--attention", attention]
    found = foretrain(program, "selftest", "--on", "cuda", *words)
    return found["attention"], {one["name"]: one["seconds"] for one in found["speeds"]}


def in_turn(program, rounds=3, rest_s=1):
    """Products by PyTorch and by foretrain: the medians of as many rounds."""
    both = ([], [])
    for _ in range(rounds):
        for found, look in zip(both, (products, lambda: speeds(program, "own", "product")[1])):
            time.sleep(rest_s)
            found.append(look())
    return [{name: statistics.median(one[name] for one in found) for name in found[0]} for found in both]


def own_block(program):
    """Seconds of the block in a training step, the last of five."""
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        model = str(HERE / "llama-3-8b-block.json")
        words = ["--on", "cuda", "--model", model, "--seq-len", str(SEQ), "--steps", "5", "--trace", str(trace)]
        foretrain(program, "run", *words)
        events = json.loads(trace.read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    spans = {e["args"]["path"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    between = lambda a, b: (spans[b][1] - spans[a][0]) * 1e-6
    forward = between("last[0]/fwd[0]/norm1", "last[0]/fwd[0]/residual2")
    return forward + between("last[0]/bwd[0]/bwd[0]/down_dx", "last[0]/bwd[0]/bwd[0]/norm1_bwd")


def main():
    program, out = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    wanted = sys.argv[3:] or ["products", "attention", "block"]
    rows = []

    def row(what, by, theirs, own_by, own):
        rows.append(dict(what=what, torch_by=by, torch_s=theirs, by=own_by, seconds=own, ratio=theirs / own))
        print(f"{what:40} {by:18} {theirs * 1e3:9.3f} ms   {own_by:16} {own * 1e3:9.3f} ms   {theirs / own:5.2f}", flush=True)

    if "products" in wanted:
        their_products, our_products = in_turn(program)
        for what, took in their_products.items():
            row(what, "cuBLAS", took, "cuBLASLt", our_products[what])
    if "attention" in wanted:
        their_attention = attention()
        time.sleep(2)
        library, fused = speeds(program, "best", "attention")
        time.sleep(2)
        _, own = speeds(program, "own", "attention")
        for what, (took, by) in their_attention.items():
            row(what, by, took, library, fused[what])
            row(what, by, took, "own kernels", own[what])
    if "block" in wanted:
        eager = block(False)
        took = own_block(program)
        time.sleep(2)
        compiled = block(True)
        row(f"block of Llama 3 8B, {SEQ} tokens", "eager", eager, "foretrain", took)
        row(f"block of Llama 3 8B, {SEQ} tokens", "torch.compile", compiled, "foretrain", took)
    if out:
        about = dict(gpu=torch.cuda.get_device_name(0), torch=torch.__version__, cudnn=torch.backends.cudnn.version())
        Path(out).write_text(json.dumps(dict(about, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
