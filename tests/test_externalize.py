"Modules kept whole: which, how they are named and written, that they run, train, compile, travel, and become ONNX functions."
import io
import math
import subprocess
import sys
import warnings

import onnx
import onnx.reference
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim

from tensorplay_attn import externalize as X
from tensorplay_attn.externalize import CompositeProgram, ExternalizeSpec, export_composite, parse, show, to_onnx
from tensorplay_attn.sdpa import SDPA

SPEC = ExternalizeSpec(target_class=SDPA, composite_op_name="scaled_dot_product_attention", composite_attrs=["scale", "is_causal", "window_size"])
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.attn = SDPA(*args, **kwargs)

    def forward(self, query, key, value, attn_mask=None, sinks=None): return self.attn(query, key, value, attn_mask, sinks)


class Through(nn.Module):
    "A module m, and a function of it and the input."
    def __init__(self, m, f=lambda m, x: m(x)):
        super().__init__()
        self.m, self.f = m, f

    def forward(self, x): return self.f(self.m, x)


def qkv(B=1, L=5, S=7): return torch.randn(B, 8, L, 16), torch.randn(B, 2, S, 16), torch.randn(B, 2, S, 12)


def check(model, args, spec, dynamic=None, other=None, kwargs=None):
    "Export, print, read, run, decompose, save, load: the same numbers everywhere. Returns the program."
    kwargs, other = kwargs or {}, other or args
    program = export_composite(model, args, kwargs, externalize=spec, dynamic_shapes=dynamic)
    program.program.validate()
    assert parse(str(program)) == program.graphs and show(parse(str(program))) == str(program)
    f = io.BytesIO()
    program.save(f)
    f.seek(0)
    want = model(*other, **kwargs)
    for p in (program, program.run_decompositions(), CompositeProgram.load(f)):
        torch.testing.assert_close(p(*other, **kwargs), want)
        assert list(p.declarations) == list(program.declarations) and len(p.nodes()) == len(program.nodes())
    assert not any("forward" in m.__dict__ for m in model.modules())
    return program


VARIANTS = [(), ("attn_mask",), ("sinks",), ("attn_mask", "sinks")]


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_input_names(given):
    more = {n: x for n, x in dict(attn_mask=torch.rand(5, 7) < 0.7, sinks=torch.randn(8)).items() if n in given}
    g = check(Attention(), qkv(), [SPEC], kwargs=more).declarations["attn"]
    assert g.input_names == ["query", "key", "value", *given] and g.output_names == ["output"]


@pytest.mark.parametrize("made, attrs", [((), {}), ((0.5,), {"scale": 0.5}),
    ((1 / 3, True, 4), {"scale": 1 / 3, "is_causal": True, "window_size": 4})], ids=str)
def test_declared_attributes(made, attrs):
    g = check(Attention(*made), qkv(), [SPEC]).declarations["attn"]
    want = {"is_causal": False, "window_size": 0, "version": 1} | attrs
    assert (g.op, g.op_attrs) == ("scaled_dot_product_attention", want)
    line = X.declaration(g)
    assert "\n" not in line and [line.index(f"{n} = ") for n in sorted(want)] == sorted(line.index(f"{n} = ") for n in want)


COREAI = (' private noinline @attn(%arg0: tensor<{B}x8x{L}x16xf32> {{coreai.name = "query"}}, '
    '%arg1: tensor<{B}x2x{S}x16xf32> {{coreai.name = "key"}}, %arg2: tensor<{B}x2x{S}x16xf32> {{coreai.name = "value"}}) -> '
    '(tensor<{B}x8x{L}x16xf32> {{coreai.name = "output"}}) attributes {{__coreai_pure__, '
    'composite_decl = #coreai.composite_declaration<"scaled_dot_product_attention" = {{input_names = ["query", "key", "value"], '
    'op_attrs = {{is_causal = true, scale = 1.500000e+00 : f32, version = 1 : si64, window_size = 4 : si64}}, output_names = ["output"]}}>}} {{')


@pytest.mark.parametrize("dynamic", [False, True])
def test_line_is_coreais(dynamic):
    "As coreai-torch 0.4.3 printed it, but for its random suffix and the result's name; a size that varies is a question mark."
    q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    B, L, S = Dim("B"), Dim("L"), Dim("S")
    shapes = ({0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S}, None, None) if dynamic else None
    p = export_composite(Attention(1.5, True, 4), (q, k, v, None, None), externalize=[SPEC], dynamic_shapes=shapes)
    sizes = dict.fromkeys("BLS", "?") if dynamic else dict(B=2, L=5, S=7)
    assert X.declaration(p.declarations["attn"]) == "coreai.graph" + COREAI.format(**sizes)
    assert str(p).count("composite_decl = ") == 1


@pytest.mark.parametrize("made", [{}, dict(scale=-0.5, is_causal=True, window_size=3)], ids=str)
def test_dynamic_shapes(made):
    B, L, S = Dim("B"), Dim("L"), Dim("S")
    shapes = ({0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S}, None, None)
    model, args, other = Attention(**made), (*qkv(2), None, torch.randn(8)), (*qkv(3, 4, 9), None, torch.randn(8))
    program = check(model, args, [SPEC], shapes, other)
    want = model(*other)
    torch.testing.assert_close(program.sub_program("attn")(*[t for t in other if t is not None])[0], want)
    o = to_onnx(program)
    onnx.checker.check_model(o)
    torch.testing.assert_close(answers(o, other)[0], want)
    torch.testing.assert_close(answers(o, other)[1], want)


def answers(o, inputs):
    "ONNX Runtime's and the reference evaluator's."
    given = {i.name: t.numpy() for i, t in zip(o.graph.input, [t for t in inputs if t is not None])}
    return [torch.from_numpy(run.run(None, given)[0])
        for run in (onnxruntime.InferenceSession(o.SerializeToString()), onnx.reference.ReferenceEvaluator(o))]


@pytest.mark.parametrize("made", [{}, dict(window_size=2), dict(is_causal=True, scale=-0.5)], ids=str)
@pytest.mark.parametrize("mask, sinks", [(None, False), ("bool", False), ("bias", False), ("bool", True)])
def test_onnx(made, mask, sinks):
    "One function node; Attention in it where the standard has the words."
    m = None if mask is None else torch.rand(5, 7) < 0.7 if mask == "bool" else torch.randn(2, 1, 5, 7)
    model, inputs = Attention(**made), (*qkv(2), m, torch.randn(8) if sinks else None)
    o = to_onnx(export_composite(model, inputs, externalize=[SPEC]))
    onnx.checker.check_model(o)
    assert [n.op_type for n in o.graph.node if n.domain == X.DOMAIN] == ["attn"] and [f.name for f in o.functions] == ["attn"]
    assert [n.op_type for n in o.functions[0].node].count("Attention") == (not sinks) and "composite_decl" in o.functions[0].doc_string
    for got in answers(o, inputs): torch.testing.assert_close(got, model(*inputs))


def test_onnx_nested_functions():
    model = Through(nn.Sequential(Through(nn.Linear(4, 4)), nn.ReLU()))
    x, dynamic = torch.randn(3, 4), ({0: Dim("B")},)
    o = to_onnx(export_composite(model, (x,), externalize=[nn.Sequential, Through, nn.Linear], dynamic_shapes=dynamic))
    onnx.checker.check_model(o)
    assert {f.name: [n.op_type for n in f.node if n.domain == X.DOMAIN] for f in o.functions} == {"m": ["m_0"], "m_0": ["m_0_m"], "m_0_m": []}
    for got in answers(o, (torch.randn(5, 4),)): assert got.shape == (5, 4)
    for got in answers(o, (x,)): torch.testing.assert_close(got, model(x).detach())


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(4)), 0.5
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x): return x * self.weight + self.shift


class Louder(Norm):
    def forward(self, x): return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, x): return self.norm(x).relu()


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm = Block(), Louder()
        self.shared = self.norm  # two names, one module

    def forward(self, x): return self.norm(self.block(self.block(x))) + self.shared(x)


def test_nested_shared_repeated_subclassed():
    model, x, other = Many(), torch.randn(3, 4), torch.randn(5, 4)
    specs = [ExternalizeSpec(Norm, "norm", ["eps"]), Block]
    program = check(model, (x,), specs, ({0: Dim("B")},), (other,))
    found = {g.name: (g.op, g.input_names) for g in program.declarations.values()}
    norm = "norm", ["weight", "shift", "x"]
    block = None, ["norm.weight", "norm.shift", "x"]
    assert found == {"block.norm": norm, "block": block, "block.norm_1": norm, "block_1": block, "norm": norm, "norm_1": norm}
    assert [n.name for n in program.nodes()] == ["block", "block_1", "norm", "norm_1"]
    first = export_composite(model, (x,), externalize=[ExternalizeSpec(Louder, "louder"), *specs])
    assert [g.op for g in first.declarations.values()] == ["norm", None, "norm", None, "louder", "louder"]


def test_root_is_not_matched():
    with pytest.warns(UserWarning, match="Norm"): program = export_composite(Norm(), (torch.randn(3, 4),), externalize=[Norm])
    assert not program.nodes() and not program.declarations and "@main" in str(program)


def test_trains_and_compiles():
    "Gradients of inputs and parameters, eagerly and compiled, are the model's own."
    model, x = Many(), torch.randn(3, 4, requires_grad=True)
    run = export_composite(model, (x,), externalize=[ExternalizeSpec(Norm, "norm"), Block]).module()
    names = [n for n, _ in model.named_parameters()]
    grads = lambda f, p: torch.autograd.grad(f(x).square().sum(), [x, *(p[n] for n in names)])
    want = grads(model, dict(model.named_parameters()))
    parameters = dict(run.named_parameters(remove_duplicate=False))
    own = {n: parameters.get(n, parameters.get(n.replace("norm.", "shared.", 1))) for n in names}
    for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True)): torch.testing.assert_close(grads(f, own), want)


def test_another_process_needs_only_the_package():
    program, f = export_composite(Attention(is_causal=True), qkv(), externalize=[SPEC]), io.BytesIO()
    program.save(f)
    reader = "import io, sys, torch, tensorplay_attn.externalize as X; p = X.CompositeProgram.load(io.BytesIO(sys.stdin.buffer.read())); " \
        "a = torch.ones(1, 8, 5, 16), torch.ones(1, 2, 7, 16), torch.ones(1, 2, 7, 12); print(p(*a).sum().item(), len(p.nodes()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", reader], input=f.getvalue(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.split() == [b"480.0", b"1"]


class Tree(nn.Module):
    def forward(self, d, *rest, flag=True, **more): return {"a": d["q"] + rest[0][0], "b": (more["z"] * 2 if flag else d["q"], None, 3)}


class Views(nn.Module):
    def forward(self, x): return x.t(), x, x[0]


class Sizes(nn.Module):
    def forward(self, x, n=None): return x.new_zeros(2 * x.shape[0] + 1) + x.sum() + torch.arange(2 * x.shape[0] + 1) * (1 if n is None else n)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.arange(4.)

    def forward(self, x): return x + self.steps + torch.tensor([1., 2., 3., 4.])


class Within(nn.Module):
    def forward(self, x):
        y = x * 2
        y[0] = 0
        return y.add_(1)


def quiet(m, x):
    with torch.no_grad(): return m(x)


SHAPES = {
    "nested arguments": (Tree(), lambda m, x: m({"q": x}, (x * 2,), z=x * 3), ["d_q", "rest_0_0", "z"]),
    "views and inputs returned": (Views(), lambda m, x: (m(x)[0].contiguous(), m(x)[2], m(x)[1] + 1), ["x"]),
    "sizes inside and outside": (Sizes(), lambda m, x: m(x) + x.shape[0] * 2, ["x"]),
    "a size as an argument": (Sizes(), lambda m, x: m(x, x.shape[0] * 2), ["x"]),
    "constants": (Constant(), lambda m, x: m(x), None),
    "called without gradients": (Within(), quiet, None),
    "writing into its own": (Within(), lambda m, x: m(x), None),
    "an LSTM": (nn.LSTM(4, 5), lambda m, x: m(x[None])[0], ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "input"]),
    "multi-head attention": (nn.MultiheadAttention(4, 2, batch_first=True), lambda m, x: m(x[None], x[None], x[None])[0],
        ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "query", "key", "value"]),
    "batch norm": (nn.BatchNorm1d(4).eval(), lambda m, x: m(x), ["weight", "bias", "running_mean", "running_var", "input"]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_all_kinds_of_modules(name):
    m, f, names = SHAPES[name]
    static = name == "an LSTM"
    program = check(Through(m, f), (torch.randn(3, 4),), [type(m)], None if static else ({0: Dim("B")},), (torch.randn(3 if static else 5, 4),))
    assert set(program.declarations) <= {"m", "m_1", "m_2"} and (names is None or program.declarations["m"].input_names == names)


def test_a_size_that_no_input_has():
    class Times(nn.Module):
        def forward(self, y, n): return y * n
    model, dynamic = Through(Times(), lambda m, x: m(torch.ones(2), x.shape[0])), ({0: Dim("B")},)
    program = check(model, (torch.randn(3, 4),), [Times], dynamic, (torch.randn(5, 4),))
    assert [x.type for x in program.declarations["m"].inputs] == ["tensor<2xf32>", "si64"]
    with pytest.raises(ValueError, match="sizes are not there yet"): to_onnx(program)


class Adds(nn.Module):
    def forward(self, x): return x[0].add_(1)


class Conditional(nn.Module):
    def forward(self, x): return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Fails(nn.Module):
    def forward(self, x): raise KeyError("this one")


@pytest.mark.parametrize("m, error, words", [(Adds(), ValueError, "m: a composite cannot change what it is given"),
    (nn.BatchNorm1d(4), ValueError, "cannot change"), (Conditional(), ValueError, "graphs of its own"), (Fails(), KeyError, "this one")],
    ids=lambda x: type(x).__name__)
def test_refused_and_restored(m, error, words):
    model = Through(m)
    own = m.forward = lambda *args: type(m).forward(m, *args)  # one that somebody put there before
    with pytest.raises(error, match=words): export_composite(model, (torch.randn(3, 4),), externalize=[type(m)])
    assert m.forward is own and "forward" not in model.__dict__


@pytest.mark.parametrize("made, error, words", [
    (dict(target_class=SDPA, composite_attrs=["scale"]), ValueError, "composite_attrs need a composite_op_name"),
    (dict(target_class="SDPA"), TypeError, "target_class must be a class"),
    (dict(target_class=SDPA, composite_op_name=1), TypeError, "must be a str"),
    (dict(target_class=SDPA, composite_op_name="a", composite_attrs="scale"), TypeError, "list of names"),
], ids=str)
def test_refused_specs(made, error, words):
    with pytest.raises(error, match=words): ExternalizeSpec(**made)


@pytest.mark.parametrize("value, error", [(torch.ones(1), TypeError), ((1, 2), TypeError), ([1, None], TypeError), ({1: 2}, TypeError),
    (2**63, ValueError), (1j, TypeError), (torch.float32, TypeError)], ids=str)
def test_refused_attributes(value, error):
    model = Through(Norm())
    model.m.thing = value
    spec = ExternalizeSpec(Norm, "norm", ["thing"])
    with pytest.raises(error, match="m.thing"): export_composite(model, (torch.randn(3, 4),), externalize=[spec])
    with pytest.raises(AttributeError, match="nothing"): X.find_sites(model, [ExternalizeSpec(Norm, "norm", ["nothing"])])


def test_refused_calls():
    x = (torch.randn(3, 4),)
    wrong = (Norm().forward, [Norm], "model must be"), (Norm(), Norm, "externalize must be a list"), (Norm(), [3], "holds classes")
    for model, specs, words in wrong:
        with pytest.raises(TypeError, match=words): export_composite(model, x, externalize=specs)
    with pytest.raises(TypeError, match="CompositeProgram"): to_onnx(Norm())
    with pytest.raises(ValueError, match="none of m"): export_composite(Through(Norm()), x, externalize=[Norm]).sub_program("n")


def test_what_matches_nothing_is_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_composite(Through(nn.Identity()), (torch.randn(3, 4),), externalize=[SPEC, Norm, Block])
    told = [str(w.message) for w in caught if w.category is UserWarning and "no module" in str(w.message)]
    assert told == ["no module of the model is one of: SDPA, Norm, Block"]


VALUES = [True, 0, -2**63, 1.5, 0.1, -0.0, 1e300, 2.0**-149, math.inf, -math.inf, "", 'a "b" \\22\n é', [], [[1], ["x", {"k": 1.0}]],
    {"a b": 1, "c": {}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_read_as_written(value):
    X.check_attribute("value", value)
    got = X.Reader(X.write_attribute(value)).attribute()
    assert got == value and type(got) is type(value) and repr(got) == repr(value)


@pytest.mark.parametrize("text", ["", "module {", "module { coreai.graph @a() -> () attributes {__coreai_pure__} { coreai.output", "nonsense"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="not the text of a program"): parse(text)


@pytest.mark.parametrize("call", ["os.system(\"true\")", "load_library(\"x\")", "aten.add.Tensor(__import__(\"os\"))", "aten.nothing.at_all()",
    "aten.add.Tensor(%9, 1)", "aten.add.Tensor(torch.load, 1)"])
def test_a_text_calls_torchs_operators_only(call):
    g = X.Graph("g", (), (X.Named("output", "tensor<f32>"),), (X.Line(call, "tensor<f32>"),), ("%0",))
    with pytest.raises(ValueError): X.build(show((g,)))
