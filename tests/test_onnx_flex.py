"""FlexAttention's graphs against numpy's reading of them, its gradients, and whole models against ONNX's evaluator and onnxruntime."""
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from tensorplay_attn.autograd import attend
from tensorplay_attn.engines import ENGINES
from tensorplay_attn.interop.onnx import node_cases, node_model, to_numpy, to_torch
from tensorplay_attn.interop.onnx_flex import (SPELT_OUT, as_mod, check_flex_case, evaluator, flex_attention_node, flex_cases, flex_problem,
    read_graph, run_onnx, scores_of)
from tensorplay_attn.mods import trace
from tensorplay_attn.omni_attention import create_mask

FLEX = "ai.onnx.preview"


def graph(body, rest="", kind="float"):
    text = f'<ir_version: 10, opset_import: ["" : 25]> g ({kind}[B,H,L,S] s) => ({kind}[B,H,L,S] y) {rest} {{ {body} }}'
    return onnx.parser.parse_model(text).graph


def inputs(B=2, H=4, Hkv=2, L=5, S=7, E=4, Ev=3, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return {"Q": torch.randn(B, H, L, E, dtype=dtype), "K": torch.randn(B, Hkv, S, E, dtype=dtype), "V": torch.randn(B, Hkv, S, Ev, dtype=dtype)}


@pytest.mark.parametrize("engine", ("math", "tiled", "routed"))
def test_every_case(engine):
    cases, forward = flex_cases(), attend if engine == "routed" else ENGINES[engine].forward
    assert len(cases) >= 11 and not any("expanded" in c.name for c in cases)
    assert {c.name: v for c in cases for v in check_flex_case(c, forward).values() if not v.passed} == {}
    assert flex_cases() is cases and len(node_cases()) >= 93


def test_a_wrong_weight_is_noticed():
    case = next(c for c in flex_cases() if c.name == "flexattention_prob_mod")

    def off(problem):
        out, lse, top = ENGINES["math"].forward(problem)
        return out, lse + 3e-6, top
    assert check_flex_case(case)["Y"].passed and not check_flex_case(case, off)["Y"].passed


INDICES = """shape = Shape(s) L = Gather(shape, two) S = Gather(shape, three)
    i0 = Range(zero, L, one) j = Range(zero, S, one) i = Unsqueeze(i0, last)"""
NUMBERS = "<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 three = {3}, int64[1] last = {-1}, float minus = {-inf}, float x = {0.75}>"
BODIES = {
    "whole triangle": "n = ConstantOfShape<value = float {1.0}>(shape) t = Trilu<upper = 0>(n) c = Cast<to = 9>(t) y = Where(c, s, minus)",
    "window": "low = Sub(i, two) a = GreaterOrEqual(j, low) b = LessOrEqual(j, i) c = And(a, b) y = Where(c, s, minus)",
    "other branch": "c = Less(i, j) y = Where(c, x, s)",
    "floats of distances": "d = Sub(i, j) a = Abs(d) f = Cast<to = 1>(a) g = Mul(f, x) y = Sub(s, g)",
    "buckets": "d = Sub(i, j) q = Div(d, two) r = Mod(d, three) z = Add(q, r) f = Cast<to = 1>(z) y = Add(s, f)",
    "clip": "y = Clip(s, , x)", "power": "q = Pow(s, two) y = Mul(q, x)", "many": "a = Max(s, x, s) b = Min(a, s) c = Sum(a, b, s) y = Mean(c, s)",
    "truths": "n = IsNaN(s) f = IsInf(s) o = Or(n, f) k = Not(o) c = Equal(k, k) y = Where(c, s, x)",
    "functions": "a = Tanh(s) b = Sigmoid(a) c = Exp(b) d = Log(c) e = Sqrt(d) f = Erf(e) g = Reciprocal(f) y = Neg(g)",
    "rounding": "a = Floor(s) b = Ceil(s) c = Round(s) d = Sign(s) e = Abs(s) y = Sum(a, b, c, d, e)",
    "expanded": "k = Slice(shape, ends0, four) e = Expand(i, k) d = Cast<to = 1>(e) y = Add(s, d)",
    "heads": "H = Gather(shape, one) h = Range(zero, H, one) f = Cast<to = 1>(h) u = Unsqueeze(f, ends) y = Mul(s, u)",
    "swapped": "d = Sub(i, j) f = Cast<to = 1>(d) t = Transpose(f) u = Transpose<perm = [1, 0]>(t) y = Add(s, u)",
    "squeezed": "r = Reshape(j, row) q = Squeeze(r) f = Cast<to = 1>(q) y = Add(s, f)", "cast and back": "h = Cast<to = 10>(s) y = CastLike(h, s)",
    "same": "y = Identity(s)", "number": "z = Constant<value = float {2.0}>() w = Sqrt(z) y = Mul(w, s)",
    "deep": " ".join(f"a{k + 1} = Add(a{k}, a{k})" for k in range(60)).replace("a0", "s") + " t = Sub(a60, a60) y = Add(t, s)"}
MORE = ", int64[1] ends0 = {2}, int64[1] four = {4}, int64[2] ends = {1, 2}, int64[4] row = {1, 1, 1, -1}>"


def whole_answer(g, s):
    """The graph on a whole array, by ONNX's evaluator."""
    with np.errstate(all="ignore"): return torch.from_numpy(ReferenceEvaluator(g, opsets={"": 25}).run(None, {"s": s.numpy()})[0])


@pytest.mark.parametrize("name", BODIES)
def test_graphs_element_by_element(name):
    g = graph(f"{INDICES} {BODIES[name]}", NUMBERS[:-1] + MORE)
    torch.manual_seed(1)
    s = torch.randn(2, 3, 5, 7)
    read = read_graph(g, scores_of(torch.float32, *s.shape), 25, {})
    traced, _ = trace(as_mod(read))
    at = torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")
    got = as_mod(read)(s, *at).expand(s.shape)
    torch.testing.assert_close(got, whole_answer(g, s), rtol=1e-6, atol=1e-6, equal_nan=True)
    x = inputs(L=5, S=7)
    tiled, dense = (flex_attention_node({"score_mod": g}, x, 25, ENGINES[e].forward) for e in ("tiled", "math"))
    torch.testing.assert_close(tiled, dense, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("op", SPELT_OUT)
def test_activations(op):
    g = graph("y = PRelu(s, x)" if op == "PRelu" else f"y = {op}(s)", "<float x = {0.5}>")
    s = torch.linspace(-4, 4, 210).view(2, 3, 5, 7)
    got = as_mod(read_graph(g, scores_of(torch.float32, *s.shape), 25, {}))(s, *[torch.zeros(1, dtype=torch.int64)] * 4)
    torch.testing.assert_close(got, whole_answer(g, s), rtol=1e-5, atol=1e-6)


def test_a_mask_becomes_a_window_or_blocks():
    of = lambda name: flex_problem({"score_mod": graph(f"{INDICES} {BODIES[name]}", NUMBERS)}, inputs(), 25)[0]
    assert of("window").window == (2, 0) and of("window").mods is None
    odd = graph(f"{INDICES} d = Sub(i, j) r = Mod(d, two) c = Equal(r, zero) y = Where(c, s, minus)", NUMBERS)
    problem, _ = flex_problem({"score_mod": odd}, inputs(), 25)
    assert problem.mods.score is None and problem.mods.mask is not None and problem.mods.blocks is not None
    want = create_mask(lambda b, h, i, j: (i - j) % 2 == 0, 1, 1, 5, 7, device="cpu")
    masked = torch.nn.functional.scaled_dot_product_attention(*inputs().values(), want, enable_gqa=True)
    torch.testing.assert_close(flex_attention_node({"score_mod": odd}, inputs(), 25), masked)


@pytest.mark.parametrize("engine", ("math", "tiled"))
@pytest.mark.parametrize("prob", (None, "a = Mul(s, s) y = Mul(a, slope)"))
def test_gradients(prob, engine):
    body = f"{INDICES} d = Sub(i, j) f = Cast<to = 11>(d) g = Mul(f, slope) t = Tanh(s) u = Add(t, g) c = GreaterOrEqual(i, j) y = Where(c, u, minus)"
    numbers = NUMBERS.replace("float", "double")
    graphs = {"score_mod": graph(body, numbers, "double")} | ({} if prob is None else {"prob_mod": graph(prob, kind="double")})
    x = {n: t.requires_grad_() for n, t in inputs(dtype=torch.float64).items()}
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def answer(q, k, v, slope):
        return flex_attention_node(graphs, {"Q": q, "K": k, "V": v}, 25, lambda p: attend(p, engine), {"slope": slope})

    def plain(q, k, v, slope):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        i, j = torch.arange(5)[:, None], torch.arange(7)
        s = (q @ k.mT / 2).tanh() + (i - j) * slope
        p = torch.where(i >= j, s, -torch.inf).softmax(-1)
        return (p if prob is None else p * p * slope) @ v
    given = (*x.values(), slope)
    got, want = answer(*given), plain(*given)
    torch.testing.assert_close(got, want)
    up = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, given, up), torch.autograd.grad(want, given, up)): torch.testing.assert_close(a, b)


def test_an_empty_row_has_no_gradient():
    x = {n: t.requires_grad_() for n, t in inputs().items()}
    never = graph("y = Where(no, s, minus)", "<bool no = {0}, float minus = {-inf}>")
    y = flex_attention_node({"score_mod": never, "prob_mod": graph("y = Mul(s, s)")}, x, 25)
    y.sum().backward()
    assert y.eq(0).all() and all(t.grad.eq(0).all() for t in x.values())


@pytest.mark.parametrize("dtype,precision", [(torch.float16, None), (torch.bfloat16, 1), (torch.float32, 11), (torch.float64, None),
    (torch.float16, 10)])
def test_precisions(dtype, precision):
    kind = {11: "double", 10: "float16"}.get(precision, "double" if dtype == torch.float64 else "float")
    g = graph("two = CastLike(x, s) t = Tanh(s) y = Mul(t, two)", "<float x = {2.0}>", kind)
    a = {"score_mod": g} | ({} if precision is None else {"softmax_precision": precision})
    x = inputs(dtype=dtype)
    assert flex_problem(a, x, 25)[0].state_dtype == (torch.float64 if "double" in kind else torch.float32)
    g = graph("t = Tanh(s) y = Mul(t, two)", "<double two = {2.0}>", "double")
    wide = flex_attention_node({"score_mod": g}, {n: t.double() for n, t in x.items()}, 25)
    got = flex_attention_node(a, x, 25)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wide, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("B,L,S", [(0, 3, 4), (1, 0, 4), (1, 3, 0)])
def test_empty_sizes(B, L, S):
    for a in ({}, {"score_mod": graph(f"{INDICES} {BODIES['window']}", NUMBERS)}, {"prob_mod": graph("y = Mul(s, s)")}):
        y = flex_attention_node(a, inputs(B=B, L=L, S=S), 25)
        assert y.shape == (B, 4, L, 3) and y.eq(0).all()


def refuse(error, words, a, x=None, **more):
    with pytest.raises(error, match=words): flex_attention_node(a, inputs() if x is None else x, 25, **more)


def test_refusals():
    x = inputs()
    refuse(ValueError, "no attribute 'is_causal'", {"is_causal": 1})
    refuse(ValueError, "no input 'attn_mask'", {}, x | {"attn_mask": x["Q"]})
    refuse(ValueError, "needs V", {}, {n: x[n] for n in "QK"})
    refuse(TypeError, "Q must be a tensor", {}, x | {"Q": 3})
    refuse(TypeError, "K must be floating", {}, x | {"K": x["K"].long()})
    refuse(ValueError, "V must have 4 dimensions", {}, x | {"V": x["V"][0]})
    refuse(ValueError, "softmax_precision must be one of", {"softmax_precision": 7})
    refuse(TypeError, "score_mod must be an onnx.GraphProto", {"score_mod": lambda s: s})
    refuse(ValueError, "softmax precision, 1: 's' is declared as 11", {"score_mod": graph("y = Tanh(s)", kind="double")})
    refuse(ValueError, "CumSum of 'y' has no translation", {"score_mod": graph("y = CumSum(s, one)", "<int64 one = {1}>")})
    refuse(ValueError, "MatMul of 'y'", {"prob_mod": graph("y = MatMul(s, s)")})
    refuse(ValueError, "must give floating values of shape", {"score_mod": graph("y = IsNaN(s)")})
    refuse(ValueError, "must give floating values of shape", {"score_mod": graph("y = Add(s, x)", "<float[2,1,1,1,1] x = {1.0, 2.0}>")})
    refuse(ValueError, "'deep', which nothing makes before Add", {"score_mod": graph("y = Add(s, deep)")})
    refuse(ValueError, "Det of 'd' has no translation", {"score_mod": graph("d = Det(m) y = Mul(s, d)", "<float[1,2] m = {1.0, 2.0}>")})
    refuse(ValueError, "Trilu of 't' has no translation that can be differentiated", {"score_mod": graph("t = Trilu(m) y = Add(s, t)")},
        outer={"m": torch.ones(5, 7, requires_grad=True)})
    custom = graph("y = Tanh(s)")
    custom.node[0].domain = "mine"
    refuse(ValueError, "Tanh of 'y' has no translation: domain 'mine'", {"score_mod": custom})
    two = graph("y = Tanh(s)")
    two.output.append(two.output[0])
    refuse(ValueError, "must have one output", {"score_mod": two})


# whole models


def model(body, ins, outs, opset=25, functions="", numbers=()):
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "{FLEX}": 1, "f": 1]> g ({ins}) => ({outs}) {{ {body} }} {functions}'
    made = onnx.parser.parse_model(text)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers)
    return made


LAYER = """q4 = Reshape(x, split) q = Transpose<perm = [0, 2, 1, 3]>(q4) past_more = Concat<axis = 2>(past, past)
    a, pk, pv, w = Attention<is_causal = 1, softcap = 3.0, qk_matmul_output_mode = 3>(q, q, q, , past_more, past_more)
    m = Mul(a, a) k2 = Relu(pk) b = Attention<scale = 0.25>(m, k2, pv, mask) t = Transpose<perm = [0, 2, 1, 3]>(b) y = Reshape(t, join)"""
NUMBERS_OF_LAYER = (("split", [0, 0, 2, -1]), ("join", [0, 0, -1]))


def layer(opset, kind="float"):
    return model(LAYER, f"{kind}[2,3,8] x, {kind}[2,2,2,4] past, {kind}[3,7] mask", f"{kind}[2,3,8] y, {kind}[2,2,3,7] w, {kind}[2,2,7,4] pk", opset,
        numbers=NUMBERS_OF_LAYER)


def layer_inputs(dtype=torch.float32):
    torch.manual_seed(0)
    mask = torch.randn(3, 7).masked_fill(torch.rand(3, 7) < 0.3, -torch.inf)
    return {"x": torch.randn(2, 3, 8).to(dtype), "past": torch.randn(2, 2, 2, 4).to(dtype), "mask": mask.to(dtype)}


def theirs(m, x): return [to_torch(t) for t in ReferenceEvaluator(m).run(None, {n: to_numpy(t) for n, t in x.items()})]


ROOM = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 8e-2}


KINDS = {"float": torch.float32, "double": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("opset", (23, 24, 25))
@pytest.mark.parametrize("kind,dtype", KINDS.items())
def test_a_layer_against_the_evaluator(opset, kind, dtype):
    m, x, asked = layer(opset, kind), layer_inputs(dtype), []
    made = run_onnx(m, x, lambda p: asked.append(p) or attend(p))
    assert len(asked) == 2 and list(made) == ["y", "w", "pk"] and asked[0].shift == 4 and asked[0].softcap == 3
    for got, want in zip(made.values(), theirs(m, x)):
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got.double(), want.double(), rtol=ROOM[dtype], atol=ROOM[dtype])


@pytest.mark.parametrize("opset", (23, 24, 25))
def test_a_layer_against_onnxruntime(opset):
    m, x = layer(opset), layer_inputs()
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(run_onnx(m, x).values(), session.run(None, {n: t.numpy() for n, t in x.items()})):
        torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("window", "buckets", "clip", "functions", "heads"))
def test_flex_against_onnxruntime(name):
    a = {"score_mod": graph(f"{INDICES} {BODIES[name]}", NUMBERS[:-1] + MORE), "prob_mod": graph("y = Mul(s, s)")}
    info, x = onnx.helper.make_tensor_value_info, inputs()
    node = onnx.helper.make_node("FlexAttention", list("QKV"), ["y"], domain=FLEX, **a)
    lone = onnx.helper.make_graph([node], "g", [info(n, 1, t.shape) for n, t in x.items()], [info("y", 1, (2, 4, 5, 3))])
    m = onnx.helper.make_model(lone, opset_imports=[onnx.helper.make_opsetid("", 25), onnx.helper.make_opsetid(FLEX, 1)], ir_version=10)
    spelt = onnx.inliner.inline_selected_functions(m, [(FLEX, "FlexAttention")], inline_schema_functions=True)  # it has no kernel of its own
    session = onnxruntime.InferenceSession(spelt.SerializeToString(), providers=["CPUExecutionProvider"])
    want = torch.from_numpy(session.run(None, {n: t.numpy() for n, t in x.items()})[0])
    torch.testing.assert_close(run_onnx(m, x)["y"], want, rtol=1e-5, atol=1e-5)


def test_every_node_case_as_a_model():
    for c in node_cases():
        m = node_model(c.attributes, c.inputs, c.opset, tuple(c.outputs))
        for o in m.graph.output: o.type.tensor_type.shape.SetInParent()
        for o in m.graph.output: o.type.tensor_type.shape.dim.extend([o.type.tensor_type.shape.dim.add() for _ in range(c.outputs[o.name].ndim - 1)])
        made = run_onnx(m, c.inputs)
        for name, want in c.outputs.items():
            assert made[name].shape == want.shape and made[name].dtype == want.dtype
            room = (2e-2, 1e-2) if want.dtype.itemsize == 2 else (1e-3, 1e-6)
            torch.testing.assert_close(made[name].double(), want.double(), rtol=room[0], atol=room[1])


def test_functions_and_branches_run_on_our_engines():
    m = model("z = f.block(q) y = If <then_branch = t () => (float[1,2,3,4] a) { a = Attention(z, z, z) }, else_branch = e () => (float[1,2,3,4] b) "
              "{ b = Identity(z) }>(yes)", "float[1,2,3,4] q, bool yes", "float[1,2,3,4] y", functions=
              '<domain: "f", opset_import: ["": 25]> block (q) => (z) { z = Attention<is_causal = 1>(q, q, q) }')
    x, asked = {"q": torch.randn(1, 2, 3, 4), "yes": torch.tensor(True)}, []
    got = run_onnx(m, x, lambda p: asked.append(p) or attend(p))["y"]
    assert [p.window for p in asked] == [(-1, 0), (-1, -1)]
    torch.testing.assert_close(got, theirs(m, x)[0])
    asked.clear()
    run_onnx(m, x | {"yes": torch.tensor(False)}, lambda p: asked.append(p) or attend(p))
    assert len(asked) == 1


def test_an_external_cache():
    m = model("y = Attention<is_causal = 1>(q, k, k, , , , n)", "float[2,2,2,4] q, float[2,1,6,4] k, int64[2] n", "float[2,2,2,4] y")
    x = {"q": torch.randn(2, 2, 2, 4), "k": torch.randn(2, 1, 6, 4), "n": torch.tensor([5, 2])}
    torch.testing.assert_close(run_onnx(m, x)["y"], theirs(m, x)[0])


def test_flex_in_a_model_reads_what_is_around_it():
    mod = "mod (float[B,H,L,S] s) => (float[B,H,L,S] t) { u = f.twice(s) t = Mul(u, r) }"
    body = f"r = Relu(slope) y = {FLEX}.FlexAttention <score_mod = {mod}>(q, q, q)"
    m = model(body, "float[1,2,3,4] q, float slope", "float[1,2,3,4] y",
        functions='<domain: "f", opset_import: ["": 25]> twice (s) => (t) { t = Add(s, s) }')
    q, slope = torch.randn(1, 2, 3, 4), torch.tensor(0.5)
    torch.testing.assert_close(run_onnx(m, {"q": q, "slope": slope})["y"], torch.nn.functional.scaled_dot_product_attention(q, q, q))
    with pytest.raises(RuntimeError, match="r"): theirs(onnx.inliner.inline_local_functions(m), {"q": q, "slope": slope})


def test_what_is_left_out_stays_left_out():
    m = model("a, , kept = Attention(q, q, q) y = Attention(a, a, a, , p, p)", "float[1,1,2,2] q, float[1,1,2,2] p", "float[1,1,2,2] y")
    q = torch.eye(2)[None, None]
    a = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    both = torch.cat([torch.zeros_like(a), a], 2)
    torch.testing.assert_close(run_onnx(m, {"q": q, "p": torch.zeros_like(q)})["y"], torch.nn.functional.scaled_dot_product_attention(a, both, both))


def test_wrong_models():
    good = model("y = Attention(q, q, q)", "float[1,2,L,4] q", "float[1,2,L,4] y")
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(TypeError, match="onnx.ModelProto"): evaluator(b"")
    with pytest.raises(TypeError, match="inputs must be a dict"): run_onnx(good, q)
    with pytest.raises(ValueError, match="missing .'q'., unknown .'p'."): run_onnx(good, {"p": q})
    with pytest.raises(TypeError, match="q must be a tensor"): run_onnx(good, {"q": q.numpy()})
    with pytest.raises(TypeError, match="q must be torch.float32"): run_onnx(good, {"q": q.half()})
    with pytest.raises(ValueError, match=r"q must have shape \(1, 2, L, 4\)"): run_onnx(good, {"q": q[:, :1]})
    for body, opset in (("y = Attention(q, nowhere, q)", 25), ("y = Attention(q, q, q)", 22), ("y = Attention<speed = 1>(q, q, q)", 25)):
        with pytest.raises(ValueError, match="not valid"): run_onnx(model(body, "float[1,2,3,4] q", "float[1,2,3,4] y", opset), {"q": q})
    named = model("y = Attention(q, q, r)", "float[1,2,3,4] q, float[1,2,4,4] r", "float[1,2,3,4] y")
    named.graph.node[0].name = "block.3"
    with pytest.raises(ValueError, match="Attention 'block.3': "): run_onnx(named, {"q": q, "r": torch.ones(1, 2, 4, 4)})


def test_the_engine_is_a_choice():
    m, x = layer(25), layer_inputs()
    dense, broken = run_onnx(m, x, ENGINES["math"].forward), run_onnx(m, x, lambda p: ENGINES["math"].forward(replace(p, softcap=0.0)))
    torch.testing.assert_close(dense["y"], run_onnx(m, x)["y"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(dense["y"], broken["y"], atol=1e-3)


def test_without_onnx():
    code = ("import sys; sys.modules['onnx'] = None\nimport torch; from tensorplay_attn.interop.onnx_flex import flex_attention_node, evaluator\n"
            "q = torch.ones(1, 1, 1, 1); assert flex_attention_node({}, dict(Q=q, K=q, V=q)) == 1\nevaluator(None)")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("ModuleNotFoundError: onnx is not installed: pip install 'tensorplay_attn[onnx]'"), done.stderr
