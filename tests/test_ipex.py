"""IPEX's path: what is refused before its import; its kernels and a strict stand-in against the reference.

Tests marked `ipex` run the real package, and only with ``-m ipex``: importing it changes torch for the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import ipex_standin
import pytest
import torch
from batches import Row, make_batch, small_dims
from compare import LSE_ABS, assert_close

import mla
from mla import (
    KernelError,
    MLADims,
    MLAWeights,
    RopeSpec,
    YarnSpec,
    build_metadata,
    decode_group,
    golden,
    kernel_set,
    kernels_for,
    mla_attention,
    prompt_group,
    rope_table,
)
from mla.cache import write_latent_cache_
from mla.compute import ipex, ipex_decode, ipex_load, reference
from mla.compute.ipex_load import Environment

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCALE = 0.0721688
RIGHT = Environment(torch="2.8.0+cu128", ipex="2.8.0", setuptools="80.9.0", has_avx2=True)

DECODE_REL = 2e-3
"""Measured: 1.8e-3 at most, which is the rounding of the output alone: IPEX keeps scores and weights in float32."""
PREFILL_REL = {F32: 1.2e-6, BF16: 3e-3, F16: 3.5e-4}
"""Measured: 6e-7, 2.5e-3 and 3.1e-4; weights are rounded to the dtype before they meet the values."""
LSE = 3e-6
"""Measured: 2e-6, for every dtype."""
SINK_LSE = 1e-4
"""Measured: 6e-5 where one key lies 60 above the rest, whose score alone is rounded at its size."""
SCALAR_FACTOR = 3
"""On CPUs without AVX512_BF16, whose code adds a score up in one sum: measured 5.3e-6, 1.4e-4 in decode, 4.6e-6 in prefill."""


def why_not_here():
    try:
        ipex_load.check_environment(ipex_load.read_environment())
    except KernelError as error:
        return str(error)
    return None


WHY_NOT = why_not_here()


@pytest.fixture(autouse=True)
def one_thread(restore_num_threads):
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def skip_unless_asked(request):
    if request.node.get_closest_marker("ipex") is None:
        return
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    if "ipex" not in request.config.getoption("markexpr"):
        pytest.skip("importing IPEX changes torch for the whole process; asked for with -m ipex")


REAL = [] if WHY_NOT else [pytest.param("ipex", marks=pytest.mark.ipex)]


@pytest.fixture(params=["stand-in", *REAL])
def installed(request):
    if request.param == "ipex":
        return ipex_load.inspect_ipex()
    varlen = ipex_standin.VARLEN["2.8.0"]
    return ipex_load.Installed(
        flash_attention=ipex_standin.flash_attention,
        decode_attention=ipex_standin.decode_attention,
        varlen_attention=varlen,
        varlen_parameters=ipex_load.varlen_parameters(varlen, "of the stand-in"),
        release="2.8.0 (stand-in)",
    )


@pytest.fixture
def kernels(installed):
    made = ipex.kernel_set_of(installed)
    assert (made.name, made.device_types, made.dtypes, made.page_size) == ("CPU_MLA_IPEX", ("cpu",), (BF16,), None)
    return made


def test_the_shipped_golden_bundles_hold(kernels):
    report = golden.check(kernels)
    assert report.passed, report
    passed = {result.bundle for result in report.results if result.status == "passed"}
    assert passed == {path.name for path in golden.find_bundles() if "_bf16_" in path.name}


def run_python(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Before the import


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ipex": None}, r"intel-extension-for-pytorch: expected 2\.8\.\*, got no package of that name; pip install"),
        ({"ipex": "2.7.0"}, r"intel-extension-for-pytorch: expected 2\.8\.\* for CPUs, got 2\.7\.0"),
        ({"ipex": "2.80.0"}, r"intel-extension-for-pytorch: expected 2\.8\.\* for CPUs, got 2\.80\.0"),
        ({"ipex": "2.8.10+xpu"}, r"intel-extension-for-pytorch: expected 2\.8\.\* for CPUs, got 2\.8\.10\+xpu"),
        ({"torch": "2.13.0+cpu"}, r"torch: expected 2\.8\.\* for intel-extension-for-pytorch 2\.8\.0, got 2\.13\.0\+cpu"),
        ({"torch": "2.7.1"}, r"torch: expected 2\.8\.\* for intel-extension-for-pytorch 2\.8\.0, got 2\.7\.1"),
        ({"torch": "2.7.1", "ipex": "2.7.0"}, r"intel-extension-for-pytorch: expected 2\.8\.\* for CPUs, got 2\.7\.0"),
        ({"setuptools": None}, r"setuptools: expected it for .* 2\.8\.0, which imports it, got no package of that name"),
        ({"has_avx2": False}, r"CPU: expected AVX2 or newer for .* 2\.8\.0, got a CPU without it"),
    ],
)
def test_a_wrong_environment_is_refused_before_the_import(monkeypatch, change, message):
    monkeypatch.setattr(ipex_load, "read_environment", lambda: attrs.evolve(RIGHT, **change))
    monkeypatch.delitem(sys.modules, ipex_load.MODULE, raising=False)
    monkeypatch.setattr(ipex_load.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    for wrong in (ipex_load.load_ipex, ipex.make_kernel_set, ipex.diagnostic, lambda: kernel_set("CPU_MLA_IPEX")):
        with pytest.raises(KernelError, match=message):
            wrong()
    with pytest.raises(
        KernelError, match="^ipex: expected a machine that runs CPU_MLA_IPEX, or False for plain torch, got " + message
    ):
        kernels_for("cpu", ipex=True)


def test_a_right_environment_is_not_refused():
    for change in ({}, {"torch": "2.8.0"}, {"torch": "2.8.1+cpu"}, {"ipex": "2.8.0+cpu"}):
        ipex_load.check_environment(attrs.evolve(RIGHT, **change))


def test_what_is_read_of_the_environment(monkeypatch):
    versions = {"intel-extension-for-pytorch": "2.8.0", "setuptools": "80.9.0"}

    def version(name):
        if name not in versions:
            raise ipex_load.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(ipex_load.importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    want = Environment(torch=torch.__version__, ipex="2.8.0", setuptools="80.9.0", has_avx2=False)
    assert ipex_load.read_environment() == want
    versions.clear()
    assert ipex_load.read_environment() == attrs.evolve(want, ipex=None, setuptools=None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "ipex: expected True or False, got int 1"),
        ("yes", "ipex: expected True or False, got str 'yes'"),
        (None, "ipex: expected True or False, got None"),
    ],
)
def test_the_switch_is_a_flag(value, message):
    with pytest.raises(KernelError, match=message):
        kernels_for("cpu", ipex=value)


def test_the_switch_is_for_the_cpu():
    with pytest.raises(KernelError, match="ipex: expected False on a device other than the CPU, got True for cuda"):
        kernels_for("cuda", ipex=True)
    assert kernels_for("cpu", ipex=False) is kernels_for("cpu") is kernel_set("CPU_MLA")


FAKE = """
import os, sys

os.environ["LEFT_BEHIND"] = "1"
os.environ["TAKEN"] = "by the import"
os.environ.pop("GONE", None)
pool, transformers_is_hidden = os.environ["TORCH_WARM_POOL"], sys.modules["transformers"] is None
try:
    import transformers.modeling_outputs
    transformers_is_hidden = False
except ImportError:
    pass
"""


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def modules_of_transformers():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"}


@pytest.fixture
def fake_ipex(monkeypatch, tmp_path):
    """A package of IPEX's name whose body is `FAKE` and what a test adds, in an environment that seems right."""
    for name in [name for name in sys.modules if name.partition(".")[0] in {"transformers", ipex_load.MODULE}]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("transformers", "transformers.modeling_outputs"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setattr(ipex_load, "read_environment", lambda: RIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TAKEN", "by nobody")
    monkeypatch.setenv("GONE", "")
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    before, modules = environment(), modules_of_transformers()

    def write(body=""):
        (tmp_path / f"{ipex_load.MODULE}.py").write_text(FAKE + body)

    yield write
    assert environment() == before
    assert modules_of_transformers() == modules
    sys.modules.pop(ipex_load.MODULE, None)


def test_the_import_leaves_no_variable_and_no_missing_module_behind(fake_ipex):
    fake_ipex()
    module = ipex_load.load_ipex()
    assert module.pool == "0"
    assert module.transformers_is_hidden
    assert ipex_load.load_ipex() is module


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os.exit(127)", "AttributeError: module 'os' has no attribute 'exit'"),
        ("sys.exit('no AVX2')", "SystemExit: no AVX2"),
        ("MoeModelOutputWithPast", "NameError: name 'MoeModelOutputWithPast' is not defined"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise OSError('libsycl.so.8: not found')", "OSError: libsycl.so.8: not found"),
    ],
)
def test_what_goes_wrong_inside_the_import_is_reported_as_itself(fake_ipex, body, message):
    fake_ipex(body)
    with pytest.raises(KernelError, match=rf"intel-extension-for-pytorch: expected 2\.8\.0 to import, got {message}") as info:
        ipex_load.load_ipex()
    assert info.value.__cause__ is not None
    assert ipex_load.MODULE not in sys.modules


def test_an_ipex_without_the_operators_is_refused(monkeypatch):
    monkeypatch.setattr(torch.ops, "torch_ipex", SimpleNamespace(), raising=False)
    with pytest.raises(KernelError, match=r"torch_ipex\.flash_attention: expected it in .* 2\.8\.9, got no such operator"):
        ipex_load.inspect_ipex(SimpleNamespace(__version__="2.8.9"))


def test_an_ipex_with_other_operators_is_refused(monkeypatch):
    def operator(*names):
        return SimpleNamespace(
            default=SimpleNamespace(_schema=SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names]))
        )

    flash = operator("query", "key", "value", "dropout_p", "is_causal", "attention_mask", "scale")
    older = operator("query", "output", "kv_cache", "beam_idx", "attn_logits", "scaling", "offset")
    operators = SimpleNamespace(flash_attention=flash, decode_attention=older)
    monkeypatch.setattr(torch.ops, "torch_ipex", operators, raising=False)
    with pytest.raises(KernelError, match=r"torch_ipex\.decode_attention .* 2\.8\.9: expected parameters .* logit_cap, .* got"):
        ipex_load.inspect_ipex(SimpleNamespace(__version__="2.8.9"))


NOT_IMPORTED = """
import sys
import mla.compute.ipex, mla.compute.ipex_load
from mla import kernels_for
kernels_for("cpu")
mla.compute.ipex_load.read_environment()
assert "intel_extension_for_pytorch" not in sys.modules
"""


def test_nothing_is_imported_unless_asked():
    run_python(NOT_IMPORTED)


ISOLATED = """
import os, subprocess, sys
import torch, mla
from mla.compute import ipex

def kernels_of_aten():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {name: torch._C._dispatch_dump_table(name) for name in names}

def settings():
    return (torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.get_rng_state().sum().item(), dict(os.environ))

before, set_before = kernels_of_aten(), settings()
assert mla.kernels_for("cpu").name == "CPU_MLA"
assert kernels_of_aten() == before and "intel_extension_for_pytorch" not in sys.modules
assert mla.kernels_for("cpu", ipex=True).name == "CPU_MLA_IPEX"
after = kernels_of_aten()
changed = sorted(name for name in after if after[name] != before.get(name))
assert len(changed) == 27 and {"aten::matmul", "aten::cat", "aten::index_select", "aten::mean.dim"} <= set(changed), changed
assert settings() == set_before
assert "torch._inductor.async_compile" in sys.modules
children = [task for task in os.listdir("/proc") if task.isdigit() and
            open(f"/proc/{task}/stat").read().rpartition(")")[2].split()[1] == str(os.getpid())]
assert not children, children
print(ipex.diagnostic())
"""


@pytest.mark.ipex
def test_only_asking_changes_the_process():
    assert "intel-extension-for-pytorch 2.8" in run_python(ISOLATED)


# Case 87 of the list: the parameters of the seed's call changed from release to release.


@pytest.mark.parametrize("release", ipex_standin.VARLEN)
def test_case_87_the_call_fits_every_known_signature(release):
    function = ipex_standin.VARLEN[release]
    found = ipex_load.varlen_parameters(function, f"of {release}")
    assert ("alibi_slopes" in found) == (release == "2.8.0")
    made = ipex_load.Installed(
        flash_attention=None, decode_attention=None, varlen_attention=function, varlen_parameters=found, release=release
    )
    lengths = [5, 0, 1, 7]
    q, k, v = ragged(lengths, lengths, 3, F32)
    want = attend_ragged(reference.varlen_attention, q, k, v, lengths, lengths, causal=True)
    got = attend_ragged(
        ipex.ipex_prefill.functional_varlen_attention_by, q, k, v, lengths, lengths, causal=True, installed=made
    )
    assert_close(got, want[0], rel=1e-6)


def _misses(query, key, value, out, seqlen_q, seqlen_k, max_seqlen_q):
    pass


def _starts_otherwise(key, query, value, out, seqlen_q, seqlen_k):
    pass


def _wants_more(
    query, key, value, out, seqlen_q, seqlen_k, sinks, max_seqlen_q, max_seqlen_k, pdropout, softmax_scale, zero_tensors,
    is_causal, return_softmax, gen_,
):  # fmt: skip
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_misses, "varlen_attention of 2.9: expected a parameter max_seqlen_k, got query, "),
        (_starts_otherwise, "varlen_attention of 2.9: expected parameters query, .* first, got key, query"),
        (_wants_more, "varlen_attention of 2.9: expected no other parameter to be required, got sinks"),
    ],
)
def test_case_87_an_unknown_signature_is_refused(function, message):
    with pytest.raises(KernelError, match=message):
        ipex_load.varlen_parameters(function, "of 2.9")


# Prefill


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def ragged(query_lens, kv_lens, num_heads, dtype, *, dims=(192, 128), amp=1.0, seed=0):
    """Two rows of NaN behind the last sequence; values narrower than keys."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(sum(query_lens), dims[0]), (sum(kv_lens), dims[0]), (sum(kv_lens), dims[1])]
    filled = [torch.full((n + 2, num_heads, d), torch.nan, dtype=dtype) for n, d in sizes]
    for x, (n, d) in zip(filled, sizes, strict=True):
        x[:n] = torch.randn(n, num_heads, d, generator=generator).to(dtype)
    filled[0] *= amp
    return filled


def attend_ragged(function, q, k, v, query_lens, kv_lens, *, causal, scale=SCALE, installed=None):
    first = () if installed is None else (installed,)
    return function(
        *first,
        q,
        k,
        v,
        query_start_loc=cumulative(query_lens),
        kv_start_loc=cumulative(kv_lens),
        max_query_len=max([0, *query_lens]),
        max_kv_len=max([0, *kv_lens]),
        causal=causal,
        softmax_scale=scale,
    )


def on_this_processor(kernels, lse_abs):
    """The limit of an LSE, by what code IPEX has for the processor."""
    return lse_abs * (SCALAR_FACTOR if kernels.name == "CPU_MLA_IPEX" and not ipex_load.has_avx512_bf16() else 1)


def assert_attends_ragged(kernels, q, k, v, query_lens, kv_lens, *, causal, scale=SCALE, lse_abs=LSE):
    out, lse = attend_ragged(kernels.varlen_attention, q, k, v, query_lens, kv_lens, causal=causal, scale=scale)
    want = attend_ragged(reference.varlen_attention, q, k, v, query_lens, kv_lens, causal=causal, scale=scale)
    assert (out.dtype, lse.dtype) == (q.dtype, F32)
    assert out.is_contiguous()
    assert_close(out, want[0], rel=PREFILL_REL[q.dtype], name="out")
    assert_close(lse, want[1], abs=on_this_processor(kernels, lse_abs), name="lse")
    empty = want[1] == -torch.inf
    assert bool((out[empty] == 0).all())
    return out, lse


RAGGED = {
    "equal": ([7, 1, 33, 64, 16], [7, 1, 33, 64, 16]),
    "with a prefix": ([5, 1, 17, 40], [9, 30, 80, 41]),
    "with missing keys": ([9, 30, 4], [5, 1, 4]),
    "with empty ones": ([0, 5, 3, 0, 6, 0], [4, 0, 3, 0, 1, 2]),
    "long": ([70, 300], [600, 300]),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", RAGGED)
def test_prefill_equals_the_reference(kernels, name, causal, dtype):
    heads = 2 if name == "long" else 5
    query_lens, kv_lens = RAGGED[name]
    q, k, v = ragged(query_lens, kv_lens, heads, dtype, seed=len(name))
    assert_attends_ragged(kernels, q, k, v, query_lens, kv_lens, causal=causal)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_prefill_of_every_head_count(kernels, num_heads):
    lengths = ([9, 1], [13, 1])
    q, k, v = ragged(*lengths, num_heads, BF16, seed=num_heads)
    assert_attends_ragged(kernels, q, k, v, *lengths, causal=True)


@pytest.mark.parametrize("dims", [(192, 128), (24, 16), (7, 5), (16, 24), (1, 1), (6, 1)], ids=str)
def test_prefill_of_every_width(kernels, dims):
    for lengths in (([70, 3], [70, 5]), ([1, 65], [1, 90])):
        q, k, v = ragged(*lengths, 3, BF16, dims=dims, seed=dims[0])
        assert_attends_ragged(kernels, q, k, v, *lengths, causal=True, scale=0.3)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_prefill_takes_any_strides(kernels, dtype):
    lens = [6, 3]
    q, k, v = ragged(lens, lens, 4, dtype)
    q, k, v = q[:9], k[:9], v[:9]
    want = attend_ragged(kernels.varlen_attention, q, k, v, lens, lens, causal=True)

    def wide(x):
        return torch.full((*x.shape[:2], 2 * x.shape[2]), torch.nan, dtype=dtype)[..., ::2].copy_(x)

    def by_head(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def behind(x):
        return torch.cat([torch.full_like(x, torch.nan), x], dim=2)[..., x.shape[2] :]

    for layout in (wide, by_head, behind):
        got = attend_ragged(kernels.varlen_attention, layout(q), layout(k), layout(v), lens, lens, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    one = k[:, :1].expand(-1, 4, -1), v[:, :1].expand(-1, 4, -1)
    assert_attends_ragged(kernels, q, *one, lens, lens, causal=True)
    same = k[:1].expand(9, -1, -1), v[:1].expand(9, -1, -1)
    assert_attends_ragged(kernels, q, *same, lens, lens, causal=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill_of_nothing(kernels, causal):
    q, k, v = ragged([3], [2], 4, BF16)
    for query_lens, kv_lens in (([0, 0], [0, 0]), ([0], [2]), ([3], [0]), ([], [])):
        out, lse = attend_ragged(kernels.varlen_attention, q, k, v, query_lens, kv_lens, causal=causal)
        assert out.shape == (5, 4, 128)
        assert bool((out == 0).all())
        assert bool((lse == -torch.inf).all())
    out, lse = attend_ragged(kernels.varlen_attention, q[:, :0], k[:, :0], v[:, :0], [3], [2], causal=causal)
    assert (out.shape, lse.shape) == ((5, 0, 128), (5, 0))


def test_large_queries_and_sinks(kernels):
    lens = [80, 20]
    q, k, v = ragged(lens, lens, 4, BF16, amp=3.0)
    assert_attends_ragged(kernels, q, k, v, lens, lens, causal=True, lse_abs=SINK_LSE)
    q, k, v = ragged(lens, lens, 4, F32)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[50, :, 0] = 60 / SCALE / 8
    assert_attends_ragged(kernels, q, k, v, lens, lens, causal=False, lse_abs=SINK_LSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(q=a["q"].double()), "q: expected float32 or bfloat16 or float16, got torch.float64"),
        (lambda a: a.update(k=a["k"].half()), "k: expected bfloat16, got torch.float16"),
        (lambda a: a.update(v=a["v"][:1]), "v: expected shape .* got"),
        (lambda a: a.update(k=a["k"][..., :47]), "k: expected shape .* got"),
        (lambda a: a.update(q=a["q"].to("meta")), "q: expected device cpu, got meta"),
        (lambda a: a.update(query_lens=[6]), r"query_start_loc: expected ascending values from 0 to at most 5, got \[0, 6\]"),
        (lambda a: a.update(kv_lens=[8]), r"kv_start_loc: expected ascending values from 0 to at most 7, got \[0, 8\]"),
        (lambda a: a.update(query_lens=[3, -1], kv_lens=[4, 1]), r"query_start_loc: expected ascending .* got \[0, 3, 2\]"),
        (lambda a: a.update(kv_lens=[2, 3]), "kv_start_loc: expected shape .* got"),
        (lambda a: a.update(scale=float("nan")), "softmax_scale: expected a finite number > 0, got nan"),
    ],
)
def test_prefill_errors(kernels, installed, change, message):
    q, k, v = ragged([3], [5], 2, BF16)
    arguments = {"q": q, "k": k, "v": v, "query_lens": [3], "kv_lens": [5], "causal": False}
    change(arguments)
    with pytest.raises(KernelError, match=message):
        attend_ragged(kernels.varlen_attention, **arguments)
    with pytest.raises(KernelError, match=message):
        attend_ragged(ipex.ipex_prefill.functional_varlen_attention_by, **arguments, installed=installed)


# The seed's call


@pytest.mark.parametrize("scale", [192**-0.5, 0.135234])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_seeds_call_with_its_scale_corrected(installed, dtype, scale):
    lens = [40, 1, 7, 0, 64]
    q, k, v = ragged(lens, lens, 4, dtype)
    function = ipex.ipex_prefill.functional_varlen_attention_by
    out = attend_ragged(function, q, k, v, lens, lens, causal=True, scale=scale, installed=installed)
    want = attend_ragged(reference.varlen_attention, q, k, v, lens, lens, causal=True, scale=scale)[0]
    assert out.dtype == dtype
    assert_close(out, want, rel={F32: 2e-6, BF16: 6e-3}[dtype])
    kv_lens = [9, 3, 0, 5, 70]
    q, k, v = ragged(lens, kv_lens, 4, dtype)
    out = attend_ragged(function, q, k, v, lens, kv_lens, causal=False, scale=scale, installed=installed)
    want = attend_ragged(reference.varlen_attention, q, k, v, lens, kv_lens, causal=False, scale=scale)[0]
    assert_close(out, want, rel={F32: 2e-6, BF16: 6e-3}[dtype])
    assert bool((attend_ragged(function, q, k, v, [], [], causal=True, installed=installed) == 0).all())


def test_the_seeds_call_refuses_a_prefix(installed):
    q, k, v = ragged([2], [5], 2, BF16)
    with pytest.raises(KernelError, match=r"causal: expected as many keys as queries .* got query_start_loc \[0, 2\] and"):
        attend_ragged(ipex.ipex_prefill.functional_varlen_attention_by, q, k, v, [2], [5], causal=True, installed=installed)


# Decode


def latent_case(lengths, *, num_heads=16, query_lens=None, block_size=16, dims=(576, 512), seed=0, amp=1.0, **build):
    """q, cache and metadata of sequences in shuffled blocks of a cache that holds NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    cache = torch.full((sum(counts) + 2, block_size, dims[0]), torch.nan, dtype=BF16)
    groups = []
    for n, count, query_len in zip(lengths, counts, query_lens or [1] * len(lengths), strict=True):
        table = [order.pop() for _ in range(count)]
        groups.append(decode_group(n, table, query_len=query_len))
        for block, rows in zip(table, torch.randn(n, dims[0], generator=generator).to(BF16).split(block_size), strict=True):
            cache[block, : len(rows)] = rows
    metadata = build_metadata(groups, block_size=block_size, **build).decode
    q = torch.full((metadata.num_tokens, num_heads, dims[0]), torch.nan, dtype=BF16)
    tokens = int(metadata.query_start_loc[-1])
    q[:tokens] = (amp * torch.randn(tokens, num_heads, dims[0], generator=generator)).to(BF16)
    return q, cache, metadata


def assert_decodes(kernels, q, cache, metadata, *, rank=512, scale=SCALE, lse_abs=LSE):
    plan = kernels.plan(metadata)
    out, lse = kernels.paged_decode(q, cache, metadata, kv_lora_rank=rank, softmax_scale=scale, plan=plan)
    want_out, want_lse = reference.paged_decode(q, cache, metadata, kv_lora_rank=rank, softmax_scale=scale)
    assert (out.dtype, lse.dtype) == (BF16, F32)
    assert out.is_contiguous()
    assert_close(out, want_out, rel=DECODE_REL, name="out")
    assert_close(lse, want_lse, abs=on_this_processor(kernels, lse_abs), name="lse")
    assert bool((out[want_lse == -torch.inf] == 0).all())
    again = kernels.paged_decode(q, cache, metadata, kv_lora_rank=rank, softmax_scale=scale)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    return out, lse


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("num_heads", [1, 5, 16])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_decode_equals_the_reference(kernels, block_size, num_heads, query_len):
    lengths = [4, 15, 16, 17, 63, 64, 65, 130]
    case = latent_case(
        lengths, num_heads=num_heads, query_lens=[query_len] * 8, block_size=block_size, seed=query_len, pad_decodes_to=10
    )
    assert_decodes(kernels, *case)


@pytest.mark.parametrize("num_heads", [2, 17, 33, 128])
def test_decode_of_every_head_count(kernels, num_heads):
    assert_decodes(kernels, *latent_case([40, 3, 40], num_heads=num_heads, query_lens=[1, 2, 1], seed=num_heads))


def test_decode_of_no_head(kernels):
    q, cache, metadata = latent_case([5], num_heads=1)
    out, lse = kernels.paged_decode(q[:, :0], cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert (out.shape, lse.shape) == ((1, 0, 512), (1, 0))


@pytest.mark.parametrize(("num_heads", "length"), [(1, 511), (1, 512), (1, 513), (16, 1025), (5, 1700), (2, 35000)])
def test_decode_of_several_splits(kernels, num_heads, length):
    assert_decodes(kernels, *latent_case([length, 3], num_heads=num_heads, seed=length))


def test_no_split_is_empty():
    for length in (*range(1, 5000), *range(30000, 36000, 7), 10**6, 10**6 + 1):
        splits = ipex_decode.num_splits(length)
        size = -(-length // splits)
        assert (splits - 1) * size < length
        assert splits <= ipex_decode.MAX_SPLITS


def test_decode_of_one_head_and_every_short_length(kernels):
    assert_decodes(kernels, *latent_case(list(range(1, 140)), num_heads=1, seed=5))


@pytest.mark.parametrize("dims", [(22, 16), (48, 37), (7, 7), (64, 1)], ids=str)
def test_decode_of_every_width(kernels, dims):
    assert_decodes(kernels, *latent_case([70, 3, 9], dims=dims, num_heads=5, query_lens=[1, 3, 2]), rank=dims[1], scale=0.3)


def test_decode_of_large_queries_and_sinks(kernels):
    assert_decodes(kernels, *latent_case([700, 64], amp=3.0), lse_abs=SINK_LSE)
    for up in (20, 60, 120):
        q, cache, metadata = latent_case([600])
        q[..., 0] = 8
        cache[..., 0] = torch.where(cache[..., 0].isnan(), cache[..., 0], 0)
        cache[metadata.block_table[0, 11], 3, 0] = up / SCALE / 8
        assert_decodes(kernels, q, cache, metadata, lse_abs=SINK_LSE)


def test_decode_of_nothing_but_empty_rows(kernels):
    q, cache, metadata = latent_case([3], pad_decodes_to=3)
    zeros = torch.zeros(3, dtype=torch.int32)
    for record in (
        attrs.evolve(metadata, seq_lens=zeros, query_start_loc=torch.zeros(4, dtype=torch.int32)),
        attrs.evolve(metadata, seq_lens=zeros),
        attrs.evolve(metadata, seq_lens=zeros, max_seq_len=0),
    ):
        out, lse = kernels.paged_decode(q, cache, record, kv_lora_rank=512, softmax_scale=SCALE)
        assert bool((out == 0).all())
        assert bool((lse == -torch.inf).all())
    wide = torch.cat([q, torch.full_like(q, torch.nan)])
    out, lse = assert_decodes(kernels, wide, cache, metadata)
    assert bool((lse[1:] == -torch.inf).all())


def test_a_first_token_may_see_nothing(kernels):
    q, cache, metadata = latent_case([4], query_lens=[4])
    short = attrs.evolve(metadata, seq_lens=torch.tensor([2], dtype=torch.int32))
    _, lse = assert_decodes(kernels, q, cache, short)
    assert (lse[:, 0] == -torch.inf).tolist() == [True, True, False, False]


def test_groups_of_rows_change_no_bits(kernels, monkeypatch):
    q, cache, metadata = latent_case([70] * 5 + [5, 33], query_lens=[2] * 7)
    whole = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    monkeypatch.setattr(ipex_decode, "MAX_LOGIT_BYTES", 2 * 16 * 513 * 4)
    parts = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_a_plan_lists_the_slots_by_length(kernels):
    _, _, metadata = latent_case([20, 5, 20], query_lens=[2, 1, 1], block_size=4, pad_decodes_to=4)
    plan = kernels.plan(metadata)
    assert plan.metadata is metadata
    assert [(group.length, group.tokens.tolist()) for group in plan.groups] == [(5, [2]), (19, [0]), (20, [1, 3])]
    for group in plan.groups:
        assert group.slots.dtype == torch.int32
        for token, slots in zip(group.tokens.tolist(), group.slots.tolist(), strict=True):
            table = metadata.block_table[[0, 0, 1, 2][token]].tolist()
            assert slots == [table[p // 4] * 4 + p % 4 for p in range(group.length)]
    assert plan.num_blocks == metadata.min_num_blocks


def test_a_plan_serves_its_own_record_only(kernels):
    q, cache, metadata = latent_case([20, 5])
    for other in (object(), kernels.plan(attrs.evolve(metadata))):
        with pytest.raises(KernelError, match="plan: expected"):
            kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE, plan=other)
    assert kernels.plan(attrs.evolve(metadata, over_buffers=True)) is None


def with_block(metadata, block):
    table = metadata.block_table.clone()
    table[0, 1] = block
    return attrs.evolve(metadata, block_table=table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(metadata=with_block(a["metadata"], -1)), "block_table: expected blocks in 0.*, got -1"),
        (lambda a: a.update(metadata=with_block(a["metadata"], 9)), r"block_table: expected blocks in 0\.\.8, got 9"),
        (
            lambda a: a.update(metadata=with_block(a["metadata"], 2**31 - 1)),
            "block_table: expected blocks in 0.*, got 2147483647",
        ),
        (
            lambda a: a.update(metadata=attrs.evolve(a["metadata"], seq_lens=torch.tensor([200], dtype=torch.int32))),
            "block_table: expected at least 13 columns for 200 keys, got 7",
        ),
        (
            lambda a: a.update(metadata=attrs.evolve(a["metadata"], query_start_loc=torch.tensor([0, 5], dtype=torch.int32))),
            r"query_start_loc: expected ascending values in 0\.\.1, got \[0, 5\]",
        ),
        (
            lambda a: a.update(metadata=attrs.evolve(a["metadata"], query_start_loc=torch.tensor([1, 0], dtype=torch.int32))),
            r"query_start_loc: expected ascending values in 0\.\.1, got \[1, 0\]",
        ),
        (lambda a: a.update(metadata=a["metadata"].to("meta")), "metadata: expected device cpu, got meta"),
        (lambda a: a.update(metadata=None), "metadata: expected DecodeMetadata, got None"),
        (lambda a: a.update(q=a["q"].float()), "q: expected bfloat16, got torch.float32"),
        (lambda a: a.update(q=a["q"].half()), "q: expected bfloat16, got torch.float16"),
        (lambda a: a.update(q=a["q"].double()), "q: expected bfloat16, got torch.float64"),
        (lambda a: a.update(q=a["q"][..., :575]), "q: expected latent_dim 576 as in the cache, got 575"),
        (lambda a: a.update(q=a["q"][:0]), "q: expected at least 1 tokens, got 0"),
        (lambda a: a.update(q=a["q"][0]), "q: expected shape .* got"),
        (lambda a: a.update(latent_cache=a["latent_cache"].float()), "latent_cache: expected bfloat16 .* got torch.float32"),
        (lambda a: a.update(latent_cache=a["latent_cache"][:3]), "latent_cache: expected at least 9 blocks, got 3"),
        (lambda a: a.update(latent_cache=a["latent_cache"].view(-1, 8, 576)), "latent_cache: expected block size 16 .* got 8"),
        (lambda a: a.update(latent_cache=a["latent_cache"].to("meta")), "latent_cache: expected device cpu, got meta"),
        (
            lambda a: a.update(latent_cache=torch.empty(233017, 16, 576, dtype=BF16, device="meta")),
            r"latent_cache: expected at most 2147483648 numbers \(3728270 tokens\), .* got 2147484672",
        ),
        (lambda a: a.update(kv_lora_rank=577), "kv_lora_rank: expected 1 to latent_dim = 576, got 577"),
        (lambda a: a.update(softmax_scale=0.0), "softmax_scale: expected a finite number > 0, got 0.0"),
    ],
)
def test_decode_errors(kernels, change, message):
    q, cache, metadata = latent_case([100])
    metadata = attrs.evolve(metadata, min_num_blocks=9)
    arguments = {"q": q, "latent_cache": cache, "metadata": metadata, "kv_lora_rank": 512, "softmax_scale": SCALE}
    change(arguments)
    with pytest.raises(mla.MLAError, match=message):
        kernels.paged_decode(**arguments)


# The pipeline


def deepseek_dims(num_heads, *, yarn=None):
    rope = RopeSpec(dim=64, interleaved=True, yarn=yarn)
    return MLADims(num_heads=num_heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope=rope)


STEP = [
    Row(query_len=7),
    Row(query_len=5, context_len=37),
    Row(query_len=1, context_len=16),
    Row(query_len=3, context_len=2),
    Row(query_len=1, context_len=70, is_prompt=False),
    Row(query_len=3, context_len=20, is_prompt=False),
    Row(query_len=4, context_len=0, is_prompt=False),
]


def attended(batch, kernels):
    return mla.attend(
        batch.q,
        batch.kv_c,
        batch.k_pe,
        batch.latent_cache,
        batch.metadata,
        kv_b_proj=batch.kv_b_proj,
        dims=batch.dims,
        kernels=kernels,
        plan=None if batch.metadata.decode is None else kernels.plan(batch.metadata.decode),
    )


def assert_attends(batch, kernels, *, rel):
    out, lse = attended(batch, kernels)
    write_latent_cache_(batch.latent_cache, batch.kv_c, batch.k_pe, batch.metadata.slot_mapping)
    parts, first = [], 0
    for part in (batch.metadata.prefill, batch.metadata.decode):
        q = batch.q[first : first + part.num_tokens]
        first += part.num_tokens
        parts.append(reference.latent_attention(q, batch.latent_cache, part, kv_b_proj=batch.kv_b_proj, dims=batch.dims))
    want_out, want_lse = (torch.cat(both) for both in zip(*parts, strict=True))
    assert_close(out, want_out, rel=rel)
    assert_close(lse, want_lse, abs=2 * LSE_ABS[BF16])  # the queries and keys of the pipeline are rounded on the way
    assert bool((out[want_lse == -torch.inf] == 0).all())


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_attend_equals_the_reference(kernels, block_size):
    yarn = YarnSpec(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0)
    batch = make_batch(
        STEP,
        block_size=block_size,
        dtype=BF16,
        seed=block_size,
        dims=deepseek_dims(4, yarn=yarn),
        context_chunk_tokens=64 if block_size == 64 else 16,
        pad_decodes_to=5,
    )
    assert batch.dims.softmax_scale == pytest.approx(0.135234, rel=1e-5)
    assert batch.metadata.prefill.context_chunks
    assert_attends(batch, kernels, rel=8e-3)


def test_attend_with_small_and_odd_widths(kernels):
    batch = make_batch(STEP, block_size=3, dtype=BF16, seed=3, dims=small_dims(5), context_chunk_tokens=6, pad_decodes_to=4)
    assert_attends(batch, kernels, rel=8e-3)


def test_another_cache_or_dtype_is_refused_before_anything_is_written(kernels):
    for dtype, message in ((torch.float64, "float64"), (F32, "float32"), (F16, "float16")):
        batch = make_batch(STEP, block_size=4, dtype=dtype, seed=1)
        before = batch.latent_cache.clone()
        with pytest.raises(KernelError, match=f"q: expected bfloat16, got torch.{message}"):
            attended(batch, kernels)
        batch = make_batch(STEP, block_size=4, dtype=BF16, cache_dtype=dtype, seed=1)
        with pytest.raises(KernelError, match=f"latent_cache: expected bfloat16 .* got torch.{message}"):
            attended(batch, kernels)
        assert torch.equal(batch.latent_cache.isnan(), before.isnan())


def test_prompts_have_gradients(kernels):
    found = []
    for chosen, dtype in ((kernel_set("REFERENCE"), torch.float64), (kernels, BF16)):
        batch = make_batch([Row(query_len=7), Row(query_len=1)], block_size=4, dtype=dtype, seed=1)
        inputs = [x.requires_grad_() for x in (batch.q, batch.kv_c, batch.k_pe, batch.kv_b_proj)]
        found.append(torch.autograd.grad(attended(batch, chosen)[0].sum(), inputs))
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected, rel=2e-2)


def test_gradients_through_cached_rows_are_refused(kernels):
    batch = make_batch(STEP, block_size=4, dtype=BF16, seed=1)
    batch.q.requires_grad_()
    with pytest.raises(KernelError, match="q: expected no gradients through cached rows"):
        attended(batch, kernels)


def make_weights(num_heads=4, hidden_size=64):
    dims = deepseek_dims(num_heads)
    generator = torch.Generator().manual_seed(9)

    def matrix(rows, columns):
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(BF16)

    return MLAWeights(
        dims=dims,
        q_proj=matrix(num_heads * dims.qk_head_dim, hidden_size),
        kv_a_proj_with_mqa=matrix(dims.latent_dim, hidden_size),
        kv_a_layernorm=torch.ones(dims.kv_lora_rank, dtype=BF16),
        kv_b_proj=matrix(num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank),
        o_proj=matrix(hidden_size, num_heads * dims.v_head_dim),
    )


def test_a_layer_over_steps_with_a_reused_prefix(kernels):
    """A prompt; a second one on its first two blocks; both decode, one with three tokens; a prompt continues in chunks."""
    weights = make_weights()
    steps = [
        [prompt_group(40, [5, 2, 7])],
        [prompt_group(9, [5, 2, 1], context_len=32)],
        [decode_group(41, [5, 2, 7]), decode_group(44, [5, 2, 1], query_len=3)],
        [prompt_group(20, [5, 2, 7, 0], context_len=41)],
    ]
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(n, 64, generator=generator).to(BF16) for n in (40, 9, 4, 20)]

    def run(kernels, dtype):
        cache = torch.full((8, 16, 576), torch.nan, dtype=dtype)
        wide = weights.to(dtype=dtype)
        table = rope_table(wide.dims.rope, 128, dtype=torch.float64)
        outs = []
        for groups, tokens in zip(steps, hidden, strict=True):
            metadata = build_metadata(groups, block_size=16, context_chunk_tokens=16)
            outs.append(mla_attention(tokens.to(dtype), wide, cache, metadata, table, kernels)[0])
        return torch.cat(outs)

    want = run(kernel_set("REFERENCE"), torch.float64)
    error = {name: _relative(run(made, BF16), want) for name, made in (("ipex", kernels), ("plain", kernel_set("CPU_MLA")))}
    assert error["ipex"] < 1.1e-2
    assert error["ipex"] < 1.2 * error["plain"]


def _relative(x, want):
    return float((x.double() - want).norm() / want.norm())


# Bits


def test_bits_do_not_depend_on_batch_mates(kernels):
    q, cache, metadata = latent_case([600, 5, 77, 77], query_lens=[1, 1, 3, 1], pad_decodes_to=6)
    out, lse = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    for seq, tokens, length in ((0, slice(0, 1), 600), (2, slice(2, 5), 77)):
        table = metadata.block_table[seq, : -(-length // 16)].tolist()
        alone = build_metadata([decode_group(length, table, query_len=tokens.stop - tokens.start)], block_size=16).decode
        got = kernels.paged_decode(q[tokens].clone(), cache, alone, kv_lora_rank=512, softmax_scale=SCALE)
        assert torch.equal(got[0], out[tokens])
        assert torch.equal(got[1], lse[tokens])
    lens = [70, 5, 130]
    q, k, v = ragged(lens, lens, 4, BF16)
    out, lse = attend_ragged(kernels.varlen_attention, q, k, v, lens, lens, causal=True)
    first = 0
    for n in lens:
        rows = slice(first, first + n)
        got = attend_ragged(kernels.varlen_attention, q[rows].clone(), k[rows].clone(), v[rows].clone(), [n], [n], causal=True)
        assert torch.equal(got[0], out[rows])
        assert torch.equal(got[1], lse[rows])
        first += n


@pytest.mark.ipex
def test_bits_do_not_depend_on_the_number_of_threads():
    """Those of prefill do beyond 16 threads: IPEX then leaves out packing the keys of short sequences."""
    kernels = ipex.make_kernel_set()
    q, cache, metadata = latent_case([600, 5, 77, 77, 2000], query_lens=[1, 1, 3, 1, 1], num_heads=40)
    lens = [1, 20, 65, 100, 200]
    prompts = ragged(lens, lens, 32, BF16)
    made = []
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        decoded = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
        made.append((*decoded, *attend_ragged(kernels.varlen_attention, *prompts, lens, lens, causal=True)))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, made[0], strict=True))


# The public functions, which import IPEX themselves


@pytest.mark.ipex
def test_the_functions_without_a_set():
    made = ipex.make_kernel_set()
    assert ipex.load_ipex() is sys.modules[ipex_load.MODULE]
    lens = [5, 3]
    q, k, v = ragged(lens, lens, 2, BF16)
    got, want = (attend_ragged(f, q, k, v, lens, lens, causal=True) for f in (ipex.varlen_attention, made.varlen_attention))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_close(attend_ragged(ipex.functional_varlen_attention, q, k, v, lens, lens, causal=True), want[0].double(), rel=6e-3)
    q, cache, metadata = latent_case([20, 5])
    options = {"kv_lora_rank": 512, "softmax_scale": SCALE}
    got, want = (f(q, cache, metadata, **options) for f in (ipex.paged_decode, made.paged_decode))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


SLOW = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import test_ipex as t
made = t.ipex.make_kernel_set()
t.assert_decodes(made, *t.latent_case([70, 3], num_heads=5, query_lens=[2, 1]))
q, k, v = t.ragged([20, 3], [25, 3], 3, t.BF16)
t.assert_attends_ragged(made, q, k, v, [20, 3], [25, 3], causal=True)
"""


@pytest.mark.ipex
def test_the_kernels_for_older_processors_hold_the_tolerances_too():
    run_python(SLOW, str(Path(__file__).parent), ATEN_CPU_CAPABILITY="avx2")
