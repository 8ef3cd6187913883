"Random attention problems: sizes 0 to 70, every knob, tensors that lie in memory in odd ways."
import math
import random

import torch

from tensorplay_attn.problem import make_problem

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def lay(rng, x):
    "The same values in another layout: transposed, every second column of a wider tensor, an expanded axis, heads innermost, an odd offset."
    kind = rng.randrange(8)
    if kind == 0: return x.mT.contiguous().mT
    if kind == 1: return torch.stack([torch.full_like(x, math.nan), x], -1).flatten(-2)[..., 1::2]
    if kind == 2 and x.shape[0] > 0: return x[:1].expand(x.shape)
    if kind == 3: return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 4: return torch.cat([x.new_full((3,), math.nan), x.flatten()])[3:].view(x.shape)
    return x


def random_mask(rng, size, dtype):
    kind = rng.random()
    if kind > 0.5: return None
    shape = [rng.choice([1, n]) for n in size][rng.randint(0, 4):]
    if kind < 0.25: return torch.rand(shape) < rng.choice([0.1, 0.7])
    bias = torch.randn(shape).to(rng.choice([torch.float32, dtype]))
    return bias.masked_fill(torch.rand(shape) < 0.3, rng.choice([-math.inf, torch.finfo(bias.dtype).min])) if rng.random() < 0.3 else bias


def random_problem(seed):
    "A problem, and a gradient for out and for lse (or None)."
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = lambda: rng.choice([0, 1, 2, rng.randint(0, 70), rng.randint(1, 70), rng.randint(1, 70), 16, 64])
    Hkv, G, B = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3]), rng.choice([1, 2]) if rng.random() < 0.8 else rng.choice([0, 3])
    H, L, S, E, Ev, dtype = Hkv * G, size(), size(), size(), size(), rng.choice(DTYPES)
    if rng.random() < 0.5: Ev = E
    tensor = lambda *shape: lay(rng, torch.randn(shape).to(dtype))
    maybe = lambda share, value, otherwise: value if rng.random() < share else otherwise
    edge = lambda: rng.choice([-1, 0, 3, rng.randint(0, 80)])
    problem = make_problem(tensor(B, H, L, E), tensor(maybe(0.8, B, 1), Hkv, S, E), tensor(maybe(0.8, B, 1), Hkv, S, Ev),
        random_mask(rng, (B, H, L, S), dtype), is_causal=rng.random() < 0.4, window_size=maybe(0.4, (edge(), edge()), (-1, -1)),
        alignment=rng.choice(["upper_left", "lower_right"]), scale=maybe(0.3, rng.choice([0.0, -0.3, 1.0, 0.05]), None),
        softcap=maybe(0.25, rng.choice([0.5, 2.0, 30.0]), 0.0), sinks=maybe(0.3, torch.randn(H), None),
        kv_lengths=maybe(0.25, torch.randint(0, S + 1, (B,)), None), dropout_p=maybe(0.25, rng.choice([0.1, 0.5, 1.0]), 0.0),
        seed=torch.tensor([rng.randint(0, 2**40), rng.randint(0, 99)]))
    d_lse = torch.randn(B, H, L, dtype=problem.state_dtype) if rng.random() < 0.5 else None
    return problem, torch.randn(B, H, L, Ev).to(dtype), d_lse
