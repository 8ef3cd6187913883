"""Models of transformers on ours: every attention call judged, whole models beside eager ones, generation, training, the mask's marks."""
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import (AttentionInterface, AttentionMaskInterface, BertConfig, BertForMaskedLM, BloomConfig, BloomModel,
    Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
    Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification, WhisperConfig,
    WhisperForConditionalGeneration)

import tensorplay_attn.interop.transformers as door
from tensorplay_attn.bounds import allowed_backward, allowed_forward, judge_backward, judge_forward
from tensorplay_attn.gradients import Gradients
from tensorplay_attn.problem import everything, visible

SMALL = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False)
ENCODER = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
DECODERS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=5)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
}
OTHERS = {
    "bert": (BertForMaskedLM, BertConfig(**ENCODER)),
    "vit": (ViTForImageClassification, ViTConfig(image_size=12, patch_size=4, num_channels=1, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4)),
    "whisper": (WhisperForConditionalGeneration, WhisperConfig(vocab_size=48, num_mel_bins=8, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, d_model=32, max_source_positions=10,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)),
    "t5": (T5ForConditionalGeneration, T5Config(vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=1, pad_token_id=0, eos_token_id=2)),
}
MODELS = DECODERS | OTHERS


@pytest.fixture(autouse=True)
def registered():
    door.register_with_transformers()
    torch.manual_seed(0)


def build(name, implementation, **changes):
    """The same small model each time; weights that fp32 holds exactly, large enough for weights of attention to differ."""
    kind, config = MODELS[name]
    config = type(config)(**{**config.to_dict(), **changes})
    torch.manual_seed(3)
    experts = {"experts_implementation": "eager"} if name == "gpt_oss" else {}  # the other ones have no fp64
    model = kind._from_config(config, attn_implementation=implementation, **experts).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.normal_(1.0 if "norm" in n.lower() and n.endswith("weight") else 0.0, 0.25)
    return model


REAL = torch.arange(12) >= torch.tensor([[0], [4]])  # a batch of two; the second begins with padding
WAYS = ("padded", "whole", "packed", "floating", "chunks")  # for decoders; the others have one


def inputs(name, way="padded"):
    """Keyword arguments."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 48, (2, 12), generator=draw)
    if name == "vit": return dict(pixel_values=torch.randn(2, 1, 12, 12, generator=draw))
    if name == "whisper": return dict(input_features=torch.randn(2, 8, 20, generator=draw), decoder_input_ids=ids)
    if name == "t5": return dict(input_ids=ids, attention_mask=REAL.flip(1), decoder_input_ids=ids[:, :7])
    if name == "bert": return dict(input_ids=ids, attention_mask=REAL.flip(1))
    return dict(input_ids=ids) | {"padded": dict(attention_mask=REAL), "packed": dict(position_ids=torch.arange(12).remainder(7).expand(2, 12)),
        "floating": dict(attention_mask=torch.randn(2, 1, 12, 12, generator=draw).mul(2))}.get(way, {})


def run(model, name, way="padded"):
    """Logits of real tokens, and the gradient of a loss on them for every parameter."""
    dtype = next(model.parameters()).dtype
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs(name, way).items()}
    if way == "chunks":
        cache = transformers.DynamicCache(config=model.config)
        parts = given["input_ids"].split((7, 4, 1), 1)
        logits = torch.cat([model(input_ids=part, cache=cache).logits for part in parts], 1)
    else: logits = model(**given).logits
    if name == "bert": logits = logits[REAL.flip(1)]
    elif name in DECODERS and way == "padded": logits = logits[REAL]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    model.zero_grad()
    (logits * weights).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def allowances(module, q, k, v, mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **rest):
    """The call's problem in fp32; a mask of 0 and finfo.min only, as eager's are, says who sees whom."""
    if mask is not None: mask = mask == 0 if (mask == 0).logical_or(mask == torch.finfo(mask.dtype).min).all() else mask.float()
    q, k, v, position_bias, s_aux = (None if x is None else x.detach().float() for x in (q, k, v, position_bias, s_aux))
    return door.attention_problem(module, q, k, v, mask, scaling=scaling, is_causal=False, position_bias=position_bias, softcap=softcap, s_aux=s_aux)


def dense(eager, signs=None):
    """A model's own dense function in fp64 on inputs that fp32 holds; with signs, off by all that page 15 allows an engine in fp32."""
    single = lambda x: x.float().double()  # and so is its gradient

    def push(x, allowed): return x + allowed * torch.randint(0, 2, x.shape, generator=signs).mul(2).sub(1)

    def call(module, q, k, v, mask, **rest):
        q, k, v = map(single, (q, k, v))
        if signs is None: return eager(module, q, k, v, mask, **rest)
        problem, back = allowances(module, q, k, v, mask, **rest), []
        bias = rest.get("position_bias")
        if bias is not None: rest["position_bias"] = bias = bias.view_as(bias)
        out = push(eager(module, q, k, v, mask, **rest)[0], allowed_forward(problem).out.transpose(1, 2))
        if out.requires_grad:
            out.register_hook(lambda g: back.append(allowed_backward(problem, g.transpose(1, 2))))
            for at, x in enumerate((q, k, v, bias, rest.get("s_aux"))):
                if x is not None and x.requires_grad: x.register_hook(lambda g, at=at: push(g, back[0][at]))
        return out, None
    return call


def truth(name, monkeypatch, run, signs=None):
    """What a run with eager attention gives in fp64, to the end: its softmax would go down to fp32."""
    model, softmax = build(name, "eager").double(), F.softmax
    with monkeypatch.context() as m:
        module = sys.modules[type(model).__module__]
        m.setattr(module, "eager_attention_forward", dense(module.eager_attention_forward, signs))
        m.setattr(F, "softmax", lambda x, dim=None, dtype=None, **rest: softmax(x, dim))
        return run(model)


def single(module, q, k, v, mask, s_aux=None, position_bias=None, **rest):
    """Ours in fp32, inside a model in fp64."""
    q, k, v, s_aux, position_bias = (None if x is None else x.float() for x in (q, k, v, s_aux, position_bias))
    return door.transformers_attention(module, q, k, v, mask, s_aux=s_aux, position_bias=position_bias, **rest)[0].double(), None


def judged(calls):
    """`attend`, with all that goes in and comes out kept in calls."""
    attend, names = door.attend, ("q", "k", "v", "bias", "sinks")

    def call(problem):
        own = {n: x.view_as(x) for n in names if (x := getattr(problem, n)) is not None}
        out, lse, top = attend(replace(problem, **own))
        grads = {}
        for n, x in (*own.items(), ("out", out)):
            if x.requires_grad: x.register_hook(lambda g, n=n: grads.__setitem__(n, g))
        calls.append((replace(problem, **{n: x.detach() for n, x in own.items()}), out.detach(), lse.detach(), grads))
        return out, lse, top
    return call


def ours(name):
    """The model in fp64 with our attention in fp32."""
    AttentionInterface.register("ours_single", single)
    AttentionMaskInterface.register("ours_single", AttentionMaskInterface()[door.NAME])
    return build(name, "ours_single").double()


def shaken(name, monkeypatch, run):
    """Three models whose attention is off by all that is allowed."""
    return [truth(name, monkeypatch, run, torch.Generator().manual_seed(n)) for n in range(3)]


WINDOWS = {"llama": {(-1, 0)}, "qwen3": {(-1, 0)}, "mistral": {(4, 0)}, "gemma2": {(-1, 0), (4, 0)}, "gpt_oss": {(-1, 0), (4, 0)}}
CALLS = [*((name, way) for name in DECODERS for way in WAYS), *((name, "padded") for name in OTHERS)]


@pytest.mark.parametrize("name, way", CALLS)
def test_logits_and_gradients(name, way, monkeypatch):
    """Each call within page 15's bounds; the whole nearer to the truth than a model whose attention is off by all of these."""
    calls, one = [], lambda model: run(model, name, way)
    with monkeypatch.context() as m:
        m.setattr(door, "attend", judged(calls))
        got = one(ours(name))
    want = truth(name, monkeypatch, one)
    assert len(calls) == {"whisper": 5, "t5": 6}.get(name, 6 if way == "chunks" else 2)
    for problem, out, lse, grads in calls:
        back = Gradients(*(grads.get(n) for n in ("q", "k", "v", "bias", "sinks")), None)
        verdicts = judge_forward(problem, out, lse) | judge_backward(problem, back, grads["out"])
        assert {"out", "lse", "dq", "dk", "dv"} <= verdicts.keys() and all(verdicts.values()), verdicts
        assert ("dsinks" in verdicts) == (name == "gpt_oss")
    if way == "whole":
        assert {p.window for p, *_ in calls} == WINDOWS[name] and not any(p.mask is not None for p, *_ in calls)
    worst = shaken(name, monkeypatch, one)
    assert got.keys() == want.keys() and len(want) > 10
    for n, x in want.items():
        off = sum((other[n] - x).square().sum() for other in worst) / len(worst)
        assert (got[n] - x).norm() <= off.sqrt(), n


def generate(name, implementation, **more):
    """Token by token, the likeliest each time."""
    return build(name, implementation).generate(**inputs(name), max_new_tokens=64, min_new_tokens=64, do_sample=False, **more)


@pytest.mark.parametrize("cache", ("dynamic", "static"))
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, cache):
    """64 tokens after a batch padded on the left: the same ones."""
    got = generate(name, door.NAME, cache_implementation=cache)
    assert got.shape == (2, 76) and got.equal(generate(name, "eager", cache_implementation=cache))


def train(model):
    """The losses of a hundred steps, on its way to know one batch by heart."""
    ids, steps = inputs("llama")["input_ids"], torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(100):
        steps.zero_grad()
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_training(monkeypatch):
    """A hundred steps of a tiny Llama stay as near to eager's as attention that is off by all that is allowed."""
    got, want = train(ours("llama")), truth("llama", monkeypatch, train)
    off = sum((other - want).square() for other in shaken("llama", monkeypatch, train)).div(3).sqrt()
    assert want[-1] < want[0] / 4 and (got - want).abs().le(off.cummax(0).values).all()


def layer(**more): return torch.nn.Module() if not more else type("Layer", (torch.nn.Module,), more)()


def tensors(L=5, S=5, H=4, Hkv=2):
    return torch.randn(2, H, L, 8), torch.randn(2, Hkv, S, 8), torch.randn(2, Hkv, S, 8)


def test_dropout():
    """In training it drops, by the generator; in eval it does not. Each call's answer is judged with the weights it dropped."""
    calls, changes = [], dict(attention_dropout=0.3)
    model, given = build("llama", door.NAME, **changes), inputs("llama")
    assert model(**given).logits.equal(build("llama", door.NAME)(**given).logits)
    model.train()
    first, second, again = (torch.manual_seed(seed) and model(**given).logits for seed in (1, 2, 1))
    assert first.equal(again) and not first.equal(second)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(door, "attend", judged(calls))
        run(model, "llama")
    assert len(calls) == 2
    for problem, out, lse, grads in calls:
        assert problem.dropout_p == 0.3
        back = Gradients(*(grads.get(n) for n in ("q", "k", "v", "bias", "sinks")), None)
        assert all((judge_forward(problem, out, lse) | judge_backward(problem, back, grads["out"])).values())
    assert not calls[0][0].seed.equal(calls[1][0].seed)


def test_is_causal():
    """The call's word, then the module's, then True; never with a mask, never for one query."""
    q, k, v = tensors()
    window = lambda module, q=q, mask=None, **more: door.attention_problem(module, q, k, v, mask, **more).window
    assert window(layer()) == window(layer(is_causal=True)) == window(layer(is_causal=False), is_causal=True) == (-1, 0)
    for got in (window(layer(is_causal=False)), window(layer(), is_causal=False), window(layer(), q[:, :, :1]),
        window(layer(), mask=torch.ones(2, 1, 5, 5, dtype=torch.bool))): assert got == (-1, -1)


def test_prefill_of_a_longer_cache():
    """The empty end of a static cache is not read; every query has its own key first."""
    q, k, v = tensors(5, 9)
    problem = door.attention_problem(layer(), q, k[:, :, :5].clone(), v[:, :, :5].clone(), None)
    k[:, :, 5:] = v[:, :, 5:] = torch.nan
    assert judge_forward(problem, door.transformers_attention(layer(), q, k, v, None)[0].transpose(1, 2))["out"]


def test_batch_of_one_query():
    """Learned queries are shared by the batch, as PyTorch's call broadcasts them."""
    q, k, v = tensors()
    want = torch.cat([door.transformers_attention(layer(), q[:1], x, y, None)[0] for x, y in zip(k.split(1), v.split(1))])
    assert door.transformers_attention(layer(), q[:1], k, v, None)[0].equal(want)


def mask_of(function, **more):
    asked = dict(batch_size=2, q_length=6, kv_length=9, q_offset=5, kv_offset=2, device="cpu") | more
    return AttentionMaskInterface()[door.NAME](mask_function=function, **asked), transformers.masking_utils.sdpa_mask(mask_function=function, **asked)


@pytest.mark.parametrize("attention_mask", (None, torch.ones(2, 11, dtype=torch.bool), torch.arange(11) > torch.tensor([[2], [4]])))
@pytest.mark.parametrize("function", ("causal", "window", "both", "chunks", "all"))
def test_marks(function, attention_mask):
    """The tensor is transformers'; a mark, where there is one, sees exactly what the tensor does."""
    from transformers import masking_utils as u
    rule = {"causal": u.causal_mask_function, "window": u.sliding_window_causal_mask_function(3),
        "both": u.sliding_window_bidirectional_mask_function(2),
        "chunks": u.chunked_causal_mask_function(3, torch.tensor([0, 1])), "all": u.bidirectional_mask_function}[function]
    got, want = mask_of(rule, attention_mask=attention_mask)
    assert got.equal(want)
    marked = function in ("causal", "window") and (attention_mask is None or bool(attention_mask.all()))
    assert (door.window_mark(got) is not None) == marked
    if not marked: return
    q, k, v = tensors(6, 9)
    problem = door.attention_problem(layer(), q, k, v, got)
    assert problem.mask is None and visible(problem, *everything(problem)).equal(want[:1])
    assert door.window_mark(got.clone()) is door.window_mark(got[:1]) is None
    with torch.inference_mode(): assert mask_of(rule)[0].equal(want)
    assert door.window_mark(mask_of(rule, q_offset=torch.tensor(5))[0]) is None


def test_register():
    """Idempotent; gone after unregistering; sdpa's own entries untouched."""
    before = AttentionInterface()["sdpa"]
    door.register_with_transformers()
    assert AttentionInterface()[door.NAME] is door.transformers_attention and AttentionInterface()["sdpa"] is before
    door.unregister_with_transformers()
    door.unregister_with_transformers()
    assert door.NAME not in AttentionInterface() and door.NAME not in AttentionMaskInterface()
    with pytest.raises(ValueError, match=door.NAME): build("llama", door.NAME)


def test_without_transformers():
    """The module imports; the door names what to install."""
    code = ("import sys; sys.modules['transformers'] = None\nfrom tensorplay_attn.interop import transformers as door\n"
        "try: door.register_with_transformers()\nexcept ModuleNotFoundError as e: print(e, e.name)")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "transformers is not installed: pip install 'tensorplay_attn[transformers]' transformers\n"


def test_refusals():
    q, k, v = tensors()
    call = lambda mask=None, **more: door.transformers_attention(layer(), q, k, v, mask, **more)
    for kind, more in ((ValueError, dict(sinks=torch.zeros(2, 4, 5, 1))), (ValueError, dict(softcap=-1.0)), (ValueError, dict(s_aux=torch.zeros(2))),
        (ValueError, dict(dropout=1.5)), (TypeError, dict(mask=torch.ones(2, 1, 5, 5, dtype=torch.int64))), (TypeError, dict(mask="causal")),
        (ValueError, dict(mask=torch.ones(2, 1, 5, 7, dtype=torch.bool))), (TypeError, dict(scaling="1"))):
        with pytest.raises(kind): call(**more)
    with pytest.warns(UserWarning, match="output_attentions"): assert call(output_attentions=True)[1] is None


def test_a_model_that_looks_nothing_up():
    """BLOOM adds its mask to the scores: it gets the one it knows, and says whose answer it is."""
    config = lambda: BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    models = [BloomModel._from_config(config(), attn_implementation=name).eval() for name in ("eager", door.NAME)]
    models[1].load_state_dict(models[0].state_dict())
    given = dict(input_ids=torch.randint(3, 48, (2, 12)), attention_mask=REAL)
    want = models[0](**given).last_hidden_state
    with pytest.warns(UserWarning, match="BloomConfig"): assert models[1](**given).last_hidden_state.equal(want)


@pytest.mark.parametrize("way", ("padded", "whole"))
def test_compile(way):
    """One graph, the same numbers, gradients too."""
    model = build("mistral", door.NAME)
    want, got = run(model, "mistral", way), run(torch.compile(model, fullgraph=True, backend="aot_eager"), "mistral", way)
    assert {n.removeprefix("_orig_mod.") for n in got} == want.keys()
    assert all(x.equal(want[n.removeprefix("_orig_mod.")]) for n, x in got.items())


def test_checkpointing():
    """A forward done again in backward has the same masks and answers."""
    model = build("mistral", door.NAME).train()
    want = run(model, "mistral", "whole")
    model.activation_checkpointing_enable()
    got = run(model, "mistral", "whole")
    assert all(got[n].equal(x) for n, x in want.items())
